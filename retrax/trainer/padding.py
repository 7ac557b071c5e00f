"""Padding a batch with rows that do not count, so that it divides over the devices."""

from __future__ import annotations

from typing import Any

import numpy as np

from retrax.data.shares import Shard, own_rows
from retrax.layers.running import PER_EXAMPLE_PREFIX

__all__ = ["cut_rows", "divides", "pad_rows"]


def divides(n_rows: int, pieces: int) -> bool:
    """Whether a batch divides into equal pieces, of all processes together."""
    return n_rows % pieces == 0


def pad_rows(
    batch: tuple[Any, ...], pieces: int, shard: Shard = (0, 1)
) -> tuple[tuple[Any, ...], np.ndarray | None]:
    """Returns (rows of this process, row mask: 1 where a row is real).

    Rows of zeros are added until all processes have equally many, and the pieces of
    each are equal. The mask is None where nothing had to be added anywhere.

    Args:
      batch: tuple of arrays with a common first axis; all rows, of which only those of
        this process need be there.
      pieces: how many pieces the whole batch is cut into, equally many by each process.
      shard: (i, n), this process's number and how many there are.

    Example:
      >>> batch, mask = pad_rows((np.ones((2, 3)),), 3)
      >>> batch[0].shape, mask.tolist()
      ((3, 3), [1.0, 1.0, 0.0])
    """
    n_rows = batch[0].shape[0]
    own = own_rows(n_rows, shard)
    if shard[1] > 1:
        batch = tuple(np.asarray(x)[own] for x in batch)
    if divides(n_rows, pieces):
        return batch, None
    n_real = own.stop - own.start
    n_pad = _rows_each(n_rows, pieces, shard[1]) - n_real
    padded = tuple(
        np.pad(np.asarray(x), [(0, n_pad)] + [(0, 0)] * (np.ndim(x) - 1)) for x in batch
    )
    return padded, (np.arange(n_real + n_pad) < n_real).astype(np.float32)


def cut_rows(
    out: dict[str, Any], n_rows: int, pieces: int, n_shards: int = 1
) -> dict[str, Any]:
    """Leaves out what padding gave, in values that have one entry for each row."""
    if divides(n_rows, pieces):
        return out
    if n_shards == 1:
        real: Any = slice(n_rows)
    else:
        each = _rows_each(n_rows, pieces, n_shards)
        shares = [own_rows(n_rows, (i, n_shards)) for i in range(n_shards)]
        real = np.concatenate(
            [i * each + np.arange(s.stop - s.start) for i, s in enumerate(shares)]
        )
    return {
        name: x[real] if name.startswith(PER_EXAMPLE_PREFIX) else x
        for name, x in out.items()
    }


def _rows_each(n_rows: int, pieces: int, n_shards: int) -> int:
    """Rows of each process, padding included."""
    most = -(-n_rows // n_shards)
    return most + -most % (pieces // n_shards)

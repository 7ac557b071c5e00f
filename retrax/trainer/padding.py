"""Padding a batch with rows that do not count."""

from __future__ import annotations

from typing import Any

import numpy as np

from retrax.layers.running import PER_EXAMPLE_PREFIX

__all__ = ["cut_rows", "pad_rows"]


def pad_rows(batch: tuple[Any, ...], n: int) -> tuple[tuple[Any, ...], np.ndarray]:
    """Returns (batch with n more rows of zeros, row mask: 1 where a row is real).

    Example:
      >>> batch, mask = pad_rows((np.ones((2, 3)),), 1)
      >>> batch[0].shape, mask.tolist()
      ((3, 3), [1.0, 1.0, 0.0])
    """
    rows = batch[0].shape[0]
    padded = tuple(
        np.pad(np.asarray(x), [(0, n)] + [(0, 0)] * (np.ndim(x) - 1)) for x in batch
    )
    return padded, (np.arange(rows + n) < rows).astype(np.float32)


def cut_rows(out: dict[str, Any], n: int) -> dict[str, Any]:
    """Leaves out what padding gave, in values that have one entry for each row."""
    return {
        name: x[:n] if name.startswith(PER_EXAMPLE_PREFIX) else x
        for name, x in out.items()
    }

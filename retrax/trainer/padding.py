"""Padding a batch with rows that do not count."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["pad_rows"]


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

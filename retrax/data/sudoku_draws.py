"""Random numbers for Sudoku data: the same ones in every version of NumPy.

Needs NumPy only. NumPy promises the raw bits of a bit generator for ever, but not what
its distributions make of them.
"""

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["Draws"]


class Draws:
    """Draws numbers and permutations; all are fixed by the seeds.

    >>> Draws(1, 2).random((2,)) == Draws(1, 2).random((2,))
    array([ True,  True])
    """

    def __init__(self, *seeds: int) -> None:
        """Begins a sequence for non-negative integers."""
        self._bits = np.random.PCG64([int(seed) for seed in seeds])

    def random(self, shape: Sequence[int]) -> np.ndarray:
        """Returns float64 numbers, uniform in [0, 1)."""
        raw = self._bits.random_raw(max(math.prod(shape), 1))
        numbers = (raw >> np.uint64(11)) * 2.0**-53
        return numbers[: math.prod(shape)].reshape(shape)

    def integers(self, low: int, high: int, shape: Sequence[int]) -> np.ndarray:
        """Returns int64 numbers, uniform in [low, high)."""
        return low + np.floor(self.random(shape) * (high - low)).astype(np.int64)

    def orders(self, *shape: int) -> np.ndarray:
        """Returns permutations of 0 to shape[-1] - 1, along the last axis."""
        return np.argsort(self.random(shape), axis=-1, kind="stable")

"""Sudoku boards of any size, and grids of candidate sets on them.

First of the Sudoku modules of `retrax.data`. A grid is an array of bit masks, one for
each cell: bit d - 1 is set while digit d is possible there.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from retrax.errors import DataError

__all__ = ["Board", "board", "of_cells", "singles"]


@dataclasses.dataclass(frozen=True, eq=False)
class Board:
    """The cells and units (rows, columns, boxes) of boards of one size.

    Attributes:
      box: side of a box.
      n: side of the grid, box * box; also the number of digits.
      cells: number of cells, n * n.
      full: mask of all digits.
      dtype: of masks.
      units: (n, 3n) int: for each place in a unit the cells of all units; the rows come
        first, then the columns, then the boxes.
      units_of: (3, cells) int: the row, column and box of each cell, as units.
    """

    box: int
    n: int
    cells: int
    full: int
    dtype: Any
    units: np.ndarray
    units_of: np.ndarray

    def masks(self, clues: np.ndarray) -> np.ndarray:
        """Returns masks (..., cells) of digits, all digits where a digit is 0."""
        table = np.array([self.full, *(1 << d for d in range(self.n))], self.dtype)
        return table[clues]

    def digits(self, masks: np.ndarray) -> np.ndarray:
        """Returns the digit of each mask that holds one, as int8; 0 for the others."""
        single = singles(masks)
        return np.where(single, np.bitwise_count(single - 1) + 1, 0).astype(np.int8)

    def checked(self, clues: Any) -> np.ndarray:
        """Returns puzzles (n_puzzles, cells) as int8, from one puzzle or several.

        Raises:
          DataError: the shape is another, or a value is no digit.
        """
        grids = np.asarray(clues)
        if grids.ndim and grids.size and grids.size % self.cells == 0:
            one = grids.size == self.cells
            if (
                one
                or grids.shape[-1] == self.cells
                or grids.shape[-2:] == (self.n,) * 2
            ):
                grids = grids.reshape(-1, self.cells)
        if grids.ndim != 2 or grids.shape[1] != self.cells:
            raise DataError(
                f"puzzles of box {self.box} have {self.cells} cells, got an array of "
                f"shape {np.shape(clues)}."
            )
        wrong = (grids < 0) | (grids > self.n) | (grids != np.floor(grids))
        if wrong.any():
            i, cell = np.argwhere(wrong)[0]
            raise DataError(
                f"puzzle {i} holds {grids[i, cell]} at cell {cell}; digits are 1 to "
                f"{self.n}, and 0 stands for an empty cell."
            )
        return grids.astype(np.int8)


@functools.cache
def board(box: int) -> Board:
    """Returns the board with boxes of box times box cells.

    Raises:
      ValueError: box is below 2 or above 5.

    >>> board(3).n, board(2).cells
    (9, 16)
    """
    if box not in range(2, 6):
        raise ValueError(f"box must be 2, 3, 4 or 5 (sides 4 to 25), got {box!r}.")
    n = box * box
    row, column = np.divmod(np.arange(n * n), n)
    boxes = row // box * box + column // box
    units_of = np.stack([row, n + column, 2 * n + boxes])
    units = np.stack([np.nonzero((units_of == u).any(0))[0] for u in range(3 * n)])
    dtype = np.uint16 if n <= 16 else np.uint32
    return Board(box, n, n * n, (1 << n) - 1, dtype, units.T.copy(), units_of)


def singles(masks: np.ndarray) -> np.ndarray:
    """The masks that hold one digit; 0 for the others."""
    return np.where(masks & (masks - 1), 0, masks).astype(masks.dtype)


def of_cells(of_units: np.ndarray, board: Board) -> np.ndarray:
    """Joins for each cell what its units hold: (units, n_grids) -> (cells, n_grids)."""
    row, column, box = board.units_of
    return of_units[row] | of_units[column] | of_units[box]

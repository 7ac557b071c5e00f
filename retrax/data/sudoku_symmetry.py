"""What turns a Sudoku into another one: exact symmetries, and telling copies apart.

Above `sudoku_format`, under `sudoku`. Digits may be renamed; rows may change places
within a band, bands as a whole, columns and stacks likewise; and rows may become
columns. Candidate sets change alike, so elimination and symmetries commute.
"""

import dataclasses
import functools
import itertools

import numpy as np

from retrax.data.sudoku_board import board
from retrax.data.sudoku_draws import Draws
from retrax.data.sudoku_format import Puzzles

__all__ = ["Symmetries", "canonical", "patterns", "random_symmetries", "split"]


@dataclasses.dataclass(frozen=True, eq=False)
class Symmetries:
    """One symmetry for each of several puzzles.

    Attributes:
      cells: (n, cells) int; the new grid has at cell i what the old has at cells[i].
      digits: (n, sides + 1) int; digit d becomes digits[d], and 0 stays.
    """

    cells: np.ndarray
    digits: np.ndarray

    def moved(self, x: np.ndarray) -> np.ndarray:
        """Moves what belongs to cells: x: (n, ..., cells)."""
        cells = self.cells.reshape(len(x), *(1,) * (x.ndim - 2), -1)
        return np.take_along_axis(x, cells, axis=-1)

    def grids(self, x: np.ndarray) -> np.ndarray:
        """Moves and renames digits: x: (n, cells)."""
        return np.take_along_axis(self.digits, self.moved(x), axis=1).astype(x.dtype)

    def masks(self, x: np.ndarray) -> np.ndarray:
        """Moves and renames candidate sets: x: (n, ..., cells)."""
        x, out = self.moved(x), 0
        places = (self.digits - 1).astype(x.dtype)
        for d in range(1, self.digits.shape[1]):
            to = places[:, d].reshape(-1, *(1,) * (x.ndim - 1))
            out = out | ((x >> (d - 1)) & 1) << to
        return np.asarray(out, x.dtype)


def random_symmetries(n: int, box: int, draws: Draws) -> Symmetries:
    """Draws n symmetries, all equally likely."""
    side = box * box

    def lines() -> np.ndarray:
        bands, within = draws.orders(n, box), draws.orders(n, box, box)
        return (bands[:, :, None] * box + within).reshape(n, side)

    cells = lines()[:, :, None] * side + lines()[:, None, :]
    flip = draws.random((n,)) < 0.5
    cells = np.where(flip[:, None, None], cells.swapaxes(1, 2), cells)
    digits = np.pad(draws.orders(n, side) + 1, ((0, 0), (1, 0)))
    return Symmetries(cells.reshape(n, -1), digits)


def split(puzzles: Puzzles, n_eval: int, seed: int = 0) -> tuple[Puzzles, Puzzles]:
    """Holds puzzles out, so that none is a symmetric copy of one to train on.

    All puzzles with one pattern of clues (see `patterns`) go to the same side, so the
    patterns of held-out puzzles are never trained on, and no two held-out puzzles are
    copies of each other.

    Args:
      puzzles: all of them.
      n_eval: how many to hold out.
      seed: non-negative; it chooses the patterns.

    Returns:
      (puzzles to train on, puzzles to evaluate on).

    Raises:
      ValueError: there are too few different puzzles.
    """
    _, pattern = np.unique(patterns(puzzles), return_inverse=True)
    _, unlike = np.unique(canonical(puzzles), return_index=True)
    first = np.zeros(len(puzzles), bool)
    first[unlike] = True
    n_patterns = int(pattern.max()) + 1
    order = Draws(seed, 0x73706C74).orders(n_patterns)
    found = np.bincount(pattern, weights=first, minlength=n_patterns)[order].cumsum()
    n_held = int(np.searchsorted(found, n_eval)) + 1
    held_out = np.isin(pattern, order[:n_held])
    evaluation = np.nonzero(held_out & first)[0][:n_eval]
    if len(evaluation) < n_eval or held_out.all():
        raise ValueError(
            f"{len(puzzles)} puzzles hold {int(first.sum())} that are no symmetric "
            f"copies, in {n_patterns} patterns of clues; too few to hold out n_eval="
            f"{n_eval} and to train on others. Make more puzzles."
        )
    return puzzles[~held_out], puzzles[evaluation]


def patterns(puzzles: Puzzles) -> np.ndarray:
    """Returns a name for the pattern of clues of each puzzle, up to symmetry.

    For 4x4 the same name means the same pattern, exactly. For larger grids it is made
    of numbers of clues (by row in band, column in stack, box and digit), which
    symmetries keep: unlike patterns may share a name, copies always do.

    Returns:
      (n_puzzles,) int or text.
    """
    if puzzles.box == 2:
        where = (puzzles.clues != 0)[:, _all_moves(2)]
        return (where @ (1 << np.arange(16))).min(axis=1)
    return np.array([_counts(grid, puzzles.box) for grid in puzzles.clues])


def canonical(puzzles: Puzzles) -> np.ndarray:
    """Returns a name for each puzzle; symmetric copies have the same.

    For 4x4 others never have; for larger grids it is that of `patterns`.
    """
    if puzzles.box != 2:
        return patterns(puzzles)
    moved = puzzles.clues[:, _all_moves(2)].astype(np.int64)
    # Digits are named in the order in which they come first.
    firsts = [
        np.where((moved == d).any(-1), (moved == d).argmax(-1), 16 + d)
        for d in range(1, 5)
    ]
    names = np.stack(firsts, -1).argsort(-1).argsort(-1) + 1
    names = np.pad(names, ((0, 0), (0, 0), (1, 0)))
    renamed = np.take_along_axis(names, moved, axis=2)
    return (renamed @ 5 ** np.arange(16)).min(axis=1)


@functools.cache
def _all_moves(box: int) -> np.ndarray:
    """(n_moves, cells): all symmetries of places, as `Symmetries.cells`."""
    side, orders = box * box, list(itertools.permutations(range(box)))
    lines = [
        [
            band * box + place
            for band, places in zip(bands, within, strict=True)
            for place in places
        ]
        for bands in orders
        for within in itertools.product(orders, repeat=box)
    ]
    grids = [np.add.outer(np.array(r) * side, c) for r in lines for c in lines]
    return np.array([g.ravel() for grid in grids for g in (grid, grid.T)])


def _counts(clues: np.ndarray, box: int) -> str:
    b = board(box)
    there = clues != 0
    in_units = there[b.units].sum(0).reshape(3, b.n)
    lines = sorted(
        sorted(sorted(band) for band in kind.reshape(box, box).tolist())
        for kind in in_units[:2]
    )
    digits = sorted(np.bincount(clues, minlength=b.n + 1)[1:].tolist())
    return str((lines, sorted(in_units[2].tolist()), digits))

"""Sudoku by candidate sets: waves of elimination, search, solutions.

Above `sudoku_board`. Everything is computed for many grids at once; inside, arrays are
(cells, grids), so that each operation runs along the grids.
"""

from typing import Any

import numpy as np

from retrax.data.sudoku_board import Board, board, of_cells, singles
from retrax.data.sudoku_strong import ruled_out
from retrax.errors import DataError

__all__ = ["search", "solve", "stages", "wave"]


def solve(clues: Any, box: int = 3) -> np.ndarray:
    """Returns the solution of puzzles that have one and only one.

    Args:
      clues: (cells,), (n, n), (n_puzzles, cells) or (n_puzzles, n, n) int; 0 is an
        empty cell.
      box: side of a box; 3 for the usual 9x9.

    Returns:
      int8 of the shape of `clues`.

    Raises:
      DataError: a puzzle has no solution, or several; says which puzzle.

    >>> solve([[1, 0, 0, 0], [0, 0, 3, 0], [0, 1, 0, 0], [0, 0, 0, 2]], box=2).tolist()
    [[1, 3, 2, 4], [4, 2, 3, 1], [2, 1, 4, 3], [3, 4, 1, 2]]
    """
    b = board(box)
    grids = b.checked(clues)
    counts, found = search(b.masks(grids), b, limit=2)
    for i in np.nonzero(counts != 1)[0]:
        if counts[i] == 0:
            raise DataError(
                f"puzzle {i} has no solution: its clues contradict each other."
            )
        raise DataError(
            f"puzzle {i} has several solutions: its {np.count_nonzero(grids[i])} clues "
            "do not fix the rest."
        )
    return found.reshape(np.shape(clues))


def stages(
    clues: Any, box: int = 3, strong: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the candidate sets of puzzles after each wave of elimination.

    Stage 0 takes from each empty cell the digits of clues in its row, column and box.
    One `wave` leads from a stage to the next; the last stage is one that a wave no
    longer changes.

    Args:
      clues: (n_puzzles, cells) int, or one puzzle; 0 is an empty cell.
      box: side of a box.
      strong: see `wave`.

    Returns:
      (grids, n_stages): int32 masks (total, cells), all stages of the first puzzle,
      then all of the second, ..., with 0 at the cells of clues; and int64 (n_puzzles,),
      how many of them belong to each puzzle.

    >>> grids, n = stages([[1, 0, 0, 0], [0, 0, 3, 0], [0, 1, 0, 0], [0, 0, 0, 2]], 2)
    >>> n.tolist(), grids[0].tolist()[:4]
    ([3], [0, 14, 10, 8])
    """
    b = board(box)
    puzzles = b.checked(clues)
    empty = (puzzles == 0).T
    grid = b.masks(puzzles).T.copy()
    given = np.where(empty, 0, grid)
    grid = np.where(empty, grid & ~of_cells(_taken(given, b), b), grid)
    each = [(np.arange(grid.shape[1]), np.where(empty, grid, 0))]
    active = each[0][0]
    while active.size:
        new, _ = wave(grid, b, strong)
        changed = (new != grid).any(0)
        active, grid = active[changed], new[:, changed]
        each.append((active, np.where(empty[:, active], grid, 0)))
    owners = np.concatenate([owner for owner, _ in each])
    order = np.argsort(owners, kind="stable")
    grids = np.concatenate([grid.T for _, grid in each])[order]
    return grids.astype(np.int32), np.bincount(owners, minlength=len(puzzles))


def wave(
    grid: np.ndarray, board: Board, strong: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Eliminates candidates once, everywhere at the same time.

    Only the old grid is read. A cell with several candidates loses those that are the
    single candidate of a cell in one of its units; and a digit that has one possible
    cell in a unit reduces that cell to it.

    Args:
      grid: (cells, n_grids) masks, clues as masks of one digit.
      board: their board.
      strong: also takes candidates out by locked candidates (a digit that lies on one
        line within a box, or in one box within a line) and naked pairs.

    Returns:
      (new grid, broken): bool (n_grids,), whether a cell or a digit of a unit has no
      place left in the old grid.
    """
    taken = of_cells(_taken(singles(grid), board), board)
    once = np.zeros((3 * board.n, grid.shape[1]), grid.dtype)
    twice = once.copy()
    for cells in board.units:
        here = grid[cells]
        twice |= once & here
        once |= here
    lone = grid & of_cells(once & ~twice, board)
    several = grid & (grid - 1) != 0
    new = np.where(several, grid & ~taken, grid)
    if strong:
        new &= ~np.where(several, ruled_out(grid, board), 0)
    # Two digits that have this one cell contradict each other: none is left.
    new = np.where(lone, np.where(lone & (lone - 1), 0, new & lone), new)
    broken = (once != board.full).any(0) | (grid == 0).any(0)
    return new.astype(grid.dtype), broken


def search(
    masks: np.ndarray, board: Board, limit: int = 2, draws: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Counts solutions by elimination and depth-first search, up to a limit.

    Each branching is at a cell with the fewest candidates.

    Args:
      masks: (n_grids, cells) candidates, as of `Board.masks`.
      board: their board.
      limit: stop looking in a grid that has so many solutions.
      draws: `draws.random(shape)` gives numbers in [0, 1); cells and digits are then
        tried in random order, else the first ones first.

    Returns:
      (counts, solutions): int64 (n_grids,), and int8 (n_grids, cells) with the first
      solution found, zeros if there is none.
    """
    n = len(masks)
    counts, found = np.zeros(n, np.int64), np.zeros((n, board.cells), np.int8)
    owners, stack = np.arange(n), [masks.T.astype(board.dtype)]
    levels = [owners]
    # A level of the stack holds for some grids what is still to be tried there; all
    # grids of the last level go on together.
    while stack:
        owners, grid = levels.pop(), stack.pop()
        going = counts[owners] < limit
        owners, grid = owners[going], grid[:, going]
        if not owners.size:
            continue
        grid, alive = _settled(grid, board)
        owners, grid = owners[alive], grid[:, alive]
        size = np.bitwise_count(grid)
        solved = (size == 1).all(0)
        first = solved & (counts[owners] == 0)
        found[owners[first]] = board.digits(grid[:, first].T)
        counts[owners[solved]] += 1
        owners, grid, size = owners[~solved], grid[:, ~solved], size[:, ~solved]
        if owners.size:
            rest, chosen = _branches(grid, size, board, draws)
            levels += [owners, owners]
            stack += [rest, chosen]
    return counts, found


# --- Helpers: all take (cells, n_grids) ---------------------------------------------


def _taken(single: np.ndarray, board: Board) -> np.ndarray:
    """(units, n_grids): the digits that cells of each unit hold for certain."""
    taken = single[board.units[0]]
    for cells in board.units[1:]:
        taken |= single[cells]
    return taken


def _settled(grid: np.ndarray, board: Board) -> tuple[np.ndarray, np.ndarray]:
    """Runs waves until nothing changes; returns (grid, which grids can have solutions).

    A cell set twice to a digit leaves some other digit of the unit without a place.
    """
    grid = grid.copy()
    alive = np.ones(grid.shape[1], bool)
    active = np.arange(grid.shape[1])
    now = grid
    while active.size:
        new, broken = wave(now, board)
        changed = (new != now).any(0) & ~broken
        alive[active[broken]] = False
        grid[:, active] = new
        active, now = active[changed], new[:, changed]
    return grid, alive


def _branches(
    grid: np.ndarray, size: np.ndarray, board: Board, draws: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (grids without one candidate, grids with it alone) of one cell each."""
    grids = np.arange(grid.shape[1])
    rank = np.where(size > 1, size, board.n + 1).astype(np.float64)
    if draws is not None:
        rank += draws.random(rank.shape)
    cell = rank.argmin(0)
    mask = grid[cell, grids]
    if draws is None:
        digit = mask & (~mask + 1)
    else:
        bits = mask & (1 << np.arange(board.n, dtype=grid.dtype))[:, None]
        which = np.where(bits, draws.random(bits.shape), -1).argmax(0)
        digit = bits[which, grids]
    rest, chosen = grid.copy(), grid.copy()
    rest[cell, grids] = mask & ~digit
    chosen[cell, grids] = digit
    return rest, chosen

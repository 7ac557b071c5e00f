"""Making Sudoku puzzles with one solution: `generate`.

Above `sudoku_format` and `sudoku_solver`, under `sudoku`. A random full grid is found
by search; then clues are taken out in random order while the solution stays the only
one. Puzzles are made in chunks, each from the seed and its number alone, so that the
number of processes changes nothing.
"""

import hashlib
import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from absl import logging

from retrax.data.sudoku_board import Board, board
from retrax.data.sudoku_draws import Draws
from retrax.data.sudoku_format import Puzzles, read_cache, write_cache
from retrax.data.sudoku_solver import search
from retrax.errors import DataError

__all__ = ["generate"]

_CHUNK = 256
_MAX_ROUNDS = 50
_VERSION = 1  # Of the puzzles that a seed gives; part of the cache's file names.


def generate(
    n_puzzles: int,
    box: int = 3,
    n_clues: int | tuple[int, int] = (30, 36),
    seed: int = 0,
    workers: int = 0,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Puzzles:
    """Makes random puzzles that have one solution each.

    Args:
      n_puzzles: how many.
      box: side of a box; 2 makes 4x4 grids, 3 the usual 9x9.
      n_clues: number of clues, or (least, most): each number is aimed at equally often.
        Grids that cannot be dug so far are dropped, so low numbers come less often.
      seed: non-negative; it fixes all puzzles.
      workers: number of processes; 0 makes them here. A script that asks for some needs
        the usual `if __name__ == "__main__":`.
      cache_dir: directory to keep the puzzles in, with a checksum; a second call with
        the same arguments reads them.

    Raises:
      ValueError: an argument is out of range.
      DataError: hardly any grid can be dug to so few clues.

    >>> puzzles = generate(3, box=2, n_clues=(5, 7))
    >>> puzzles.clues.shape, puzzles.solutions.min(), puzzles.n_clues.max() <= 7
    ((3, 16), np.int8(1), np.True_)
    """
    b = board(box)
    low, high = (n_clues, n_clues) if isinstance(n_clues, int) else n_clues
    if not 0 < low <= high <= b.cells:
        raise ValueError(
            f"n_clues must be 1 to {b.cells}, the least first, got {n_clues!r}."
        )
    if n_puzzles < 1 or seed < 0 or workers < 0:
        raise ValueError(
            "generate needs n_puzzles >= 1, seed >= 0 and workers >= 0, got n_puzzles="
            f"{n_puzzles}, seed={seed}, workers={workers}."
        )
    path = None
    if cache_dir is not None:
        what = f"{_VERSION} {n_puzzles} {box} {low} {high} {seed}"
        name = hashlib.sha256(what.encode()).hexdigest()[:16]
        path = Path(cache_dir) / f"sudoku{b.n}_{n_puzzles}_{name}.bank"
        try:
            return read_cache(path, box)
        except FileNotFoundError:
            pass
        except DataError as e:
            logging.warning("%s The puzzles are made anew.", e)
    puzzles = _generated(n_puzzles, box, (low, high), seed, workers)
    if path is not None:
        write_cache(path, puzzles)
    return puzzles


def _generated(
    n_puzzles: int, box: int, n_clues: tuple[int, int], seed: int, workers: int
) -> Puzzles:
    sizes = [min(_CHUNK, n_puzzles - i) for i in range(0, n_puzzles, _CHUNK)]
    arguments = [(n, box, n_clues, seed, i) for i, n in enumerate(sizes)]
    if workers and len(sizes) > 1:
        # Spawned, since a fork would copy the threads that JAX may have started.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(workers, len(sizes)), context) as pool:
            chunks = list(pool.map(_chunk, *zip(*arguments, strict=True)))
    else:
        chunks = list(itertools.starmap(_chunk, arguments))
    clues, solutions = map(np.concatenate, zip(*chunks, strict=True))
    return Puzzles(box, clues, solutions)


def _chunk(
    n: int, box: int, n_clues: tuple[int, int], seed: int, number: int
) -> tuple[np.ndarray, np.ndarray]:
    """Makes the puzzles of one chunk: (clues, solutions), (n, cells) int8."""
    b, draws = board(box), Draws(seed, number)
    clues, solutions, missing = [], [], n
    for _ in range(_MAX_ROUNDS):
        n_grids = missing + missing // 4 + 4  # Some cannot be dug so far.
        empty = np.full((n_grids, b.cells), b.full, b.dtype)
        _, grids = search(empty, b, limit=1, draws=draws)
        targets = draws.integers(n_clues[0], n_clues[1] + 1, (len(grids),))
        dug = _dug(grids, targets, b, draws)
        done = np.nonzero(np.count_nonzero(dug, axis=1) == targets)[0][:missing]
        clues.append(dug[done])
        solutions.append(grids[done])
        missing -= len(done)
        if not missing:
            return np.concatenate(clues), np.concatenate(solutions)
    raise DataError(
        f"in {_MAX_ROUNDS} rounds fewer than {n} grids of box {box} could be dug to "
        f"{n_clues[0]} to {n_clues[1]} clues with one solution; ask for more clues."
    )


def _dug(
    grids: np.ndarray, targets: np.ndarray, board: Board, draws: Draws
) -> np.ndarray:
    """Takes clues out of full grids, in random order, until `targets` are left."""
    clues = grids.copy()
    left = np.full(len(grids), board.cells)
    order = draws.orders(*grids.shape)
    for cells in order.T:
        rows = np.nonzero(left > targets)[0]
        if not rows.size:
            break
        cell = cells[rows]
        without = clues[rows]
        without[np.arange(len(rows)), cell] = 0
        # The clue is needed if and only if there is a solution with another digit.
        masks = board.masks(without)
        masks[np.arange(len(rows)), cell] ^= board.masks(grids[rows, cell])
        counts, _ = search(masks, board, limit=1)
        free = counts == 0
        clues[rows[free], cell[free]] = 0
        left[rows[free]] -= 1
    return clues

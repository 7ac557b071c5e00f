"""Elimination by more than singles: locked candidates and naked pairs.

Above `sudoku_board`, under `sudoku_solver`, whose `wave` uses it on demand.
"""

import numpy as np

from retrax.data.sudoku_board import Board

__all__ = ["ruled_out"]


def ruled_out(grid: np.ndarray, board: Board) -> np.ndarray:
    """Returns the candidates (cells, n_grids) that the two rules take out."""
    return _locked(grid, board) | _pairs(grid, board)


def _locked(grid: np.ndarray, board: Board) -> np.ndarray:
    """Candidates that locked candidates rule out, by cell."""
    n, b = board.n, board.box
    out = np.zeros_like(grid)
    for lines in (np.arange(n * n).reshape(n, n), np.arange(n * n).reshape(n, n).T):
        # (line, segment, place in it): segments are where lines and boxes meet.
        cells = lines.reshape(n, b, b)
        segment = np.bitwise_or.reduce(grid[cells], axis=2)
        in_box = segment.reshape(b, b, b, -1)  # band, line in it, segment: a box each
        others_on_line, others_in_box = _others(segment, 1), _others(in_box, 1)
        others_in_box = others_in_box.reshape(segment.shape)
        pointing = segment & ~others_in_box
        claiming = segment & ~others_on_line
        ruled_out = _others(pointing, 1)
        in_box = _others(claiming.reshape(b, b, b, -1), 1).reshape(segment.shape)
        out[cells] |= (ruled_out | in_box)[:, :, None]
    return out


def _others(x: np.ndarray, axis: int) -> np.ndarray:
    """For each item along an axis the union of all others."""
    parts = np.moveaxis(x, axis, 0)
    joined = np.zeros_like(parts)
    for i in range(len(parts)):
        for j in range(len(parts)):
            if i != j:
                joined[i] |= parts[j]
    return np.moveaxis(joined, 0, axis)


def _pairs(grid: np.ndarray, board: Board) -> np.ndarray:
    """Candidates that naked pairs rule out, by cell."""
    out = np.zeros_like(grid)
    twos = np.where(np.bitwise_count(grid) == 2, grid, 0)
    # Rows, columns and boxes apart: among units of one kind no cell comes twice.
    for places in np.split(board.units, 3, axis=1):
        for i, first in enumerate(places):
            for second in places[i + 1 :]:
                pair = np.where(twos[first] == twos[second], twos[first], 0)
                for cells in places:
                    out[cells] |= np.where(grid[cells] == pair, 0, pair)
    return out

"""A picture of one puzzle being solved, with the candidate sets of each thought.

Under `curriculum`. matplotlib is imported when a picture is drawn, and used through its
object interface.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from retrax.supervised.latent_decoding import grade

__all__ = ["draw_thoughts"]

_INK, _FAINT, _RIGHT, _WRONG = "#222222", "#c8c8c8", "#2a7f62", "#d1495b"


def draw_thoughts(
    batch: tuple[Any, ...],
    read: Any,
    tokens: Any,
    path: str | os.PathLike[str],
    title: str = "",
) -> None:
    """Draws the first puzzle of a batch: clues, thoughts, and the grid as filled in.

    A thought's panel shows in each empty cell the digits that the candidate head reads
    from it, in black where they are possible at that stage, in red where not; possible
    digits that it misses are grey.

    Args:
      batch: of `data.SudokuDataset`.
      read: (batch, K, cells, digits) bool, the digits read from each thought.
      tokens: (batch, length) int, decoded.
      path: the PNG file.
      title: of the picture.

    Raises:
      OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    _, solution, start_index, _, candidates = (np.asarray(part[:1]) for part in batch)
    n_latents, cells = candidates.shape[1:]
    side = round(cells**0.5)
    graded = grade(tokens[:1], solution, start_index, n_latents)
    clues = np.where(graded.empty[0], 0, solution[0])
    n_columns = min(n_latents + 2, 4)
    n_rows = -(-(n_latents + 2) // n_columns)
    size = 0.42 * side + 0.6
    figure = Figure(
        figsize=(size * n_columns, (size + 0.4) * n_rows),
        dpi=100,
        layout=ConstrainedLayoutEngine(),
    )
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, color=_INK)
    axes = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
    for axis in axes:
        axis.set_axis_off()
    _grid(axes[0], "clues", side)
    for cell in np.nonzero(clues)[0].tolist():
        _write(axes[0], cell, side, str(clues[cell]), _INK)
    for k in range(n_latents):
        axis = axes[1 + k]
        _grid(axis, f"thought {k + 1}", side)
        for cell in np.nonzero(graded.empty[0])[0].tolist():
            _sets(axis, cell, side, read[0, k, cell], candidates[0, k, cell])
    axis = axes[1 + n_latents]
    n_right, n_empty = int(graded.right.sum()), int(graded.empty.sum())
    _grid(axis, f"filled in: {n_right} of {n_empty} right", side)
    filled = _values(tokens[0], int(start_index[0, 0]), n_latents, side)
    for cell, value in filled.items():
        color = _INK if clues[cell] else _RIGHT if graded.right[0, cell] else _WRONG
        _write(axis, cell, side, value, color)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    whole = Path(path)
    beside = whole.with_name(
        f"{whole.name}.tmp"
    )  # Never half a picture under its name.
    beside.write_bytes(picture.getvalue())
    os.replace(beside, whole)


def _values(tokens: Any, n_clues: int, n_latents: int, side: int) -> dict[int, str]:
    """Cell -> the value that the last of its triples writes there."""
    found = {}
    for j in range(side * side):
        at = 3 * j + (n_latents if j >= n_clues else 0)
        row, column, value = tokens[at : at + 3].tolist()
        if row < side and column < side:
            found[row * side + column] = str(value)
    return found


def _grid(axis: Any, title: str, side: int) -> None:
    box = round(side**0.5)
    axis.set_title(title, fontsize=9, color=_INK)
    axis.set_xlim(0, side)
    axis.set_ylim(side, 0)
    axis.set_aspect("equal")
    for i in range(side + 1):
        width = 1.2 if i % box == 0 else 0.4
        axis.plot([0, side], [i, i], color=_INK, linewidth=width)
        axis.plot([i, i], [0, side], color=_INK, linewidth=width)


def _write(axis: Any, cell: int, side: int, text: str, color: str) -> None:
    row, column = divmod(cell, side)
    axis.text(
        column + 0.5,
        row + 0.5,
        text,
        color=color,
        ha="center",
        va="center",
        fontsize=11,
    )


def _sets(axis: Any, cell: int, side: int, read: Any, mask: int) -> None:
    """Writes the digits of a set small, each at its place in the cell."""
    row, column = divmod(cell, side)
    box = round(side**0.5)
    for d in range(side):
        possible = bool(int(mask) >> d & 1)
        if not (possible or read[d]):
            continue
        color = _FAINT if not read[d] else _INK if possible else _WRONG
        x = column + (d % box + 0.5) / box
        y = row + (d // box + 0.5) / box
        axis.text(
            x, y, str(d + 1), color=color, ha="center", va="center", fontsize=15 / box
        )

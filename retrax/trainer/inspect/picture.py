"""A picture of the data stack: which layer reads, writes and moves which item.

Above `walk`. matplotlib is imported when a picture is drawn, and used through its
object interface.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrax.storage.atomic import write_bytes
from retrax.trainer.inspect.walk import Visit

__all__ = ["draw"]

# Layers that reverse, others that compute, others that only move items.
_COLORS = {"reversible": "#2a9d8f", "computes": "#3366aa", "moves": "#999999"}
_INK, _FAINT, _LINE = "#333333", "#888888", "#b8c0cc"
_COLUMN, _ROW = 1.9, 0.5  # inches
_MOST_ROWS = 1000  # More would be too tall for a picture.


def draw(visits: Sequence[Visit], path: str | os.PathLike[str]) -> None:
    """Draws the items of the data stack as lines that go down through the layers.

    A layer is a row: a dot where it reads an item, a box where it writes one, a line
    that bends where an item changes its place; items it does not take pass on the
    right. Shapes stand at what is new.

    Args:
      visits: layers in order, from `report(...).visits`.
      path: file to write; the end of its name, .png or .svg, says what it becomes.

    Raises:
      ValueError: the file is neither.
      OSError: it cannot be written.
    """
    kind = Path(path).suffix.lower().lstrip(".")
    if kind not in ("png", "svg"):
        raise ValueError(
            f"a picture is a .png or a .svg file, got {os.fspath(path)!r}."
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if len(visits) > _MOST_ROWS:
        raise ValueError(
            f"a picture has room for {_MOST_ROWS} layers, not for {len(visits)}; put "
            "equal blocks into a Repeat (scan_layers=True)."
        )
    n_slots = max((_n_before(v) for v in visits), default=1)
    n_slots = max([n_slots, *(_n_after(v) for v in visits)])
    names = [_name(v) for v in visits]
    left = 0.35 + 0.075 * max(map(len, names), default=0)  # inches for the names
    width, height = left + _COLUMN * n_slots + 0.3, _ROW * (len(visits) + 1.8)
    figure = Figure(figsize=(width, height), dpi=110)
    FigureCanvasAgg(figure)
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_xlim(0, width)
    axis.set_ylim(height, 0)
    axis.axis("off")
    place = _Places(left)
    _draw_ends(axis, visits, place)
    for row, (visit, name) in enumerate(zip(visits, names, strict=True)):
        _draw_layer(axis, visit, name, row, place)
    _draw_legend(axis, place, len(visits))
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, facecolor="white")
    write_bytes(Path(path), picture.getvalue())


class _Places:
    """Where things are, in inches."""

    def __init__(self, left: float) -> None:
        self._left = left

    def x(self, slot: int) -> float:
        """The line of an item of the stack; the top is on the left."""
        return self._left + _COLUMN * (slot + 0.18)

    def y(self, row: int) -> float:
        """The middle of a layer."""
        return _ROW * (row + 1.25)


def _draw_layer(axis: Any, v: Visit, name: str, row: int, place: _Places) -> None:
    y, color = place.y(row), _COLORS[_kind(v)]
    axis.text(
        place.x(0) - 0.42, y, name, ha="right", va="center", fontsize=8, color=color
    )
    top, bottom = y - _ROW / 2, y + _ROW / 2
    for i in range(len(v.inputs)):  # What it takes, as far as it goes.
        axis.plot([place.x(i)] * 2, [top, y - 0.1], color=_LINE, lw=1.4, zorder=1)
        if i in v.reads:
            axis.plot(place.x(i), y - 0.1, "o", color=color, ms=5, zorder=4)
    n_lines = max(len(v.inputs), len(v.outputs), 1)
    if _kind(v) != "moves":
        ends = [place.x(0) - 0.12, place.x(n_lines - 1) + 0.12]
        axis.plot(ends, [y, y], color=color, lw=0.8, alpha=0.5, zorder=2)
    for j, i in v.moves.items():
        xs = [place.x(i), place.x(i), place.x(j), place.x(j)]
        axis.plot(
            xs, [y - 0.1, y - 0.1, y + 0.14, bottom], color=_LINE, lw=1.4, zorder=1
        )
    for j in v.writes:
        _draw_box(axis, place.x(j), y, color)
        axis.plot([place.x(j)] * 2, [y, bottom], color=_LINE, lw=1.4, zorder=1)
        _draw_shape(axis, place.x(j) + 0.14, y - 0.09, v.outputs[j])
    for k in range(len(v.stack)):  # What passes by.
        xs = [place.x(len(v.inputs) + k), place.x(len(v.outputs) + k)]
        axis.plot(
            [xs[0], xs[0], xs[1], xs[1]],
            [top, y - 0.1, y + 0.14, bottom],
            color=_LINE,
            lw=1.4,
            zorder=1,
        )


def _draw_box(axis: Any, x: float, y: float, color: str) -> None:
    from matplotlib.patches import Rectangle

    axis.add_patch(
        Rectangle((x - 0.08, y - 0.06), 0.16, 0.12, color=color, zorder=3, lw=0)
    )


def _draw_shape(axis: Any, x: float, y: float, item: Any) -> None:
    dtype = str(item.dtype)
    kind = "" if dtype == "float32" else f" {dtype}"
    text = " x ".join(map(str, item.shape)) or "a number"
    axis.text(
        x, y, text + kind, ha="left", va="center", fontsize=6.5, color=_FAINT, zorder=5
    )


def _draw_ends(axis: Any, visits: Sequence[Visit], place: _Places) -> None:
    """The batch that comes in, and which side of the stack is which."""
    if not visits:
        return
    first = visits[0]
    y = place.y(0) - _ROW / 2 - 0.12
    for i, item in enumerate([*first.inputs, *first.stack]):
        axis.plot([place.x(i)] * 2, [y, y + 0.12], color=_LINE, lw=1.4, zorder=1)
        _draw_shape(axis, place.x(i) - 0.1, y - 0.09, item)
    axis.text(
        place.x(0) - 0.42,
        y - 0.09,
        "data stack, its top on the left",
        ha="right",
        va="center",
        fontsize=7.5,
        color=_FAINT,
    )


def _draw_legend(axis: Any, place: _Places, row: int) -> None:
    y = place.y(row) + 0.05
    texts = {
        "reversible": "reversible",
        "computes": "computes",
        "moves": "only moves items",
    }
    x = place.x(0) - 0.42 - 1.0
    for kind, text in texts.items():
        _draw_box(axis, x, y, _COLORS[kind])
        axis.text(x + 0.14, y, text, va="center", fontsize=7.5, color=_INK)
        x += 0.4 + 0.075 * len(text)
    axis.plot(x, y, "o", color=_INK, ms=5)
    axis.text(x + 0.12, y, "reads", va="center", fontsize=7.5, color=_INK)
    x += 0.75
    _draw_box(axis, x, y, _INK)
    axis.text(x + 0.14, y, "writes", va="center", fontsize=7.5, color=_INK)


def _kind(v: Visit) -> str:
    if not v.writes:
        return "moves"
    return "reversible" if v.is_reversible else "computes"


def _name(v: Visit) -> str:
    *around, name = v.path.split("/")
    if v.layer.name not in name and len(v.layer.name) < 30:
        name = f"{name.split('.')[0]}.{v.layer.name}"
    where = "block: " if "block" in around else "".join(f"{x}/" for x in around[-1:])
    return f"{where}{name}" + (f"  (x {v.n_times})" if v.n_times > 1 else "")


def _n_before(v: Visit) -> int:
    return len(v.inputs) + len(v.stack)


def _n_after(v: Visit) -> int:
    return len(v.outputs) + len(v.stack)

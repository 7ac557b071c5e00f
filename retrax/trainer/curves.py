"""Learning curves as one picture: a panel per metric, train and eval in each.

matplotlib is imported when a picture is drawn, and used through its object interface:
no global figure, style or backend is touched.
"""

from __future__ import annotations

import io
import math
import os
import warnings
from typing import Any

from retrax.storage.atomic import write_bytes
from retrax.trainer.history import History

__all__ = ["draw_curves"]

_MAX_PANELS = 12
_COLORS = {"train": "#3366aa", "eval": "#d1495b"}
_MORE_COLORS = ("#2a9d8f", "#8a5fbf", "#c58b1b", "#555555")
_INK, _FAINT = "#333333", "#dddddd"

Points = list[tuple[int, float]]


def draw_curves(history: History, path: str | os.PathLike[str]) -> None:
    """Draws `history` to a PNG file, in one step; writes nothing if it is empty.

    Losses stand first, then other metrics by name, then the learning rate; the other
    'training/' values are left to TensorBoard. At most 12 panels.

    Raises:
      OSError: the file cannot be written.
    """
    panels = _panels(history)
    if not panels:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    n_columns = min(len(panels), 3 if len(panels) > 4 else 2)
    n_rows = math.ceil(len(panels) / n_columns)
    figure = Figure(
        figsize=(5.6 * n_columns, 3.7 * n_rows),  # inches
        dpi=120,
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12),
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
    steps = [step for _, lines in panels for line in lines.values() for step, _ in line]
    margin = 0.03 * (max(steps) - min(steps)) or 0.5
    for axis, (metric, lines) in zip(axes, panels, strict=False):
        axis.set_xlim(min(steps) - margin, max(steps) + margin)
        _draw_panel(axis, metric, lines)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    picture = io.BytesIO()
    with warnings.catch_warnings():
        # Fonts without a glyph of a metric's name, and the like.
        warnings.simplefilter("ignore")
        figure.savefig(picture, format="png", facecolor="white")
    write_bytes(path, picture.getvalue())


def _panels(history: History) -> list[tuple[str, dict[str, Points]]]:
    """Returns [(metric, {mode: points}), ...] in the order of the panels."""
    panels: dict[str, dict[str, Points]] = {}
    modes = sorted(history.modes, key=lambda mode: (mode != "train", mode))
    for mode in modes:
        for metric in history.metrics_for_mode(mode):
            hidden = metric.startswith("training/")
            if not hidden or metric == "training/learning_rate":
                panels.setdefault(metric, {})[mode] = history.get(mode, metric)

    def order(metric: str) -> tuple[bool, bool, str]:
        return metric.startswith("training/"), not _is_loss(metric), metric

    return [(metric, panels[metric]) for metric in sorted(panels, key=order)][
        :_MAX_PANELS
    ]


def _is_loss(metric: str) -> bool:
    return "loss" in metric.lower()


def _draw_panel(axis: Any, metric: str, lines: dict[str, Points]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    more_colors = iter(_MORE_COLORS * 3)
    ends = []
    for mode, points in lines.items():
        color = _COLORS.get(mode) or next(more_colors, _INK)
        steps, values = zip(*points, strict=True)
        sparse = len(points) <= 40
        axis.plot(
            steps,
            values,
            color=color,
            linewidth=1.8,
            marker="o" if sparse else None,
            markersize=3.5,
            label=mode,
        )
        finite = [point for point in points if math.isfinite(point[1])]
        if finite:
            # A run that ended in NaN must not look as if it had ended well.
            ends.append((finite[-1][1], f"{values[-1]:.4g}", color))
            axis.plot(*finite[-1], "o", color=color, markersize=5)
    if _is_loss(metric) and _spans_decade(lines):
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
    name = metric.split("/", 1)[-1].replace("_", " ")
    axis.set_title(name, loc="left", fontsize=11, fontweight="bold", color=_INK)
    axis.set_xlabel("step", fontsize=9, color=_INK)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axis.grid(True, color=_FAINT, linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(which="minor", color=_FAINT)
    axis.tick_params(labelsize=8.5, color=_FAINT, labelcolor=_INK)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color("#bbbbbb")
    if len(lines) > 1 or not metric.startswith("training/"):
        axis.legend(frameon=False, fontsize=9, labelcolor=_INK)
    _annotate_ends(axis, ends)


def _annotate_ends(axis: Any, ends: list[tuple[float, str, str]]) -> None:
    """Writes final values at the right of the panel, moved apart if they collide."""
    axis.autoscale_view()
    to_points = 72 / axis.figure.dpi
    ends = sorted(ends)
    places = [axis.transData.transform((0, y))[1] * to_points for y, _, _ in ends]
    targets = _spread(places, gap=12.0)
    for (y, text, color), place, target in zip(ends, places, targets, strict=True):
        axis.annotate(
            text,
            xy=(1.0, y),
            xycoords=axis.get_yaxis_transform(),
            xytext=(4, target - place),
            textcoords="offset points",
            va="center",
            fontsize=9,
            fontweight="bold",
            color=color,
            annotation_clip=False,
        )


def _spread(places: list[float], gap: float) -> list[float]:
    """Returns ascending places at least `gap` apart, as near the given as is easy."""
    groups: list[tuple[float, int]] = []  # centre and number of labels
    for place in places:
        centre, n = place, 1
        while groups and centre - groups[-1][0] < gap * (n + groups[-1][1]) / 2:
            other, n_other = groups.pop()
            centre = (centre * n + other * n_other) / (n + n_other)
            n += n_other
        groups.append((centre, n))
    return [centre + gap * (i - (n - 1) / 2) for centre, n in groups for i in range(n)]


def _spans_decade(lines: dict[str, Points]) -> bool:
    values = [v for points in lines.values() for _, v in points if math.isfinite(v)]
    return bool(values) and min(values) > 0 and max(values) > 10 * min(values)

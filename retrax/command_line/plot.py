"""`retrax plot`: the learning curves of several runs in one picture.

matplotlib is imported when a picture is drawn, and used through its object interface.
"""

from __future__ import annotations

import argparse
import io
import math
import warnings
from pathlib import Path
from typing import Any

from retrax.command_line.run_files import (
    Run,
    find_runs,
    lower_is_better,
    read_run_files,
    short_name,
)
from retrax.errors import ConfigError
from retrax.storage.atomic import write_bytes

__all__ = ["draw", "run"]

# Told apart also by those who see few colours: they differ in lightness, too.
_COLORS = ("#3366aa", "#d1495b", "#2a9d8f", "#c58b1b", "#8a5fbf", "#444444")
_COLORS += ("#7fb2e5", "#f0a3ad", "#7dd3c8", "#e8c77e", "#c4a9e3", "#aaaaaa")
_MAX_PANELS = 9
_INK, _FAINT = "#333333", "#dddddd"


def run(args: argparse.Namespace) -> int:
    """Draws the picture and says where it is; returns the exit code."""
    folders: list[Path] = []
    for folder in args.dirs:
        folders += [f for f in find_runs(folder) if f not in folders]
    runs = [read_run_files(folder) for folder in folders]
    shown = draw(runs, Path(args.output), args.metric)
    print(f"{args.output}: {', '.join(map(short_name, shown))} of {len(runs)} runs")
    return 0


def draw(runs: list[Run], path: Path, metrics: list[str] | None = None) -> list[str]:
    """Draws a panel for each evaluation metric, with a line for each run.

    Args:
      runs: the runs.
      path: the PNG file to write.
      metrics: names of the metrics to show; by default all, losses first.

    Returns:
      The tags that are shown.

    Raises:
      ConfigError: there is nothing to draw; says what there is.
      OSError: the file cannot be written.
    """
    tags = _tags(runs, metrics)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    n_columns = min(len(tags), 3 if len(tags) > 4 else 2)
    n_rows = math.ceil(len(tags) / n_columns)
    figure = Figure(
        figsize=(
            5.8 * n_columns,
            3.8 * n_rows + 0.2 * math.ceil(len(runs) / 3),
        ),  # inches
        dpi=120,
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12),
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
    handles: dict[str, Any] = {}
    names = _names(runs)
    for axis, tag in zip(axes, tags, strict=False):
        is_sparse = all(len(_points(one, tag)[1]) <= 30 for one in runs)
        for i, one in enumerate(runs):
            line = _draw_line(axis, one, tag, _COLORS[i % len(_COLORS)], is_sparse)
            if line is not None:
                handles.setdefault(names[i], line)
        _finish_panel(axis, runs, tag)
    for axis in axes[len(tags) :]:
        axis.set_visible(False)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=1 if max(map(len, handles), default=0) > 30 else 3,
        frameon=False,
        fontsize=9,
        labelcolor=_INK,
    )
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Fonts without a glyph of a name.
        figure.savefig(picture, format="png", facecolor="white")
    write_bytes(path, picture.getvalue())
    return tags


def _tags(runs: list[Run], metrics: list[str] | None) -> list[str]:
    found = {
        tag for one in runs for mode, tag in one.series if tag.startswith("metrics/")
    }
    order = sorted(found, key=lambda tag: ("loss" not in tag, tag))
    if metrics:
        missing = [m for m in metrics if f"metrics/{short_name(m)}" not in found]
        if missing:
            raise ConfigError(
                f"no run has measured {', '.join(missing)}; there are: "
                f"{', '.join(map(short_name, order)) or 'none'}."
            )
        return [f"metrics/{short_name(m)}" for m in metrics]
    if not order:
        raise ConfigError(
            f"there is nothing to draw: no measurement in "
            f"{', '.join(str(one.folder) for one in runs)}."
        )
    return order[:_MAX_PANELS]


def _names(runs: list[Run]) -> list[str]:
    """The ends of the paths that tell the runs apart."""
    parts = [one.folder.absolute().parts for one in runs]
    n_common = 0
    while len(runs) > 1 and all(len(p) > n_common + 1 for p in parts):
        if len({p[n_common] for p in parts}) > 1:
            break
        n_common += 1
    if len(runs) == 1:
        return [parts[0][-1]]
    return ["/".join(p[n_common:]) for p in parts]


def _points(one: Run, tag: str) -> tuple[str, list[tuple[int, float]]]:
    """The evaluations of a run, or its measurements in training if it has no others."""
    for mode in ("eval", "train"):
        if one.series.get((mode, tag)):
            return mode, one.series[mode, tag]
    return "eval", []


def _draw_line(axis: Any, one: Run, tag: str, color: str, is_sparse: bool) -> Any:
    mode, points = _points(one, tag)
    if not points:
        return None
    steps, values = zip(*points, strict=True)
    (line,) = axis.plot(
        steps,
        values,
        color=color,
        linewidth=1.7,
        linestyle="-" if mode == "eval" else "--",
        marker="o" if is_sparse else None,
        markersize=3,
    )
    return line


def _finish_panel(axis: Any, runs: list[Run], tag: str) -> None:
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    values = [v for one in runs for _, v in _points(one, tag)[1] if math.isfinite(v)]
    if lower_is_better(tag) and values and min(values) > 0:
        if max(values) > 10 * min(values):
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(ScalarFormatter())
    has_eval = any(one.series.get(("eval", tag)) for one in runs)
    title = short_name(tag).replace("_", " ") + ("" if has_eval else " (training)")
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK)
    axis.set_xlabel("step", fontsize=9, color=_INK)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axis.grid(True, color=_FAINT, linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8.5, color=_FAINT, labelcolor=_INK)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color("#bbbbbb")

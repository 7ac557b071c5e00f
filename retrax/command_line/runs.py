"""`retrax runs`: a table of runs."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from retrax.command_line.run_files import (
    Run,
    find_runs,
    lower_is_better,
    read_run_files,
    short_name,
    state_of,
)

__all__ = ["run", "table"]

_MAX_METRICS = 3


def run(args: argparse.Namespace) -> int:
    """Prints the table; returns the exit code."""
    runs = [read_run_files(folder) for folder in find_runs(args.dir)]
    print(table(runs, Path(args.dir)))
    return 0


def table(runs: list[Run], root: Path) -> str:
    """Returns the table of some runs, named as seen from `root`."""
    tags = _tags(runs)
    names = ["run", "status", "step", "of", "time"]
    for tag in tags:
        names += [short_name(tag), f"best {short_name(tag)}"]
    rows, notes = [names], []
    for one in runs:
        status, step, reason = state_of(one)
        name = str(one.folder.relative_to(root)) if one.folder != root else str(root)
        total = _total_steps(one.folder)
        rows.append([name, status, str(step), total, _duration(one.times)])
        for tag in tags:
            rows[-1] += _last_and_best(one, tag)
        if reason and status != "done":
            notes.append(f"{name}: {status}: {reason}")
    return "\n".join([*_aligned(rows), *notes])


def _tags(runs: list[Run]) -> list[str]:
    """The evaluation metrics to show: of most runs, losses first."""
    counts: dict[str, int] = {}
    for one in runs:
        for mode, tag in one.series:
            if mode == "eval" and tag.startswith("metrics/"):
                counts[tag] = counts.get(tag, 0) + 1
    order = sorted(counts, key=lambda tag: (-counts[tag], tag != "metrics/loss", tag))
    return order[:_MAX_METRICS]


def _last_and_best(one: Run, tag: str) -> list[str]:
    points = one.series.get(("eval", tag), [])
    if not points:
        return ["-", "-"]
    finite = [point for point in points if math.isfinite(point[1])]
    if not finite:
        return [f"{points[-1][1]:.4g}", "-"]
    pick = min if lower_is_better(tag) else max
    step, value = pick(finite, key=lambda point: point[1])
    return [f"{points[-1][1]:.4g}", f"{value:.4g} @{step}"]


def _total_steps(folder: Path) -> str:
    """What train.steps is in the run's configuration."""
    try:
        text = (folder / "config.gin").read_text()
    except (OSError, UnicodeDecodeError):
        return "-"
    found = re.findall(r"^train\.steps *= *(\d+) *$", text, re.MULTILINE)
    return found[-1] if found else "-"


def _duration(times: list[float]) -> str:
    """Time from the first measurement to the last, as hours:minutes:seconds."""
    if not times:
        return "-"
    seconds = round(max(times) - min(times))
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        left = [text.ljust(w) for text, w in zip(row[:2], widths[:2], strict=True)]
        right = [text.rjust(w) for text, w in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(left + right).rstrip())
    return lines

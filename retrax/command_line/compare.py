"""`retrax compare`: where two runs part."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from retrax import storage
from retrax.command_line.parts import compare_parts
from retrax.command_line.run_files import Run, read_run_files, short_name
from retrax.errors import CheckpointError, ConfigError
from retrax.storage.atomic import previous_path
from retrax.trainer.retention import kept_steps
from retrax.trainer.state import CHECKPOINT_NAME

__all__ = ["run"]

_BY_THE_CLOCK = ("training/steps per second",)
_MANY_STEPS = 12


def run(args: argparse.Namespace) -> int:
    """Prints where two runs part; exit code 1 if they do, 0 if what there is agrees."""
    runs = [read_run_files(folder) for folder in (args.run_a, args.run_b)]
    n_values, measured = _compare_series(*runs)
    steps, saved = _compare_checkpoints(*(Path(r.folder) for r in runs))
    if not n_values and not steps:
        raise ConfigError(
            f"nothing of {args.run_a} and {args.run_b} can be compared: they have "
            "measured nothing at the same step, and kept no checkpoint of one."
        )
    print(f"measurements: {n_values} values of both runs compared")
    print(measured or "  all are equal" if n_values else "  none at the same step")
    shown = ", ".join(map(str, steps[:_MANY_STEPS]))
    more = f" and {len(steps) - _MANY_STEPS} more" if len(steps) > _MANY_STEPS else ""
    print(f"checkpoints: {f'steps {shown}{more}' if steps else 'none'} compared")
    print(saved or "  all are equal" if steps else "  none of the same step was kept")
    return 1 if measured or saved else 0


def _compare_series(a: Run, b: Run) -> tuple[int, str]:
    """Returns how many values were compared, and lines on the first that differ."""
    n, first, lines = 0, math.inf, []
    for key in sorted(set(a.series) & set(b.series)):
        mode, tag = key
        if tag in _BY_THE_CLOCK:
            continue
        ours, theirs = dict(a.series[key]), dict(b.series[key])
        for step in sorted(set(ours) & set(theirs)):
            n += 1
            if _same(ours[step], theirs[step]) or step > first:
                continue
            if step < first:
                first, lines = step, []
            lines.append(
                f"    {mode} {short_name(tag)}: {ours[step]!r} against {theirs[step]!r}"
            )
    if not lines:
        return n, ""
    return n, "\n".join([f"  the first difference is at step {first}:", *lines])


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _compare_checkpoints(a: Path, b: Path) -> tuple[list[int], str]:
    """Returns the steps whose checkpoints were compared, and lines on a difference."""
    ours, theirs = _by_step(a), _by_step(b)
    compared, last_equal = [], None
    for step in sorted(set(ours) & set(theirs)):
        compared.append(step)
        parts = compare_parts(storage.load(ours[step]), storage.load(theirs[step]))
        different = [p for p in parts if p.difference]
        if different:
            before = (
                "no earlier step is there to compare"
                if last_equal is None
                else f"equal at step {last_equal}"
            )
            lines = [f"  the first difference is at step {step} ({before}):"]
            lines += [f"    {p.part}: {p.difference}" for p in different]
            return compared, "\n".join(lines)
        last_equal = step
    return compared, ""


def _by_step(folder: Path) -> dict[int, Path]:
    """Returns step -> file of the whole checkpoints of a run."""
    found = dict(kept_steps(folder))
    newest = folder / CHECKPOINT_NAME
    for path in (previous_path(newest), newest):
        payload: dict[str, Any] = {}
        try:
            payload = storage.load(path)
        except FileNotFoundError:
            continue
        except CheckpointError as error:
            print(f"left out: {error}")
        if isinstance(payload.get("step"), int):
            found[payload["step"]] = path
    return found

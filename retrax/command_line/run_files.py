"""Reading the files that runs leave: which runs there are, and what they measured.

Shared by the commands that look at runs; trains nothing and changes nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from retrax.errors import ConfigError
from retrax.storage.atomic import previous_path
from retrax.trainer.run_lock import LOCK_NAME, live_owner
from retrax.trainer.run_record import RECORD_NAME, read_record
from retrax.trainer.state import CHECKPOINT_NAME

__all__ = [
    "Run",
    "find_runs",
    "is_run",
    "lower_is_better",
    "read_run_files",
    "short_name",
    "state_of",
]

METRICS_NAME = "metrics.jsonl"
_OF_A_RUN = (METRICS_NAME, CHECKPOINT_NAME, RECORD_NAME, LOCK_NAME)
_SPECIAL = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": -float("inf")}

Series = dict[tuple[str, str], list[tuple[int, float]]]


class Run(NamedTuple):
    """What the log of a run says.

    Attributes:
      folder: its output directory.
      series: (mode, tag) -> [(step, value), ...].
      last_step: the highest step in it; 0 if there is none.
      times: seconds since 1970 of all entries.
    """

    folder: Path
    series: Series
    last_step: int
    times: list[float]


def is_run(folder: str | os.PathLike[str]) -> bool:
    """Whether a directory holds the files of a run."""
    folder = Path(folder)
    return any((folder / name).is_file() for name in _OF_A_RUN)


def find_runs(folder: str | os.PathLike[str]) -> list[Path]:
    """Returns the runs in a directory and below it, sorted; runs hold no runs.

    Raises:
      ConfigError: there is no such directory, or no run in it.
    """
    if not Path(folder).is_dir():
        raise ConfigError(f"{folder} is no directory.")
    found = []
    for path, folders, files in os.walk(folder):
        if set(files) & set(_OF_A_RUN):
            found.append(Path(path))
            folders.clear()
        else:
            folders[:] = sorted(f for f in folders if not f.startswith("."))
    if not found:
        raise ConfigError(
            f"{folder} holds no run: there is no {METRICS_NAME} and no "
            f"{CHECKPOINT_NAME} in it or below it. Give an output_dir, or a directory "
            "of them."
        )
    return found


def read_run_files(folder: str | os.PathLike[str]) -> Run:
    """Reads metrics.jsonl of a run, as far as it is whole; empty if there is none.

    Raises:
      ConfigError: the directory holds no run.
    """
    folder = Path(folder)
    if not is_run(folder):
        raise ConfigError(
            f"{folder} holds no run: there is neither {METRICS_NAME} nor "
            f"{CHECKPOINT_NAME} in it."
        )
    series: Series = {}
    last_step, times = 0, []
    for entry in _entries(folder / METRICS_NAME):
        step, mode = entry.pop("step"), entry.pop("mode")
        times.append(float(entry.pop("time", 0)))
        last_step = max(last_step, step)
        for tag, value in entry.items():
            number = _SPECIAL.get(value) if isinstance(value, str) else value
            if isinstance(number, int | float):
                series.setdefault((mode, tag), []).append((step, float(number)))
    return Run(folder, series, last_step, times)


def _entries(path: Path) -> list[dict[str, Any]]:
    entries = []
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # Cut short by a kill.
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            entries.append({"mode": "train", **entry})
    return entries


def state_of(run: Run) -> tuple[str, int, str]:
    """Says how a run stands: (status, step, reason).

    Status is 'running', 'done', 'interrupted' or 'failed'. A run that has begun, whose
    process does not live, was killed. Runs on other hosts that hold a lock count as
    running, since nobody here can tell.
    """
    record = read_record(run.folder) or {}
    noted = record.get("step")
    step = max(run.last_step, noted if isinstance(noted, int) else 0)
    owner = live_owner(run.folder)
    if owner is not None:
        return "running", step, f"process {owner['pid']} on {owner.get('host')}"
    status = record.get("status")
    if status in ("done", "failed", "interrupted"):
        return status, step, str(record.get("reason", ""))
    has_checkpoint = (run.folder / CHECKPOINT_NAME).exists() or previous_path(
        run.folder / CHECKPOINT_NAME
    ).exists()
    reason = "killed" if status == "running" else "no record of its end"
    return "interrupted", step, reason + ("" if has_checkpoint else ", no checkpoint")


def short_name(tag: str) -> str:
    """'metrics/loss' -> 'loss'."""
    return tag.removeprefix("metrics/")


def lower_is_better(tag: str) -> bool:
    """Whether the lowest value of a metric is the best, judged by its name.

    Example:
      >>> lower_is_better("metrics/loss"), lower_is_better("metrics/accuracy")
      (True, False)
    """
    name = short_name(tag).lower()
    if name.startswith("neg_"):
        return False
    return any(word in name for word in ("loss", "error", "perplexity", "nll"))

"""What a person sees of a run, and what its files tell afterwards.

Text and progress on a stream; TensorBoard event files, `metrics.jsonl` and
`curves.png` in the output directory. Stands on `progress`, `event_files` and
`curves`; trainers and loops hold one RunLog each and do no writing of their own.
"""

from __future__ import annotations

import json
import math
import operator
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from absl import logging

from retrax.storage.atomic import append_bytes, write_bytes
from retrax.trainer.curves import draw_curves
from retrax.trainer.event_files import EventFiles
from retrax.trainer.history import History
from retrax.trainer.progress import Progress, ProgressKind

__all__ = ["RunLog"]

_RESERVED = ("step", "mode", "time")


class RunLog:
    """Reports a run. Failing writes never end it: see `failures`.

    Args:
      output_dir: where the files go; None writes none.
      total_steps: the step at which the run ends, for the time left.
      stream: where text goes; None is `sys.stdout` as it is now.
      tensorboard: also write event files, in `output_dir/<mode>`.
      progress: 'auto' (a bar on a terminal, a line each half minute elsewhere), 'bar',
        'lines' or 'off'.

    Attributes:
      failures: what could not be written, one text for each kind of output.

    Raises:
      ValueError: `progress` is none of the above.

    Example:
      >>> with RunLog(total_steps=100) as log:
      ...     log.tick(1)
      ...     log.scalars("train", 1, {"metrics/loss": 0.5})
      Step      1: train loss | 0.50000000
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        total_steps: int | None = None,
        stream: TextIO | None = None,
        tensorboard: bool = True,
        progress: ProgressKind = "auto",
    ) -> None:
        self.output_dir = None if output_dir is None else Path(output_dir)
        self.failures: list[str] = []
        self._failed: set[str] = set()
        self._stream = sys.stdout if stream is None else stream
        self._progress = Progress(total_steps, self._stream, progress)
        self._events: EventFiles | None = None
        if self.output_dir is not None and tensorboard:
            self._events = EventFiles(self.output_dir)
        self._json_is_ready = False
        self._closed = False

    def set_total(self, total_steps: int | None) -> None:
        """Says at which step the run ends, for the time left."""
        self._progress.set_total(total_steps)

    def tick(self, step: int, loss: Any = None) -> None:
        """Notes that training step `step` is done; costs well under a microsecond.

        `loss` may live on a device; it is not read at once, and mostly never.
        """
        try:
            self._progress.tick(step, loss)
        except (
            Exception
        ) as error:  # A closed stream or a deleted loss: no reason to end.
            self._fail("progress", error)

    def scalars(self, mode: str, step: int, values: Mapping[str, Any]) -> None:
        """Reports values measured at `step`.

        Values go to TensorBoard under their tags, and to `metrics.jsonl` as one line
        {"step", "mode", "time", tag: value, ...}, in which NaN and the infinities are
        the strings "NaN", "Infinity" and "-Infinity". A text line is written for every
        tag but those that start with 'training/'.

        Args:
          mode: 'train' or 'eval', or another folder name below the output directory.
          step: number of training steps done.
          values: tag ('metrics/loss') -> scalar.

        Raises:
          TypeError: a value is no number or `step` no integer.
          ValueError: a tag is 'step', 'mode' or 'time', or `mode` is no folder name.
        """
        step = operator.index(step)
        _check_names(mode, values)
        numbers = {tag: float(value) for tag, value in values.items()}
        self._guard("text", lambda: self._write_lines(mode, step, numbers))
        if self.output_dir is None:
            return
        line = {"step": step, "mode": mode, "time": round(time.time(), 3)}
        line |= {tag: _json_number(value) for tag, value in numbers.items()}
        self._guard("metrics.jsonl", lambda: self._append_json(line))
        events = self._events
        if events is not None:
            self._guard("TensorBoard", lambda: events.scalars(mode, step, numbers))

    def text(self, tag: str, text: str, mode: str = "train") -> None:
        """Writes a text, such as the operative gin configuration, to TensorBoard.

        Lines are kept as they are (TensorBoard reads the text as Markdown).
        """
        _check_names(mode, {})
        events = self._events
        if events is not None:
            block = "\n".join(f"    {line}" for line in text.splitlines())
            self._guard("TensorBoard", lambda: events.text(mode, tag, block))

    def line(self, text: str) -> None:
        """Writes one line for a person to read, above the progress bar."""
        self._guard("text", lambda: self._progress.write(text))

    def truncate_after(self, step: int) -> None:
        """Removes what a dead run reported for steps above `step`; call it on resume.

        `metrics.jsonl` loses those lines, and any half-written one; in the event files
        they stay, and TensorBoard is told to hide them.
        """
        if self.output_dir is not None:
            self._guard("metrics.jsonl", lambda: self._truncate_json(step))
        events = self._events
        if events is not None:
            self._guard("TensorBoard", lambda: events.purge_after(step))

    def curves(self, history: History) -> None:
        """Draws `history` to `output_dir/curves.png`."""
        if self.output_dir is not None:
            path = self.output_dir / "curves.png"
            self._guard("curves.png", lambda: draw_curves(history, path))

    def close(self) -> None:
        """Ends the bar; a second call does nothing. No file is held open."""
        if self._closed:
            return
        self._closed = True
        self._guard("progress", self._progress.close)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _guard(self, what: str, write: Callable[[], Any]) -> None:
        try:
            write()
        except Exception as error:
            self._fail(what, error)

    def _fail(self, what: str, error: Exception) -> None:
        """Reports the first failure of each kind; training goes on."""
        if what in self._failed:
            return
        self._failed.add(what)
        where = "" if self.output_dir is None else f" in {self.output_dir}"
        text = f"cannot write {what}{where}: {type(error).__name__}: {error}"
        self.failures.append(text)
        logging.error("%s; training goes on without it", text)

    def _write_lines(self, mode: str, step: int, values: Mapping[str, float]) -> None:
        shown = {
            tag.removeprefix("metrics/"): value
            for tag, value in values.items()
            if not tag.startswith("training/")
        }
        width = max(map(len, shown), default=0)
        for name, value in shown.items():
            line = f"Step {step:6d}: {mode:5s} {name:{width}s} | {value:.8f}"
            self._progress.write(line)

    def _json_path(self) -> Path:
        return Path(self.output_dir or ".") / "metrics.jsonl"

    def _append_json(self, line: dict[str, Any]) -> None:
        path = self._json_path()
        if not self._json_is_ready:
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_cut_line(path)
            self._json_is_ready = True
        append_bytes(path, json.dumps(line, allow_nan=False).encode() + b"\n")

    def _truncate_json(self, step: int) -> None:
        path = self._json_path()
        if not path.exists():
            return
        kept = []
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                if line.endswith(b"\n") and json.loads(line)["step"] <= step:
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue  # Cut short by a kill.
        write_bytes(path, b"".join(kept))


def _check_names(mode: str, values: Mapping[str, Any]) -> None:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", mode) or ".." in mode.split("/"):
        raise ValueError(f"mode is {mode!r}; use a folder name such as 'train', 'eval'")
    for tag in values:
        if tag in _RESERVED:
            raise ValueError(f"the tag {tag!r} is taken; use 'metrics/{tag}'")


def _json_number(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _remove_cut_line(path: Path) -> None:
    """Removes what a killed run left after the last newline."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(size - 1_000_000, 0)
        file.seek(start)
        file.truncate(start + file.read().rfind(b"\n") + 1)

"""How far a run is: a bar on a terminal, a plain line now and then elsewhere.

`run_log` stands on this module.
"""

from __future__ import annotations

import os
import time
from typing import Any, Literal, TextIO

import numpy as np

__all__ = ["Progress", "ProgressKind"]

ProgressKind = Literal["auto", "bar", "lines", "off"]

_BAR_INTERVAL = 0.2  # seconds
_LINE_INTERVAL = 30.0  # seconds


class Progress:
    """Shows steps, steps/s, time left and loss.

    `tick` is meant to be called after every training step: most calls only read the
    clock. A loss that lives on a device is read at the refresh after the one it was
    given to, when it has long been computed, so that showing it never waits for the
    device.

    Args:
      total_steps: the step at which the run ends, if known.
      stream: where to write.
      kind: 'bar', 'lines', 'off', or 'auto': a bar if `stream` is a terminal, lines
        if not.

    Raises:
      ValueError: another `kind`.
    """

    def __init__(
        self, total_steps: int | None, stream: TextIO, kind: ProgressKind = "auto"
    ) -> None:
        if kind not in ("auto", "bar", "lines", "off"):
            raise ValueError(
                f"progress is {kind!r}; use 'auto', 'bar', 'lines' or 'off'"
            )
        if kind == "auto":
            kind = "bar" if stream.isatty() else "lines"
        self._total = total_steps
        self._stream = stream
        self._kind = kind
        self._interval = _BAR_INTERVAL if kind == "bar" else _LINE_INTERVAL
        self._next_time = float("inf") if kind == "off" else 0.0
        self._bar: Any = None
        self._first: tuple[int, float] | None = None
        self._step = 0
        self._given_loss: Any = None
        self._shown_loss: float | None = None

    def set_total(self, total_steps: int | None) -> None:
        """Says at which step the run ends."""
        self._total = total_steps
        if self._bar is not None:
            self._bar.total = total_steps

    def tick(self, step: int, loss: Any = None) -> None:
        """Notes that `step` is done; refreshes at most every `_interval` seconds."""
        self._step = step
        now = time.monotonic()
        if now >= self._next_time:
            self._next_time = now + self._interval
            self._refresh(now, loss)

    def write(self, text: str) -> None:
        """Writes a line, above the bar if there is one."""
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.clear()
            print(text, file=self._stream, flush=True)
            self._bar.refresh()

    def close(self) -> None:
        """Shows the last step once more and ends the bar."""
        self._next_time = float("inf")
        if self._bar is not None:
            bar, self._bar = self._bar, None
            self._read_loss(None)
            self._show(bar)
            bar.close()

    def _refresh(self, now: float, loss: Any) -> None:
        self._read_loss(loss)
        if self._kind == "bar":
            if self._bar is None:
                self._bar = self._new_bar()
            self._show(self._bar)
        elif self._first is None:
            # The first step compiles; a rate that counts it would mislead.
            self._first = self._step, now
        else:
            self.write(self._line(now))

    def _read_loss(self, loss: Any) -> None:
        if isinstance(loss, float | int | np.generic):
            self._given_loss, loss = loss, None
        if self._given_loss is not None:
            self._shown_loss = float(self._given_loss)
        self._given_loss = loss

    def _new_bar(self) -> Any:
        from tqdm import tqdm

        class Bar(tqdm):
            monitor_interval = 0  # No thread that outlives the run.

        has_size = _has_size(self._stream)
        return Bar(
            total=self._total,
            initial=max(self._step - 1, 0),
            file=self._stream,
            unit="step",
            dynamic_ncols=has_size,
            ncols=None if has_size else 80,
            nrows=None if has_size else 24,
            mininterval=0,
            smoothing=0.1,
        )

    def _show(self, bar: Any) -> None:
        if self._shown_loss is not None:
            bar.set_postfix_str(f"loss {self._shown_loss:.4g}", refresh=False)
        if self._step > bar.n:
            bar.update(self._step - bar.n)
        else:
            bar.refresh()

    def _line(self, now: float) -> str:
        first_step, first_time = self._first or (self._step, now)
        rate = (self._step - first_step) / max(now - first_time, 1e-9)
        parts = [f"Step {self._step:6d}"]
        if self._total:
            parts[0] += f" of {self._total} ({100 * self._step / self._total:.0f}%)"
        parts.append(f"{rate:.3g} steps/s")
        if self._total and rate > 0:
            seconds = int(max(self._total - self._step, 0) / rate)
            parts.append(
                f"ETA {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
            )
        if self._shown_loss is not None:
            parts.append(f"loss {self._shown_loss:.4g}")
        return " | ".join(parts)


def _has_size(stream: TextIO) -> bool:
    """False for terminals that say they have none, as in some containers."""
    try:
        return min(os.get_terminal_size(stream.fileno())) > 0
    except (AttributeError, OSError, ValueError):
        return False

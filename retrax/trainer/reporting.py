"""What trainers report of their steps, without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from retrax.trainer.run_log import RunLog

__all__ = ["StepReporter", "SummaryWriter"]


class StepReporter:
    """Logs every k-th step's values, read one entry later, when they are long computed.

    So the log costs no synchronisation with the device.
    """

    def __init__(self, log: RunLog, every: int) -> None:
        self._log, self._every = log, every
        self._pending: tuple[str, int, Any, Mapping[str, Any]] | None = None

    def note(
        self, step: int, rate: Any, stats: Mapping[str, Any], mode: str = "train"
    ) -> None:
        """Takes the values of a step; most are dropped unread.

        Args:
          step: number of the step.
          rate: its learning rate, a number or on the device.
          stats: its values on the device, 'loss' among them.
          mode: where they are logged.
        """
        self._log.tick(step, stats["loss"])
        if step == 1 or step % self._every == 0:
            self.flush()
            self._pending = (mode, step, rate, stats)

    def flush(self) -> None:
        """Writes the entry that waits."""
        if self._pending is None:
            return
        mode, step, rate, stats = self._pending
        self._pending = None
        values = {f"training/{k}": float(v) for k, v in jax.device_get(stats).items()}
        self._log.scalars(mode, step, {"training/learning_rate": float(rate), **values})

    def drop(self) -> None:
        """Forgets the entry that waits."""
        self._pending = None


class SummaryWriter:
    """One mode of a RunLog, with the methods of Trax's summary writer."""

    def __init__(self, log: RunLog, mode: str) -> None:
        self._log, self._mode = log, mode

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Reports one value."""
        self._log.scalars(self._mode, step, {tag: value})

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Reports several values of one step."""
        self._log.scalars(self._mode, step, values)

"""What trainers report of their steps, without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from retrax.layers.running import PER_EXAMPLE_PREFIX
from retrax.trainer.run_log import RunLog

__all__ = ["StepReporter", "SummaryWriter"]

_MANY_SKIPS = 10  # Steps at the least loss scale after which training is stuck.


class StepReporter:
    """Logs every k-th step's values, read one entry later, when they are long computed.

    So the log costs no synchronisation with the device.
    """

    def __init__(self, log: RunLog, every: int) -> None:
        self._log, self._every = log, every
        self._pending: tuple[str, int, Any, Mapping[str, Any]] | None = None
        self._told_of_skips = False

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
        shown = {
            name: x
            for name, x in stats.items()
            if not name.startswith(PER_EXAMPLE_PREFIX)
        }
        # Of a summary that is an array, its mean.
        values = {
            f"training/{name}": float(np.mean(np.asarray(x, np.float64)))
            for name, x in jax.device_get(shown).items()
        }
        self._log.scalars(mode, step, {"training/learning_rate": float(rate), **values})
        n_bad = values.get("training/bad_steps_at_min", 0)
        if n_bad >= _MANY_SKIPS and not self._told_of_skips:
            self._told_of_skips = True
            self._log.line(
                f"Step {step:6d}: {n_bad:.0f} steps in a row were skipped with the "
                f"loss scale at its least, {values['training/loss_scale']:g}: no "
                "gradient is finite. Look at the data and the learning rate, or train "
                "in 'mixed_bfloat16'."
            )

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

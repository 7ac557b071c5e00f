"""Callbacks that are ready to use, and Trax's base of them.

`trainer.callback` has the base and says when what is called. Those here watch metrics
and time; `weight_callbacks` act on weights, `inspection` looks into training. All are
found in this module, and may be given to Trainer, Loop and, by gin, to `train`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import gin

from retrax.errors import ConfigError
from retrax.supervised.inspection import GradientNoise, Profile, UpdateRatio
from retrax.supervised.weight_callbacks import FreezeUntil, ModelEMA, load_ema
from retrax.trainer.arguments import check_count
from retrax.trainer.callback import Callback, StepValues

__all__ = [
    "Callback",
    "EarlyStopping",
    "FreezeUntil",
    "GradientNoise",
    "ModelEMA",
    "Profile",
    "ReduceOnPlateau",
    "SkipNaN",
    "StepValues",
    "StopOnNaN",
    "TimeLimit",
    "TrainingStepCallback",
    "UpdateRatio",
    "load_ema",
]


class TrainingStepCallback:
    """Trax's base of callbacks: made of a loop, called at the steps it chooses.

    A loop takes subclasses, or `functools.partial` of them, and makes them itself.
    """

    def __init__(self, loop: Any) -> None:
        """Makes a callback of the Loop (or Trainer) that will call it."""
        self._loop = loop

    def call_at(self, step: int) -> bool:
        """Returns whether to call `on_step_begin` and `on_step_end` at a step."""
        raise NotImplementedError(f"{type(self).__name__} must define call_at(step).")

    def on_step_begin(self, step: int) -> None:
        """Called before a training step."""

    def on_step_end(self, step: int) -> None:
        """Called after a training step."""


class _MetricCallback(Callback):
    """Watches one metric of evaluation: how long has it not become better?"""

    def __init__(
        self, metric: str, patience: int, mode: str = "min", min_delta: float = 0.0
    ) -> None:
        if mode not in ("min", "max"):
            raise ConfigError(
                f"{self.name}: mode must be 'min' or 'max', got {mode!r}."
            )
        self._patience = check_count(f"{self.name}: patience", patience, least=1)
        self._metric, self._mode, self._min_delta = metric, mode, min_delta
        self._best, self._best_step, self._n_worse = math.nan, 0, 0

    def look(self) -> None:
        """Takes the newest value; raises ConfigError if there is no such metric."""
        history = self.run.history
        values = history.get("eval", f"metrics/{self._metric}")
        if not values:
            there = [
                m.removeprefix("metrics/") for m in history.metrics_for_mode("eval")
            ]
            raise ConfigError(
                f"{self.name}: metric={self._metric!r} is no evaluation metric of this "
                f"run; there are: {', '.join(there) or 'none'}."
            )
        step, value = values[-1]
        better = self._best - value if self._mode == "min" else value - self._best
        if math.isnan(self._best) and not math.isnan(value) or better > self._min_delta:
            self._best, self._best_step, self._n_worse = value, step, 0
        else:  # A NaN is never better.
            self._n_worse += 1

    def state(self) -> dict[str, Any]:
        return {
            "best": self._best,
            "best_step": self._best_step,
            "n_worse": self._n_worse,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._best, self._best_step = state["best"], state["best_step"]
        self._n_worse = state["n_worse"]


@gin.configurable(module="retrax.supervised.callbacks")
class EarlyStopping(_MetricCallback):
    """Ends the run when a metric has not become better for some evaluations."""

    def __init__(
        self,
        metric: str = "loss",
        patience: int = 5,
        mode: str = "min",
        min_delta: float = 0.0,
    ) -> None:
        """Makes the callback.

        Args:
          metric: name of an evaluation metric.
          patience: evaluations in a row without a better value that end the run.
          mode: 'min' if lower is better, 'max' if higher is.
          min_delta: values that are better by no more than this do not count.
        """
        super().__init__(metric, patience, mode, min_delta)

    def on_run_begin(self) -> None:
        self._judge()

    def on_eval_end(self, step: int) -> None:
        self.look()
        self._judge()

    def _judge(self) -> None:
        if self._n_worse >= self._patience:
            self.run.stop(
                f"EarlyStopping: {self._metric} has not become better than "
                f"{self._best:.6g} (step {self._best_step}) in {self._n_worse} "
                "evaluations."
            )


@gin.configurable(module="retrax.supervised.callbacks")
class ReduceOnPlateau(_MetricCallback):
    """Lowers the learning rate when a metric does not become better any more."""

    def __init__(
        self,
        metric: str = "loss",
        factor: float = 0.1,
        patience: int = 5,
        mode: str = "min",
        min_delta: float = 0.0,
        min_rate: float = 0.0,
    ) -> None:
        """Makes the callback.

        Args:
          metric: name of an evaluation metric.
          factor: what the rate of the schedule is multiplied by, once more each time.
          patience: evaluations in a row without a better value.
          mode: 'min' if lower is better, 'max' if higher is.
          min_delta: values that are better by no more than this do not count.
          min_rate: per step; the rate is not lowered below it.
        """
        super().__init__(metric, patience, mode, min_delta)
        if not 0 < factor < 1:
            raise ConfigError(
                f"ReduceOnPlateau: factor must be in (0, 1), got {factor!r}."
            )
        self._factor, self._min_rate, self._scale = factor, min_rate, 1.0

    def on_eval_end(self, step: int) -> None:
        self.look()
        if self._n_worse >= self._patience:
            self._n_worse = 0
            self._scale *= self._factor
            self.run.say(
                f"ReduceOnPlateau: {self._metric} has not become better in "
                f"{self._patience} evaluations: learning rates are multiplied by "
                f"{self._scale:.3g} from here on."
            )

    def learning_rate(self, step: int, rate: float) -> float:
        return max(rate * self._scale, min(rate, self._min_rate))

    def state(self) -> dict[str, Any]:
        return {**super().state(), "scale": self._scale}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._scale = state["scale"]


@gin.configurable(module="retrax.supervised.callbacks")
class TimeLimit(Callback):
    """Ends the run, saved, before a time is over; the next run goes on from there."""

    def __init__(
        self,
        seconds: float,
        margin: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes the callback; time counts from here.

        Args:
          seconds: how long the process may train.
          margin: seconds to leave for saving, beside twice the longest step so far.
          clock: returns the time in seconds.
        """
        if not seconds > 0 or margin < 0:
            raise ConfigError(
                f"TimeLimit: seconds must be above 0 and margin not below, got "
                f"{seconds!r} and {margin!r}."
            )
        self._clock, self._begin = clock, clock()
        self._limit, self._margin = seconds, margin
        self._step_begin, self._longest = self._begin, 0.0

    def on_step_begin(self, step: int) -> None:
        self._step_begin = self._clock()

    def on_step_end(self, step: int) -> None:
        now = self._clock()
        self._longest = max(self._longest, now - self._step_begin)
        spent = now - self._begin
        if spent + 2 * self._longest + self._margin >= self._limit:
            self.run.stop(
                f"TimeLimit: {spent:.1f} of {self._limit:g} seconds are over. Run the "
                "same command again to continue.",
                everywhere=False,
            )


@gin.configurable(module="retrax.supervised.callbacks")
class SkipNaN(Callback):
    """Reports steps skipped because of NaN or infinity, and stops if they are many.

    The step trainer leaves such steps out by itself (`skip_nonfinite`); without this
    callback their number is told in the log only. Values are read one step later, so
    that training need not wait for them.
    """

    def __init__(self, max_in_a_row: int = 100) -> None:
        """Makes the callback.

        Args:
          max_in_a_row: more skipped steps in a row than this end the run.
        """
        self._most = check_count(f"{self.name}: max_in_a_row", max_in_a_row)
        self._n_bad = 0
        self._before: StepValues | None = None

    def attach(self, run: Any) -> None:
        super().attach(run)
        for trainer in run.owner.step_trainers:
            if not getattr(trainer, "skip_nonfinite", True):
                raise ConfigError(
                    f"{self.name} needs skip_nonfinite=True, so that what is saved is "
                    "finite; set it in step_options."
                )

    def on_step_end(self, step: int) -> None:
        before, self._before = self._before, self.run.values
        if before is not None:
            self._judge(before)

    def on_eval_end(self, step: int) -> None:
        self._look()

    def on_run_end(self) -> None:
        self._look()

    def state(self) -> dict[str, Any]:
        self._look()
        return {"n_bad": self._n_bad}

    def restore(self, state: dict[str, Any]) -> None:
        self._n_bad, self._before = state["n_bad"], None

    def _look(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            self._judge(before)

    def _judge(self, values: StepValues) -> None:
        if values["grads_finite"]:
            self._n_bad = 0
            return
        self._n_bad += 1
        what = f"step {values.step} was skipped (loss {values['loss']:g})"
        self.run.say(f"{self.name}: a gradient is not finite: {what}.")
        if self._n_bad > self._most:
            self.run.stop(
                f"{self.name}: gradients are not finite, {self._n_bad} steps in a row, "
                f"up to step {values.step}; weights are as before them. Lower the "
                "learning rate, clip gradients (clip_grad_norm), or look at the data."
            )


@gin.configurable(module="retrax.supervised.callbacks")
class StopOnNaN(SkipNaN):
    """Ends the run at the first step whose gradients are not finite.

    The weights that are saved are those before that step.
    """

    def __init__(self) -> None:
        """Makes the callback."""
        super().__init__(max_in_a_row=0)

"""`CheckpointPolicy`: when a run is saved, and which of its checkpoints stay.

One small value that `Checkpointer` follows; configurable with gin under its own name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import gin

from retrax.errors import ConfigError

__all__ = ["CheckpointPolicy"]


@gin.configurable(module="retrax.trainer")
@dataclasses.dataclass(frozen=True)
class CheckpointPolicy:
    """When to save beside the evaluations, and how long a checkpoint stays.

    Attributes:
      every_steps: steps between checkpoints; None leaves it to evaluations.
      every_minutes: minutes between checkpoints, looked at after each step.
      at_steps: steps that are saved and kept for good.
      keep_every: steps divisible by this are saved and kept for good.
      keep_last: number of newest checkpoints that stay. Two always do, as model.pkl and
        model.previous.pkl; above two, they stay as recent_{step}.pkl.
      background: write in a thread while training goes on; False makes training wait.

    Raises:
      ConfigError: a value that cannot work.

    Example:
      >>> CheckpointPolicy(every_steps=100, keep_every=1000).is_due(200)
      True
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    at_steps: Iterable[int] = ()
    keep_every: int | None = None
    keep_last: int = 2
    background: bool = True

    def __post_init__(self) -> None:
        for name in ("every_steps", "keep_every"):
            _check_count(name, getattr(self, name), least=1, optional=True)
        _check_count("keep_last", self.keep_last, least=1)
        minutes = self.every_minutes
        if minutes is not None and not (
            isinstance(minutes, int | float) and 0 < minutes < math.inf
        ):
            raise ConfigError(
                f"CheckpointPolicy: every_minutes must be above 0, got {minutes!r}; "
                "None saves at steps only."
            )
        try:
            steps = frozenset(self.at_steps)
        except TypeError:
            raise ConfigError(
                f"CheckpointPolicy: at_steps must be a list of steps, got "
                f"{self.at_steps!r}."
            ) from None
        for step in steps:
            _check_count("a step of at_steps", step, least=0)
        object.__setattr__(self, "at_steps", steps)

    def is_kept(self, step: int) -> bool:
        """Whether the checkpoint of this step is kept for good."""
        return step in self._steps or _divides(self.keep_every, step)

    def is_due(self, step: int, minutes: float = 0.0) -> bool:
        """Whether to save after this step, `minutes` after the save before."""
        return (
            self.is_kept(step)
            or _divides(self.every_steps, step)
            or (self.every_minutes is not None and minutes >= self.every_minutes)
        )

    @property
    def _steps(self) -> frozenset[int]:
        return frozenset(self.at_steps)


def _divides(n: int | None, step: int) -> bool:
    return n is not None and step > 0 and step % n == 0


def _check_count(name: str, value: Any, least: int, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"CheckpointPolicy: {name} must be a whole number of at least {least}, got "
            f"{value!r}."
        )

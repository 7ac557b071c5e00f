"""Learning-rate schedules: functions from a training step to a rate.

A trainer calls a schedule once per step, on the host, and hands the number to the
compiled step; so these use plain Python arithmetic and never touch a device. Steps
count from 1. Needs nothing else of retrax.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import SupportsFloat, TypeAlias

import gin

__all__ = [
    "Schedule",
    "constant",
    "multifactor",
    "warmup",
    "warmup_and_rsqrt_decay",
    "warmup_cosine",
    "warmup_cosine_floor",
]

Schedule: TypeAlias = Callable[[SupportsFloat], float]
"""Takes a step (int, or a NumPy or JAX integer scalar), returns a rate."""


@gin.configurable(module="retrax.supervised.lr_schedules")
def constant(value: float) -> Schedule:
    """Returns a schedule that always gives value.

    Example:
      >>> constant(0.1)(1000)
      0.1
    """
    value = float(value)
    return lambda step: value


@gin.configurable(module="retrax.supervised.lr_schedules")
def warmup(n_warmup_steps: int, max_value: float) -> Schedule:
    """Returns a schedule that rises linearly, then stays.

    Args:
      n_warmup_steps: steps below max_value; step s <= n gives s / (n + 1) * max_value.
      max_value: the rate from step n + 1 on.

    Example:
      >>> [warmup(3, 1.0)(step) for step in (1, 3, 4, 100)]
      [0.25, 0.75, 1.0, 1.0]
    """
    return _ramp_then(n_warmup_steps, max_value, lambda step: float(max_value))


@gin.configurable(module="retrax.supervised.lr_schedules")
def warmup_and_rsqrt_decay(n_warmup_steps: int, max_value: float) -> Schedule:
    """Returns a schedule that rises linearly, then falls as 1 / sqrt(step).

    Args:
      n_warmup_steps: steps of the rise, as in `warmup`.
      max_value: the rate at step n + 1; later max_value * sqrt((n + 1) / step).

    Example:
      >>> [warmup_and_rsqrt_decay(3, 1.0)(step) for step in (2, 4, 16)]
      [0.5, 1.0, 0.5]
    """
    top = n_warmup_steps + 1
    return _ramp_then(
        n_warmup_steps, max_value, lambda step: max_value * math.sqrt(top / step)
    )


@gin.configurable(module="retrax.supervised.lr_schedules")
def warmup_cosine(
    n_warmup_steps: int, max_value: float, n_steps: int, min_value: float = 0.0
) -> Schedule:
    """Returns a schedule that rises linearly, then falls along half a cosine.

    Not in Trax. Equal to `optax.warmup_cosine_decay_schedule(0, max_value,
    n_warmup_steps + 1, n_steps, min_value)`.

    Args:
      n_warmup_steps: steps of the rise, as in `warmup`.
      max_value: the rate at step n_warmup_steps + 1.
      n_steps: the step at which min_value is reached; it stays from there on.
      min_value: the last rate.

    Raises:
      ValueError: n_steps leaves no step to fall.

    Example:
      >>> [round(warmup_cosine(1, 1.0, 10)(step), 3) for step in (1, 2, 6, 10, 99)]
      [0.5, 1.0, 0.5, 0.0, 0.0]
    """
    top = n_warmup_steps + 1
    if n_steps <= top:
        raise ValueError(
            f"n_steps is {n_steps}, but the rise takes n_warmup_steps + 1 = {top} "
            f"steps; give n_steps > {top}, or a shorter rise."
        )

    def fall(step: float) -> float:
        done = min(1.0, (step - top) / (n_steps - top))
        return min_value + (max_value - min_value) * (1 + math.cos(math.pi * done)) / 2

    return _ramp_then(n_warmup_steps, max_value, fall)


@gin.configurable(module="retrax.supervised.lr_schedules")
def warmup_cosine_floor(
    n_warmup_steps: int,
    max_value: float,
    n_steps: int,
    end_factor: float = 0.0,
    hold_after_final: bool = True,
) -> Schedule:
    """Returns a schedule that rises from 0, then falls along a cosine to a floor.

    Not in Trax. With n = step - 1 finished steps the rate is max_value * n / w below
    w = n_warmup_steps, then max_value * max(end_factor, (1 + cos(pi * t)) / 2), t going
    from 0 at n = w to 1 at n = n_steps. The floor cuts the cosine off, where
    `warmup_cosine` leads it there.

    Args:
      n_warmup_steps: w, steps of the rise; the first step has rate 0.
      max_value: the rate after w steps.
      n_steps: where the cosine is 0.
      end_factor: the rate is never less than this share of max_value after the rise.
      hold_after_final: stay at the floor after n_steps; else the cosine rises again.

    Raises:
      ValueError: a number of steps is negative, or n_steps is below n_warmup_steps.

    Example:
      >>> schedule = warmup_cosine_floor(2, 1.0, 10, end_factor=0.1)
      >>> [round(schedule(n + 1), 3) for n in (0, 1, 2, 6, 10, 99)]
      [0.0, 0.5, 1.0, 0.5, 0.1, 0.1]
    """
    if not 0 <= n_warmup_steps <= n_steps:
        raise ValueError(
            "warmup_cosine_floor needs 0 <= n_warmup_steps <= n_steps, got "
            f"n_warmup_steps={n_warmup_steps}, n_steps={n_steps}."
        )
    length = max(1, n_steps - n_warmup_steps)

    def schedule(step: SupportsFloat) -> float:
        n = float(step) - 1
        if n < n_warmup_steps:
            return max_value * n / max(1, n_warmup_steps)
        done = (n - n_warmup_steps) / length
        done = min(done, 1.0) if hold_after_final else done
        return max_value * max(end_factor, (1 + math.cos(math.pi * done)) / 2)

    return schedule


@gin.configurable(module="retrax.supervised.lr_schedules")
def multifactor(
    factors: str = "constant * linear_warmup * rsqrt_decay",
    constant: float = 0.1,
    warmup_steps: int = 400,
    decay_factor: float = 0.5,
    steps_per_decay: int = 20000,
    steps_per_cycle: int = 100000,
    second_constant: float = 0.01,
    second_constant_step: int = 10000,
    minimum: float = 0,
) -> Schedule:
    """Returns a schedule that is a product of named factors.

    Args:
      factors: names joined by '*', of

        * constant: constant.
        * two_constants: constant before second_constant_step, second_constant from it.
        * linear_warmup: min(1, step / warmup_steps).
        * rsqrt_decay: 1 / sqrt(max(step, warmup_steps)).
        * rsqrt_normalized_decay: the same times sqrt(warmup_steps), 1 at its start.
        * decay_every: decay_factor to the power (step // steps_per_decay).
        * cosine_decay: (1 + cos(pi * t)) / 2, t the fraction of a cycle of
          steps_per_cycle steps gone since warmup_steps; starts again at each cycle.

      constant: value of constant, and the first of two_constants.
      warmup_steps: steps until linear_warmup is 1; 0: no warm-up.
      decay_factor: see decay_every.
      steps_per_decay: see decay_every.
      steps_per_cycle: see cosine_decay.
      second_constant: see two_constants.
      second_constant_step: see two_constants.
      minimum: the product is never smaller.

    Raises:
      ValueError: an unknown factor, or a count of steps that makes no sense.

    Example:
      >>> schedule = multifactor(constant=2.0, warmup_steps=4)
      >>> schedule(2), schedule(16)
      (0.5, 0.5)
    """
    known = _factor_functions(
        constant,
        warmup_steps,
        decay_factor,
        steps_per_decay,
        steps_per_cycle,
        second_constant,
        second_constant_step,
    )
    names = [name.strip() for name in factors.split("*")]
    for name in names:
        if name not in known:
            raise ValueError(
                f"unknown factor {name!r} in factors={factors!r}; known are "
                f"{', '.join(known)}."
            )
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps is {warmup_steps}; give 0 for no warm-up.")
    _check_positive("decay_every" in names, "steps_per_decay", steps_per_decay)
    _check_positive("cosine_decay" in names, "steps_per_cycle", steps_per_cycle)
    chosen = [known[name] for name in names]

    def schedule(step: SupportsFloat) -> float:
        s = float(step)
        return float(max(math.prod(factor(s) for factor in chosen), minimum))

    return schedule


def _factor_functions(
    constant: float,
    warmup_steps: int,
    decay_factor: float,
    steps_per_decay: int,
    steps_per_cycle: int,
    second_constant: float,
    second_constant_step: int,
) -> dict[str, Callable[[float], float]]:
    warmup_floor = max(warmup_steps, 1)

    def cosine_decay(s: float) -> float:
        done = max(0.0, (s - warmup_steps) / steps_per_cycle) % 1
        return (1 + math.cos(math.pi * done)) / 2

    return {
        "constant": lambda s: constant,
        "two_constants": lambda s: (
            constant if s < second_constant_step else second_constant
        ),
        "linear_warmup": lambda s: min(1.0, s / warmup_steps) if warmup_steps else 1.0,
        "rsqrt_decay": lambda s: 1 / math.sqrt(max(s, warmup_floor)),
        "rsqrt_normalized_decay": lambda s: math.sqrt(
            warmup_floor / max(s, warmup_floor)
        ),
        "decay_every": lambda s: decay_factor ** (s // steps_per_decay),
        "cosine_decay": cosine_decay,
    }


def _ramp_then(
    n_warmup_steps: int, max_value: float, body: Callable[[float], float]
) -> Schedule:
    if n_warmup_steps < 0:
        raise ValueError(
            f"n_warmup_steps is {n_warmup_steps}; give 0 for no warm-up, or more."
        )
    top = n_warmup_steps + 1

    def schedule(step: SupportsFloat) -> float:
        s = float(step)
        return float(s / top * max_value if s < top else body(s))

    return schedule


def _check_positive(needed: bool, name: str, value: float) -> None:
    if needed and value <= 0:
        raise ValueError(f"{name} is {value}; a factor divides by it: give 1 or more.")

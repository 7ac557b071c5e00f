"""How many steps there are between evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from retrax.trainer.arguments import check_count

__all__ = ["at_steps", "epoch_lengths", "epochs"]


def epochs(
    total_steps: int, steps_to_skip: int, epoch_steps: Iterable[int]
) -> Iterator[int]:
    """Yields the steps of each epoch up to total_steps, without those done already.

    Example:
      >>> list(epochs(10, 3, [1, 4, 4, 4]))
      [2, 4, 1]
    """
    done = 0
    for n in epoch_steps:
        end = min(done + n, total_steps)
        if end > steps_to_skip:
            yield end - max(done, steps_to_skip)
        done += n
        if done >= total_steps:
            return


def epoch_lengths(eval_frequency: int | None, steps: int) -> Iterator[int]:
    """Yields 1, eval_frequency - 1, then eval_frequency for ever; or steps once."""
    if not eval_frequency:
        yield steps
        return
    yield 1
    if eval_frequency > 1:
        yield eval_frequency - 1
    while True:
        yield eval_frequency


def at_steps(argument: str, when: Any, every: int | None) -> Callable[[int], bool]:
    """Returns a function that says at which steps something happens.

    Args:
      argument: name of the argument, for messages.
      when: function of the step; or a number n for step 1 and every n-th; or the steps;
        None for `every`.
      every: number that stands for None; None again means never.

    Raises:
      TypeError: `when` is none of these.
      ConfigError: a number is below 1.

    Example:
      >>> due = at_steps("eval_at", 10, None)
      >>> [step for step in range(1, 31) if due(step)]
      [1, 10, 20, 30]
    """
    when = every if when is None else when
    if when is None:
        return lambda step: False
    if callable(when):
        return lambda step: bool(when(step))
    if isinstance(when, Iterable) and not isinstance(when, str):
        steps = frozenset(check_count(f"a step of {argument}", s, 1) for s in when)
        return lambda step: step in steps
    try:
        n = check_count(argument, when, least=1)
    except TypeError:
        raise TypeError(
            f"{argument} must be a function of the step, a number of steps or a list "
            f"of steps, got {when!r}."
        ) from None
    return lambda step: step == 1 or step % n == 0

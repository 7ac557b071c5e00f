"""How many steps there are between evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["epoch_lengths", "epochs"]


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

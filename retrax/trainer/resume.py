"""How training data goes on after a restart, and how its mistakes are told.

Shared by Trainer and Loop; streams themselves are `retrax.data`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from retrax.data.streams import Stream
from retrax.errors import CheckpointError, ConfigError, DataError

__all__ = ["check_one_task", "check_resume_data", "next_batch", "restore_stream"]

_CHOICES = ("replay", "restart", "error")


def check_resume_data(how: str) -> str:
    """Returns `how` if it is a known choice; raises ConfigError if not."""
    if how not in _CHOICES:
        raise ConfigError(f"resume_data must be one of {_CHOICES}, got {how!r}.")
    return how


def check_one_task(payload: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a checkpoint of several training tasks."""
    n_more = len(payload.get("tasks", ()))
    if n_more:
        raise CheckpointError(
            f"it was saved by a Loop of {n_more + 1} training tasks; go on with such a "
            "Loop, or start anew from its weights with init_checkpoint."
        )


def next_batch(
    stream: Stream, step: int, name: str = "the training data"
) -> tuple[Any, ...] | None:
    """Returns the batch for a step, or None when the data has ended.

    Raises:
      DataError: the batch is unlike the first one; names the step, the part, what was
        expected and what came.
    """
    try:
        return next(stream)
    except StopIteration:
        return None
    except DataError as e:
        raise DataError(f"{name} for step {step}: {e}") from e


def restore_stream(
    stream: Stream,
    position: dict[str, Any],
    how: str,
    say: Callable[[str], None],
    name: str = "the training data",
) -> None:
    """Puts a stream where it was when the checkpoint was written.

    Args:
      stream: the stream, at its beginning.
      position: what its `state()` was.
      how: what to do with plain generators: 'replay', 'restart' or 'error'.
      say: writes a line for a person to read.
      name: how messages call the stream.

    Raises:
      CheckpointError: it cannot be put there; says why.
    """
    n_replayed = _n_generated(position)
    if n_replayed and how == "error":
        raise CheckpointError(
            f"{name} comes from a plain generator, which cannot say where it is; "
            f"{n_replayed} batches were taken. With resume_data='replay' they are read "
            "again and dropped, with 'restart' the data begins anew. A stream with a "
            "position, such as data.ArrayStream, needs neither."
        )
    if n_replayed and how == "restart":
        say(f"{name} begins anew (resume_data='restart').")
        return
    if n_replayed:
        say(f"Replaying {n_replayed} batches of {name}, which comes from a generator.")
    try:
        stream.restore(position)
    except (ValueError, TypeError, KeyError) as e:
        raise CheckpointError(f"{name} cannot go on where it was: {e}") from e


def _n_generated(position: Any) -> int:
    """Number of batches a plain generator in this position has given; 0 if none."""
    if not isinstance(position, dict):
        return 0
    own = position.get("batches", 0) if position.get("kind") == "generator" else 0
    return max([own, *map(_n_generated, position.values())])

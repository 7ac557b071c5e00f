"""Pipelines: functions from generator to generator. All are found in this module.

Fourth in the order of `retrax.data`, after streams. Names and meaning are those of
Trax; here every shuffle has its own seed, nothing is dropped unless asked for, and a
finite source gives a finite pipeline. Here are those that work on the stream itself.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import gin
import numpy as np

from retrax.data.batching import (
    Batch,
    BucketByLength,
    UnBatch,
    batch,
    bucket_by_length,
    pad_to_max_dims,
)
from retrax.data.compose import Parallel, Serial
from retrax.data.examples import (
    AddLossWeights,
    AppendValue,
    CastTo,
    Dup,
    FilterByLength,
    FilterEmptyExamples,
    PadToLength,
    Stage,
    TruncateToLength,
    add_loss_weights,
)
from retrax.data.prefetch import PrefetchStream
from retrax.data.streams import Position, Stream

__all__ = [
    "AddLossWeights",
    "AppendValue",
    "Batch",
    "BucketByLength",
    "CastTo",
    "Dup",
    "FilterByLength",
    "FilterEmptyExamples",
    "Log",
    "PadToLength",
    "Parallel",
    "Prefetch",
    "Serial",
    "Shuffle",
    "TruncateToLength",
    "UnBatch",
    "add_loss_weights",
    "batch",
    "bucket_by_length",
    "pad_to_max_dims",
    "shuffle",
]


@gin.configurable(module="retrax.data")
def Shuffle(queue_size: int = 1024, seed: int = 0) -> Stage:
    """Returns a function that shuffles examples in a queue; see `shuffle`."""
    _check_queue(queue_size, seed)
    return lambda generator: shuffle(generator, queue_size, seed)


def shuffle(samples: Iterable[Any], queue_size: int, seed: int = 0) -> Iterator[Any]:
    """Yields examples in an order that is random within a queue.

    Fills the queue, then gives out a random one of it for each that comes in, and at
    the end the rest in random order. The order depends on the seed alone: each pass
    over the same examples gives the same one, and no global random state is touched.

    Args:
      samples: the examples.
      queue_size: how many are held; 1 keeps the order.
      seed: non-negative int.

    Raises:
      ValueError: queue_size is below 1, or the seed negative.
    """
    _check_queue(queue_size, seed)
    rng = np.random.Generator(np.random.PCG64(seed))
    queue: list[Any] = []
    for sample in samples:
        if len(queue) < queue_size:
            queue.append(sample)
        else:
            i = int(rng.integers(queue_size))
            out, queue[i] = queue[i], sample
            yield out
    rng.shuffle(queue)
    yield from queue


@gin.configurable(module="retrax.data")
def Log(n_steps_per_example: int = 1, only_shapes: bool = True) -> Stage:
    """Returns a function that prints every n-th example as it passes.

    Args:
      n_steps_per_example: n.
      only_shapes: whether to print shapes and dtypes instead of values.
    """
    if n_steps_per_example < 1:
        raise ValueError(f"Log needs at least 1 step, got {n_steps_per_example}")

    def log(generator: Iterable[Any]) -> Iterator[Any]:
        for n, example in enumerate(generator):
            if n % n_steps_per_example == 0:
                shown = _shapes(example) if only_shapes else example
                print(f"example {n}: {shown}", flush=True)
            yield example

    return log


@gin.configurable(module="retrax.data")
def Prefetch(n_prefetch: int = 2) -> Stage:
    """Returns a function that reads `n_prefetch` examples ahead in a thread.

    An exception of the source is raised here, and a finite source ends.
    """

    def prefetch(generator: Iterable[Any]) -> Iterator[Any]:
        with PrefetchStream(_Untouched(iter(generator)), n_prefetch) as stream:
            yield from stream

    return prefetch


class _Untouched(Stream):
    """Hands on items of any form, without a position."""

    def __init__(self, iterator: Iterator[Any]):
        self._iterator = iterator

    def read(self) -> Any:
        return next(self._iterator)

    def position(self) -> Position:
        return {}


def _shapes(example: Any) -> Any:
    if isinstance(example, dict):
        return {key: _shapes(part) for key, part in example.items()}
    if isinstance(example, (tuple, list)):
        return tuple(_shapes(part) for part in example)
    array = np.asarray(example)
    return f"{array.dtype}{list(array.shape)}"


def _check_queue(queue_size: int, seed: int) -> None:
    if queue_size < 1 or seed < 0:
        raise ValueError(
            "shuffling needs queue_size >= 1 and seed >= 0, got "
            f"queue_size={queue_size}, seed={seed}"
        )

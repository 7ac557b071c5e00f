"""`Inputs`: the training and evaluation streams of one task, with their shapes.

Fifth in the order of `retrax.data`, after streams and pipelines. The pipeline
functions are also found here, as they are in Trax.
"""

from collections.abc import Callable, Sequence
from typing import Any

import gin
import numpy as np

from retrax.data.batching import buckets_for_length, divisible
from retrax.data.pipeline import (
    AddLossWeights,
    AppendValue,
    Batch,
    BucketByLength,
    CastTo,
    Dup,
    FilterByLength,
    FilterEmptyExamples,
    Log,
    PadToLength,
    Parallel,
    Prefetch,
    Serial,
    Shuffle,
    TruncateToLength,
    UnBatch,
    add_loss_weights,
    batch,
    bucket_by_length,
    pad_to_max_dims,
    shuffle,
)
from retrax.data.shares import Shard
from retrax.data.sources import GeneratorStream, as_stream, check_source
from retrax.data.streams import Stream

__all__ = [
    "AddLossWeights",
    "AppendValue",
    "Batch",
    "BucketByLength",
    "CastTo",
    "Dup",
    "FilterByLength",
    "FilterEmptyExamples",
    "Inputs",
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
    "batcher",
    "bucket_by_length",
    "make_additional_stream",
    "make_inputs",
    "make_parallel_stream",
    "pad_to_max_dims",
    "shuffle",
]

_KINDS = ("train_stream", "eval_stream", "train_eval_stream")


class Inputs:
    """Bundles the streams of one task.

    Each source is a function of n_devices (or of nothing) that returns batches, or
    anything else that `as_stream` takes. The methods return a stream at its beginning
    at every call, so that a finite evaluation set is seen wholly every time. A bare
    iterator has one run only: the same stream is returned every time.

    Shapes and dtypes are found when they are first asked for, from the first training
    batch, which is not lost: the next training stream begins with it.

    Args:
      train_stream: source of training batches.
      eval_stream: source of evaluation batches; None: the training source.
      train_eval_stream: source of training data for evaluation, such as data without
        augmentation; None: the training source.
      tokenizer: what made ids of text, with `encode(text)` and `decode(ids)`; None for
        data that was no text. It is kept as the attribute of that name.

    Raises:
      TypeError: a source is nothing that batches can be read from.

    >>> x = np.ones((4, 3), np.float32)
    >>> inputs = Inputs(lambda n_devices: iter([(x, x[:, 0])]))
    >>> inputs.input_shape, inputs.target_shape
    ((3,), ())
    """

    def __init__(
        self,
        train_stream: Any,
        eval_stream: Any = None,
        train_eval_stream: Any = None,
        tokenizer: Any = None,
    ):
        self.tokenizer = tokenizer
        sources = (train_stream, eval_stream, train_eval_stream)
        for kind, source in zip(_KINDS, sources, strict=True):
            if source is not None or kind == "train_stream":
                check_source(source, f"Inputs: {kind}")
        self._sources = {
            kind: train_stream if source is None else source
            for kind, source in zip(_KINDS, sources, strict=True)
        }
        self._latest: dict[str, Stream] = {}
        self._probe: Stream | None = None
        self._example: list[tuple[tuple[int, ...], np.dtype]] | None = None

    def train_stream(self, n_devices: int = 1, shard: Shard = (0, 1)) -> Stream:
        """Returns a stream of training batches, for process i of n (`shard`)."""
        probe, self._probe = self._probe, None
        if probe is not None and (n_devices, shard) == (1, (0, 1)):
            return probe
        stream = self._make("train_stream", n_devices, shard)
        if probe is not None and probe is not stream:
            probe.close()
        return stream

    def eval_stream(self, n_devices: int = 1, shard: Shard = (0, 1)) -> Stream:
        """Returns a stream of evaluation batches, for process i of n (`shard`)."""
        return self._make("eval_stream", n_devices, shard)

    def train_eval_stream(self, n_devices: int = 1, shard: Shard = (0, 1)) -> Stream:
        """Returns a stream of batches from the training data to evaluate on."""
        return self._make("train_eval_stream", n_devices, shard)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the batch dimension."""
        return self._look()[0][0][1:]

    @property
    def input_dtype(self) -> np.dtype:
        """Dtype of the inputs."""
        return self._look()[0][1]

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Shape of one target, without the batch dimension.

        The target is part 1 of a batch (Trax takes the last part, which may be loss
        weights); of batches with one part it is that part.
        """
        return self._look()[:2][-1][0][1:]

    @property
    def target_dtype(self) -> np.dtype:
        """Dtype of the targets; see `target_shape`."""
        return self._look()[:2][-1][1]

    @property
    def example_shape_dtype(self) -> tuple[list[tuple[int, ...]], list[np.dtype]]:
        """Shapes, with the batch dimension, and dtypes of a batch's parts."""
        parts = self._look()
        return [shape for shape, _ in parts], [dtype for _, dtype in parts]

    def _look(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        if self._example is None:
            if self._probe is None:
                self._probe = self._make("train_stream", 1)
            try:
                parts = self._probe.peek()
            except StopIteration:
                raise ValueError("the training stream holds no batch") from None
            self._example = [(part.shape, part.dtype) for part in parts]
        return self._example

    def _make(self, kind: str, n_devices: int, shard: Shard = (0, 1)) -> Stream:
        source = self._sources[kind]
        if isinstance(source, Stream):
            stream = _fresh(source)
            return stream if shard[1] == 1 else stream.sharded(shard)
        stream = as_stream(source, n_devices, shard)
        for earlier in self._latest.values():
            if earlier is stream:  # a function that returns one Stream at every call
                return _fresh(stream)
            if isinstance(earlier, GeneratorStream) and earlier.reads_like(stream):
                # One iterator at every call must keep one wrapper, or batches that
                # the earlier wrapper looked at would be lost.
                return earlier
        self._latest[kind] = stream
        return stream


@gin.configurable(module="retrax.data")
def make_inputs(train_stream: Any = gin.REQUIRED, eval_stream: Any = None) -> Inputs:
    """Returns `Inputs` of two sources; mostly for gin configurations.

    A list of pipeline functions is joined by `Serial`, and run anew at every call.
    """
    return Inputs(_joined(train_stream), _joined(eval_stream))


@gin.configurable(module="retrax.data")
def make_additional_stream(stream: Any = gin.REQUIRED) -> Stream:
    """Returns one stream from a list of pipeline functions, for additional tasks."""
    return as_stream(_joined(stream))


@gin.configurable(module="retrax.data")
def make_parallel_stream(
    streams: Sequence[Any] = gin.REQUIRED,  # type: ignore[assignment]
    counters: Sequence[int] | None = None,
) -> Stream:
    """Returns one stream that mixes several sources as `Parallel` does."""
    return as_stream(Parallel(streams, counters=counters))


@gin.configurable(module="retrax.data")
def batcher(
    data_streams: Any = gin.REQUIRED,
    variable_shapes: bool = True,
    batch_size_per_device: int = 32,
    batch_size: int | None = None,
    eval_batch_size: int = 32,
    bucket_length: int = 32,
    buckets: tuple[list[int], list[int]] | None = None,
    buckets_include_inputs_in_length: bool = False,
    batch_shuffle_size: int | None = None,
    max_eval_length: int | None = None,
    id_to_mask: int | None = None,
    strict_pad_on_len: bool = False,
) -> Inputs:
    """Returns `Inputs` that batch two sources of single (input, target) examples.

    Args:
      data_streams: a pair (train, eval) of functions without arguments that return
        examples, or a function that returns the pair.
      variable_shapes: whether to choose buckets by length if none are given: length
        bucket_length and batch_size, and shorter ones with larger batches and longer
        ones with smaller batches.
      batch_size_per_device: training examples for each device, if batch_size is None.
      batch_size: training examples in a batch, over all devices.
      eval_batch_size: evaluation examples in a batch, over all devices.
      bucket_length: length of the middle bucket.
      buckets: (boundaries, batch_sizes) as of `BucketByLength`.
      buckets_include_inputs_in_length: whether length is the larger of input and
        target lengths, instead of the target's.
      batch_shuffle_size: how many training batches to shuffle among, or None.
      max_eval_length: longest bucket in evaluation; None: 32 times bucket_length.
      id_to_mask: target id whose loss weight is 0, or None.
      strict_pad_on_len: see `BucketByLength`.

    The last batches of a finite source may be smaller; nothing is dropped.
    """
    pair: Any = data_streams() if callable(data_streams) else data_streams
    train, evaluate = pair
    keys = [0, 1] if buckets_include_inputs_in_length else [1]

    def batches(source: Any, training: bool) -> Callable[[int], Any]:
        def make(n_devices: int) -> Any:
            size = batch_size or batch_size_per_device * n_devices
            size = divisible(size if training else eval_batch_size, n_devices)
            chosen = buckets
            if chosen is None and variable_shapes:
                longest = None if training else max_eval_length or bucket_length * 32
                chosen = buckets_for_length(bucket_length, size, longest, n_devices)
            stream = Serial(source)()
            if chosen:
                stream = BucketByLength(*chosen, keys, 0, strict_pad_on_len)(stream)
            else:
                stream = batch(stream, size)
            if training and batch_shuffle_size is not None:
                stream = shuffle(stream, batch_shuffle_size)
            return add_loss_weights(stream, id_to_mask)

        return make

    return Inputs(batches(train, True), batches(evaluate, False), batches(train, False))


def _fresh(stream: Stream) -> Stream:
    try:
        return stream.fresh()
    except TypeError:  # it has one run only
        return stream


def _joined(source: Any) -> Any:
    if isinstance(source, (list, tuple)) and any(callable(part) for part in source):
        return Serial(*source)
    return source

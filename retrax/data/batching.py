"""Pipeline functions between examples and batches.

Fourth in the order of `retrax.data`, beside `examples` and below `pipeline`. Arrays
of a batch are padded with zeros at the end of every axis to a common shape. What is
left over when the examples end is returned as smaller batches, unless
`drop_remainder` asks for equal ones.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import gin
import numpy as np

from retrax.data.examples import Stage, example_length
from retrax.data.streams import as_batch


@gin.configurable(module="retrax.data")
def Batch(batch_size: int, drop_remainder: bool = False) -> Stage:
    """Returns a function that stacks examples to batches; see `batch`."""
    _check_sizes("Batch", [batch_size])
    return lambda generator: batch(generator, batch_size, drop_remainder)


def batch(
    generator: Iterable[Any], batch_size: int, drop_remainder: bool = False
) -> Iterator[tuple[np.ndarray, ...]]:
    """Stacks each `batch_size` examples, padded to the largest of them.

    Args:
      generator: examples: tuples of arrays, or single arrays (batches of one part).
      batch_size: examples in a batch.
      drop_remainder: whether to leave out a last batch that is smaller.

    >>> examples = ([i] * i for i in (1, 2, 3))
    >>> [x.tolist() for (x,) in batch((np.array(e) for e in examples), 2)]
    [[[1, 0], [2, 2]], [[3, 3, 3]]]
    """
    _check_sizes("batch", [batch_size])
    held: list[Any] = []
    for example in generator:
        held.append(as_batch(example))
        if len(held) == batch_size:
            yield _stack(held)
            held = []
    if held and not drop_remainder:
        yield _stack(held)


@gin.configurable(module="retrax.data")
def UnBatch() -> Stage:
    """Returns a function that yields the examples of batches one by one."""

    def unbatched(generator: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
        for item in generator:
            parts = as_batch(item)
            sizes = {part.shape[:1] for part in parts}
            if len(sizes) != 1 or not parts[0].ndim:
                raise ValueError(
                    "UnBatch needs parts with one leading dimension, got shapes "
                    f"{[part.shape for part in parts]}"
                )
            yield from zip(*parts, strict=True)

    return unbatched


@gin.configurable(module="retrax.data")
def BucketByLength(
    boundaries: Sequence[int],
    batch_sizes: Sequence[int],
    length_keys: Sequence[Any] | None = None,
    length_axis: int = 0,
    strict_pad_on_len: bool = False,
    drop_remainder: bool = False,
) -> Stage:
    """Returns a function that batches examples of similar length.

    Args:
      boundaries: increasing largest lengths of the buckets; one more bucket holds
        whatever is longer.
      batch_sizes: examples in a batch of each bucket, one more than boundaries.
      length_keys: the length of an example is that of the longest of these parts;
        None: of the first two.
      length_axis: the axis that is measured.
      strict_pad_on_len: see `pad_to_max_dims`.
      drop_remainder: whether to leave out the buckets that are not full at the end.

    Raises:
      ValueError: the numbers of boundaries and batch sizes do not fit.
    """
    _check_buckets(boundaries, batch_sizes)
    return lambda generator: bucket_by_length(
        generator,
        lambda example: example_length(example, length_keys, length_axis),
        boundaries,
        batch_sizes,
        strict_pad_on_len,
        drop_remainder,
    )


def bucket_by_length(
    generator: Iterable[Any],
    length_fn: Callable[[Any], int],
    boundaries: Sequence[int],
    batch_sizes: Sequence[int],
    strict_pad_on_len: bool = False,
    drop_remainder: bool = False,
) -> Iterator[tuple[np.ndarray, ...]]:
    """Batches examples by length; see `BucketByLength`.

    An example belongs to the first bucket whose boundary is not below its length.
    Buckets that are not full at the end come last, shortest first.
    """
    _check_buckets(boundaries, batch_sizes)
    limits = [*boundaries, None]
    buckets: list[list[Any]] = [[] for _ in limits]
    for example in generator:
        length = length_fn(example)
        k = sum(length > boundary for boundary in boundaries)
        buckets[k].append(as_batch(example))
        if len(buckets[k]) == batch_sizes[k]:
            yield _stack(buckets[k], limits[k], strict_pad_on_len)
            buckets[k] = []
    if not drop_remainder:
        for held, limit in zip(buckets, limits, strict=True):
            if held:
                yield _stack(held, limit, strict_pad_on_len)


def pad_to_max_dims(
    tensors: Sequence[np.ndarray],
    boundary: int | Sequence[int | None] | None = None,
    strict_pad_on_len: bool = False,
) -> np.ndarray:
    """Stacks arrays of one rank, padded with zeros to a common shape.

    Every dimension grows to the largest one, n. With a boundary it grows further, so
    that few different shapes occur: to the boundary, or, where that would be more
    than 2n, to the next power of two. If `strict_pad_on_len`, or with one boundary
    for each dimension, to the next multiple of the boundary (0 or None: to n).

    Raises:
      ValueError: the ranks differ, or do not fit the boundaries.

    >>> pad_to_max_dims([np.ones((2, 10)), np.ones((3, 9))], boundary=12).shape
    (2, 4, 12)
    """
    arrays = [np.asarray(t) for t in tensors]
    n_dims = arrays[0].ndim
    if any(a.ndim != n_dims for a in arrays):
        raise ValueError(
            f"cannot batch arrays of different rank: shapes {[a.shape for a in arrays]}"
        )
    largest = [max(sizes) for sizes in zip(*(a.shape for a in arrays), strict=True)]
    shape = _target(largest, boundary, strict_pad_on_len)
    if all(a.shape == shape for a in arrays):
        return np.stack(arrays)
    dtype = np.result_type(*{a.dtype for a in arrays})
    out = np.zeros((len(arrays), *shape), dtype)
    for row, a in zip(out, arrays, strict=True):
        row[tuple(slice(size) for size in a.shape)] = a
    return out


def buckets_for_length(
    length: int, batch_size: int, longest: int | None = None, n_devices: int = 1
) -> tuple[list[int], list[int]]:
    """Returns boundaries and batch sizes around a middle bucket.

    The boundaries are a quarter to 16 times `length`; batch sizes keep boundary times
    size about constant, and whatever is longer comes in batches of one per device.

    Args:
      length: boundary of the middle bucket.
      batch_size: examples in a batch of the middle bucket.
      longest: the last boundary, if not 16 times `length`.
      n_devices: all batch sizes are multiples of it.

    >>> buckets_for_length(32, 8)
    ([8, 16, 32, 64, 128, 256, 512], [32, 16, 8, 4, 2, 1, 1, 1])
    """
    boundaries = sorted({max(length * 2**k // 4, 1) for k in range(7)})
    if longest is not None:
        boundaries = [b for b in boundaries if b < longest] + [longest]
    sizes = [batch_size * length // b for b in boundaries] + [1]
    return boundaries, [divisible(size, n_devices) for size in sizes]


def divisible(size: int, n_devices: int) -> int:
    """Returns the batch size, rounded down to a positive multiple of n_devices."""
    return max(size // n_devices, 1) * n_devices


def _target(largest: list[int], boundary: Any, strict: bool) -> tuple[int, ...]:
    if boundary is None:
        return tuple(largest)
    each = isinstance(boundary, (list, tuple))
    boundaries: list[Any] = list(boundary) if each else [boundary] * len(largest)
    if len(boundaries) != len(largest):
        raise ValueError(
            f"{len(boundaries)} boundaries {boundaries} for arrays of rank "
            f"{len(largest)}"
        )
    fit = _next_multiple if each or strict else _boundary_or_power
    return tuple(fit(n, b) for n, b in zip(largest, boundaries, strict=True))


def _next_multiple(n: int, boundary: int | None) -> int:
    return n + -n % boundary if boundary else n


def _boundary_or_power(n: int, boundary: int) -> int:
    if n > boundary:
        return n
    return boundary if boundary <= 2 * n else 1 << max(n - 1, 0).bit_length()


def _stack(
    examples: list[Any], boundary: int | None = None, strict: bool = False
) -> tuple[np.ndarray, ...]:
    counts = {len(example) for example in examples}
    if len(counts) != 1:
        raise ValueError(
            f"cannot batch examples with different numbers of parts: {sorted(counts)}"
        )
    columns = zip(*examples, strict=True)
    return tuple(pad_to_max_dims(column, boundary, strict) for column in columns)


def _check_buckets(boundaries: Sequence[int], batch_sizes: Sequence[int]) -> None:
    if len(batch_sizes) != len(boundaries) + 1:
        raise ValueError(
            "batch_sizes needs one entry more than boundaries, for longer examples; "
            f"got boundaries {list(boundaries)} and batch_sizes {list(batch_sizes)}"
        )
    if any(a > b for a, b in zip(boundaries, boundaries[1:], strict=False)):
        raise ValueError(f"boundaries must increase, got {list(boundaries)}")
    _check_sizes("BucketByLength", batch_sizes)


def _check_sizes(what: str, sizes: Sequence[int]) -> None:
    if any(size < 1 for size in sizes):
        raise ValueError(f"{what} needs batch sizes of at least 1, got {list(sizes)}")

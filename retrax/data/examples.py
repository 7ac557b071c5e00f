"""Pipeline functions that work on one example at a time.

Fourth in the order of `retrax.data`, beside `batching` and below `pipeline`. Each
capitalised function returns a function from a generator to a generator. An example
is a tuple of arrays; most functions also take a single array (its key is 0) or a dict.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gin
import numpy as np
from absl import logging

Stage = Callable[[Iterable[Any]], Iterator[Any]]


@gin.configurable(module="retrax.data")
def AddLossWeights(id_to_mask: int | None = None) -> Stage:
    """Returns a function that adds loss weights; see `add_loss_weights`."""
    return lambda generator: add_loss_weights(generator, id_to_mask)


def add_loss_weights(
    generator: Iterable[Any], id_to_mask: int | None = None
) -> Iterator[Any]:
    """Adds loss weights to pairs, and sets those of a padding id to 0.

    (inputs, targets) becomes (inputs, targets, weights) with float32 ones of the
    targets' shape; weights that are there are kept, as float32. Where targets equal
    `id_to_mask` the weight becomes 0. Examples of other lengths pass unchanged.

    Raises:
      ValueError: id_to_mask is given and an example has not 2 or 3 parts.

    >>> pairs = [(np.array([5, 6]), np.array([7, 0]))]
    >>> next(add_loss_weights(pairs, id_to_mask=0))[2].tolist()
    [1.0, 0.0]
    """
    for example in generator:
        if not isinstance(example, (tuple, list)) or len(example) not in (2, 3):
            if id_to_mask is not None:
                raise ValueError(
                    f"id_to_mask={id_to_mask} needs examples (inputs, targets) or "
                    f"(inputs, targets, weights), got {_describe(example)}"
                )
            yield example
            continue
        targets = np.asarray(example[1])
        if len(example) == 2:
            weights = np.ones(targets.shape, np.float32)
        else:
            weights = np.asarray(example[2]).astype(np.float32)
        if id_to_mask is not None:
            weights = weights * (targets != id_to_mask).astype(np.float32)
        yield (example[0], example[1], weights)


@gin.configurable(module="retrax.data")
def Dup() -> Stage:
    """Returns a function that repeats the first part: (x, ...) -> (x, x, ...)."""

    def dup(generator: Iterable[Any]) -> Iterator[Any]:
        for example in generator:
            parts = example if isinstance(example, (tuple, list)) else (example,)
            yield (parts[0], *parts)

    return dup


@gin.configurable(module="retrax.data")
def CastTo(
    dtype: Any = np.int32, indices: Sequence[int] = (0, 1), debug: bool = False
) -> Stage:
    """Returns a function that casts the parts at `indices` to a dtype.

    Args:
      dtype: NumPy dtype or its name.
      indices: which parts; those that an example does not have are passed over.
      debug: whether to log parts whose dtype changes, except int64 to int32.
    """
    wanted = np.dtype(dtype)

    def cast(generator: Iterable[Any]) -> Iterator[Any]:
        for n, example in enumerate(generator):
            if not isinstance(example, (tuple, list)):
                raise ValueError(f"CastTo needs tuples, got {_describe(example)}")
            parts = list(example)
            for i in indices:
                if i >= len(parts):
                    continue
                part = np.asarray(parts[i])
                usual = part.dtype == np.int64 and wanted == np.int32
                if debug and part.dtype != wanted and not usual:
                    logging.info("CastTo: example %d, part %d was %s", n, i, part.dtype)
                parts[i] = part.astype(wanted, copy=False)
            yield tuple(parts)

    return cast


@gin.configurable(module="retrax.data")
def AppendValue(val: Mapping[Any, Any] | None = None) -> Stage:
    """Returns a function that appends values at the end of the last axis.

    Args:
      val: {key: value or values to append}, such as {0: 1, 1: 1} for an
        end-of-sequence id of 1; the parts keep their dtypes.
    """

    def append(part: np.ndarray, value: Any) -> np.ndarray:
        value = np.atleast_1d(np.asarray(value, part.dtype))
        if value.ndim < part.ndim:
            value = np.broadcast_to(value, (*part.shape[:-1], value.shape[-1]))
        return np.concatenate([part, value], axis=-1)

    return _edits(append, val or {})


@gin.configurable(module="retrax.data")
def FilterEmptyExamples(
    axes: Sequence[int] | None = None, debug: bool = False
) -> Stage:
    """Returns a function that drops examples with a part of shape (0,).

    Args:
      axes: which parts to look at; None: all.
      debug: whether to log each example that is dropped.
    """

    def filtered(generator: Iterable[Any]) -> Iterator[Any]:
        for example in generator:
            parts = example if isinstance(example, (tuple, list)) else (example,)
            looked = range(len(parts)) if axes is None else axes
            if any(i < len(parts) and np.shape(parts[i]) == (0,) for i in looked):
                if debug:
                    logging.info("FilterEmptyExamples drops %s", _describe(example))
            else:
                yield example

    return filtered


@gin.configurable(module="retrax.data")
def FilterByLength(
    max_length: int | None,
    min_length: int | None = 0,
    length_keys: Sequence[Any] | None = None,
    length_axis: int = 0,
) -> Stage:
    """Returns a function that keeps examples with min_length <= length <= max_length.

    The length is the largest size along `length_axis` of the parts `length_keys`
    (None: the first two, or one if there is one).

    Raises:
      ValueError: max_length and min_length are both None.
    """
    if max_length is None and min_length is None:
        raise ValueError("FilterByLength needs max_length, min_length or both")

    def filtered(generator: Iterable[Any]) -> Iterator[Any]:
        for example in generator:
            length = example_length(example, length_keys, length_axis)
            if max_length is not None and length > max_length:
                continue
            if min_length is not None and length < min_length:
                continue
            yield example

    return filtered


@gin.configurable(module="retrax.data")
def TruncateToLength(len_map: Mapping[Any, Any] | None = None) -> Stage:
    """Returns a function that cuts parts to at most the given shapes.

    Args:
      len_map: {key: shape or length}, such as {0: (256,), 1: (256,)}; a shape may
        name the first axes only, and None leaves an axis as it is. (Trax refills
        arrays of two and more dimensions in flat order; here each axis is cut.)
    """

    def cut(part: np.ndarray, shape: Any) -> np.ndarray:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if len(sizes) > part.ndim:
            raise ValueError(
                f"TruncateToLength: shape {sizes} for an array of shape {part.shape}"
            )
        return part[tuple(slice(size) for size in sizes)]

    return _edits(cut, len_map or {})


@gin.configurable(module="retrax.data")
def PadToLength(
    len_map: Mapping[Any, int] | None = None,
    pad_value: Mapping[Any, Any] | Any = 0,
    multiple: bool = False,
) -> Stage:
    """Returns a function that pads parts at the end of their first axis.

    Args:
      len_map: {key: length}; longer parts stay as they are.
      pad_value: one value for all parts, or {key: value}.
      multiple: whether to pad to the next multiple of the length instead (Trax pads
        by length modulo that number, which is a multiple only by accident).

    Raises:
      ValueError: len_map is None or holds a length below 1.

    >>> pad = PadToLength({0: 4}, multiple=True)
    >>> next(pad([(np.arange(5),)]))[0].tolist()
    [0, 1, 2, 3, 4, 0, 0, 0]
    """
    if not len_map or any(length < 1 for length in len_map.values()):
        raise ValueError(
            f"PadToLength needs len_map such as {{0: 128, 1: 128}}, got {len_map}"
        )
    values = dict(pad_value) if isinstance(pad_value, Mapping) else {}
    default = 0 if isinstance(pad_value, Mapping) else pad_value

    def pad(part: np.ndarray, length_and_value: tuple[int, Any]) -> np.ndarray:
        length, value = length_and_value
        n = len(part)
        missing = -n % length if multiple else max(0, length - n)
        widths = [(0, missing)] + [(0, 0)] * (part.ndim - 1)
        return np.pad(part, widths, constant_values=value)

    arguments = {key: (n, values.get(key, default)) for key, n in len_map.items()}
    return _edits(pad, arguments)


def example_length(
    example: Any, length_keys: Sequence[Any] | None = None, length_axis: int = 0
) -> int:
    """Returns the largest size along an axis of the chosen parts of an example."""
    if isinstance(example, (tuple, list, dict)):
        keys: Iterable[Any] = length_keys or range(min(2, len(example)))
        return max(np.shape(example[key])[length_axis] for key in keys)
    return np.shape(example)[length_axis]


def _edits(edit: Callable[[np.ndarray, Any], Any], arguments: Mapping) -> Stage:
    """Returns a stage that replaces the parts named by the keys of `arguments`."""

    def edited(generator: Iterable[Any]) -> Iterator[Any]:
        for example in generator:
            if isinstance(example, dict):
                parts: Any = dict(example)
            elif isinstance(example, (tuple, list)):
                parts = list(example)
            else:
                parts = [example]
            for key, argument in arguments.items():
                try:
                    part = parts[key]
                except (LookupError, TypeError):
                    raise ValueError(
                        f"no part {key!r} in an example of {_describe(example)}"
                    ) from None
                parts[key] = edit(np.asarray(part), argument)
            if isinstance(example, dict):
                yield parts
            else:
                whole = isinstance(example, (tuple, list))
                yield tuple(parts) if whole else parts[0]

    return edited


def _describe(example: Any) -> str:
    if isinstance(example, dict):
        return f"a dict with keys {list(example)}"
    if isinstance(example, (tuple, list)):
        return f"{len(example)} parts of shapes {[np.shape(p) for p in example]}"
    return f"{type(example).__name__} {example!r:.60}"

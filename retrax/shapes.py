"""Shapes and dtypes of arrays, without the arrays.

First in the order of the package: it knows NumPy only. A *signature* is a structure
(tuple, list, dict) of `ShapeDtype` that mirrors a structure of arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = [
    "ShapeDtype",
    "assert_same_shape",
    "assert_shape_equals",
    "signature",
    "splice_signatures",
]


class ShapeDtype:
    """Holds the shape and dtype of an array.

    Example:
      >>> ShapeDtype((2, 3))
      ShapeDtype{shape:(2, 3), dtype:float32}
      >>> ShapeDtype((2,), np.int32).replace(shape=(4,)).as_tuple()
      ((4,), dtype('int32'))
    """

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: int | Sequence[int], dtype: Any = np.float32) -> None:
        if isinstance(shape, (int, np.integer)):
            shape = (int(shape),)
        try:
            self.shape: tuple[int, ...] = tuple(int(d) for d in shape)
        except TypeError as e:
            raise TypeError(
                f"shape must be an int or a sequence of ints, got {shape!r}."
            ) from e
        # Extended dtypes (JAX's typed random keys) are no NumPy dtypes: kept as given.
        try:
            self.dtype = np.dtype(dtype)
        except TypeError:
            self.dtype = dtype

    def as_tuple(self) -> tuple[tuple[int, ...], Any]:
        """Returns (shape, dtype)."""
        return self.shape, self.dtype

    def replace(self, shape: Any = None, dtype: Any = None) -> ShapeDtype:
        """Returns a copy with the given fields changed."""
        return ShapeDtype(
            self.shape if shape is None else shape,
            self.dtype if dtype is None else dtype,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShapeDtype) and self.as_tuple() == other.as_tuple()

    def __hash__(self) -> int:
        return hash(self.as_tuple())

    def __len__(self) -> int:
        """Counts as one array, so that a bare signature and a list of one are alike."""
        return 1

    def __repr__(self) -> str:
        return f"ShapeDtype{{shape:{self.shape}, dtype:{self.dtype}}}"


def signature(obj: Any) -> Any:
    """Returns the signature of a structure of arrays, keeping tuples, lists and dicts.

    Raises:
      TypeError: a leaf has no shape and dtype.

    Example:
      >>> signature((np.zeros((2, 3)), [np.int32(1)]))
      (ShapeDtype{shape:(2, 3), dtype:float64}, [ShapeDtype{shape:(), dtype:int32}])
    """
    if isinstance(obj, ShapeDtype):
        return obj
    if isinstance(obj, (list, tuple)):
        items = [signature(x) for x in obj]
        if hasattr(obj, "_fields"):
            return type(obj)(*items)
        return type(obj)(items)
    if isinstance(obj, dict):
        return {k: signature(v) for k, v in obj.items()}
    if hasattr(obj, "shape") and hasattr(obj, "dtype"):
        return ShapeDtype(obj.shape, obj.dtype)
    if isinstance(obj, (bool, int, float, complex)):
        array = np.asarray(obj)
        return ShapeDtype(array.shape, array.dtype)
    raise TypeError(
        f"signature() needs arrays in tuples, lists or dicts; got {type(obj).__name__}."
    )


def splice_signatures(*sigs: Any) -> Any:
    """Joins signatures into one flat one: bare if it holds one array, else a tuple."""
    items: list[ShapeDtype] = []
    for sig in sigs:
        items.extend(sig if isinstance(sig, (list, tuple)) else [sig])
    return items[0] if len(items) == 1 else tuple(items)


def assert_shape_equals(array: Any, shape: Sequence[int]) -> None:
    """Raises ValueError unless `array` has the given shape."""
    if tuple(array.shape) != tuple(shape):
        raise ValueError(
            f"Wrong shape: expected {tuple(shape)}, got {tuple(array.shape)}."
        )


def assert_same_shape(array1: Any, array2: Any) -> None:
    """Raises ValueError unless both arrays have the same shape."""
    assert_shape_equals(array1, array2.shape)

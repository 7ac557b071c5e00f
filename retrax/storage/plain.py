"""What a checkpoint may hold: plain containers and numpy arrays; how it is pickled.

`Writer` puts arrays into the file as `numpy.ndarray(shape, dtype, bytes)`, which any
plain `pickle.load` understands. `safe_pickle` reads what this module writes, and
`checkpoint` stands on both. Knows numpy only.
"""

from __future__ import annotations

import pickle
from typing import Any

import ml_dtypes
import numpy as np

from retrax.storage.pickle_machine import REFUSAL

__all__ = ["Writer", "check", "is_float"]

# The C pickler and unpickler recurse per level; real trees stay far below this.
MAX_DEPTH = 200

ATOMS = (type(None), bool, int, float, str, bytes)
ML_DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in (
        *("bfloat16", "int1", "int2", "int4", "uint1", "uint2", "uint4"),
        *("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4"),
        *("float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
        *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(ml_dtypes, name)
}


class Writer(pickle.Pickler):
    """Pickles a checked payload; contiguous arrays are streamed, not copied.

    Arrays that share an object stay shared. Arrays from elsewhere (JAX) become numpy
    arrays here, one by one.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=5)

    def reducer_override(self, obj: Any) -> Any:
        if not _is_array(obj):
            return NotImplemented
        array = np.asarray(obj)
        flat = np.ascontiguousarray(array).reshape(-1)
        # A view as bytes, since memoryview does not know dtypes such as bfloat16.
        buffer: Any = flat.view(np.uint8) if flat.dtype.itemsize else b""
        code = array.dtype.type if is_ml_dtype(array.dtype) else array.dtype.str
        return np.ndarray, (array.shape, code, pickle.PickleBuffer(buffer))


def check(payload: Any) -> int:
    """Returns about how many bytes `payload` takes; raises for what cannot be saved.

    Raises:
      TypeError: a value is no plain container, number, text or numpy array. The text
        holds its path inside the payload, e.g. 'opt_state/slots/3'.
    """
    sizes: dict[int, int] = {}
    open_ids: set[int] = set()

    def visit(value: Any, path: str, depth: int) -> int:
        if type(value) in (list, tuple, dict):
            if id(value) in sizes:
                return 0
            if id(value) in open_ids:
                raise TypeError(f"{path} contains itself; a checkpoint holds trees")
            if depth == MAX_DEPTH:
                raise TypeError(f"{path} is nested deeper than {MAX_DEPTH} levels")
            open_ids.add(id(value))
            size = 16
            for key, child in children(value, path):
                size += visit(child, f"{path}/{key}" if path else str(key), depth + 1)
            open_ids.discard(id(value))
            sizes[id(value)] = size
            return size
        return _leaf_bytes(value, path)

    return visit(payload, "", 0)


def is_float(dtype: Any) -> bool:
    """True for floating-point dtypes, those of ml_dtypes included."""
    dtype = np.dtype(dtype)
    return dtype.kind == "f" or (
        is_ml_dtype(dtype) and dtype.name.startswith(("float", "bfloat"))
    )


def children(value: Any, path: str) -> list[tuple[Any, Any]]:
    if type(value) is not dict:
        return list(enumerate(value))
    for key in value:
        if not _is_key(key):
            raise TypeError(
                f"{path or 'the payload'} has the key {key!r} of type "
                f"{type(key).__name__}; use str, int, or tuples of them"
            )
    return list(value.items())


def _is_key(key: Any) -> bool:
    return type(key) in (str, int) or (type(key) is tuple and all(map(_is_key, key)))


def _leaf_bytes(value: Any, path: str) -> int:
    if type(value) in ATOMS:
        return len(value) if isinstance(value, str | bytes) else 9
    if isinstance(value, np.generic):
        _check_dtype(value.dtype, path)
        if value.dtype.kind in "MmV" and not is_ml_dtype(value.dtype):
            raise TypeError(
                f"{path} is a numpy scalar of dtype {value.dtype}; "
                "save it as an array: np.asarray(value)"
            )
        return value.nbytes
    if _is_array(value):
        return _array_bytes(value, path)
    raise TypeError(
        f"{path or 'the payload'} is of type {type(value).__module__}."
        f"{type(value).__qualname__}; {REFUSAL}. Convert it before saving"
    )


def _is_array(value: Any) -> bool:
    """True for numpy arrays and, by duck typing, for arrays of other libraries.

    Subclasses of numpy arrays (masked arrays, matrices) hold more than their numbers
    and are not taken; numpy scalars have a form of their own.
    """
    if isinstance(value, np.ndarray):
        return type(value) in (np.ndarray, np.memmap)
    return (
        hasattr(value, "__array__")
        and not isinstance(value, type | np.generic)
        and hasattr(value, "dtype")
        and hasattr(value, "shape")
    )


def _array_bytes(value: Any, path: str) -> int:
    if not isinstance(value, np.ndarray):
        try:
            value = np.asarray(value)
        except Exception as error:
            raise TypeError(
                f"{path} is of type {type(value).__name__} and cannot become a numpy "
                f"array: {error}"
            ) from error
    _check_dtype(value.dtype, path)
    return value.nbytes


def _check_dtype(dtype: np.dtype[Any], path: str) -> None:
    if dtype.hasobject or dtype.names or dtype.kind == "T":
        raise TypeError(
            f"{path} is an array of dtype {dtype}; {REFUSAL} "
            "of numbers, fixed-length text, or dates"
        )
    if dtype.type.__module__ != "numpy" and not is_ml_dtype(dtype):
        raise TypeError(f"{path} has the dtype {dtype}, which is not known here")


def is_ml_dtype(dtype: np.dtype[Any]) -> bool:
    # Not `.get(...) == dtype`: numpy takes None for float64.
    return dtype.name in ML_DTYPES and ML_DTYPES[dtype.name] == dtype

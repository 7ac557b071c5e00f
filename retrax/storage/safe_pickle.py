"""Reads pickles of plain containers and numpy arrays, and of nothing else.

Values are built through a fixed table of functions defined here; no module, class or
function is looked up by a name that stands in a file. Stands on `plain`, which says
what is plain and writes it; `checkpoint` stands on both.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

import numpy as np

from retrax.storage.plain import (
    ATOMS,
    MAX_DEPTH,
    ML_DTYPES,
    REFUSAL,
    children,
    is_ml_dtype,
)

__all__ = ["Refused", "read", "read_plain"]

_DTYPE_CODE = re.compile(r"[<>|=]?[?biufcSUVMm]\d{0,9}(\[\w{1,20}\])?")


class Refused(ValueError):
    """A pickle holds something that is no plain container and no numpy array."""


def read(file: BinaryIO) -> Any:
    """Reads one pickle of plain values, written by `plain.Writer` or by numpy itself.

    Raises:
      Refused: the pickle names anything outside the table, or builds a value of
        another kind. Nothing that it names has been imported or called.
      Exception: whatever a damaged pickle makes the unpickler raise.
    """
    return _finish(_Reader(file).load())


def read_plain(data: bytes) -> tuple[Any, int]:
    """Reads one pickle of plain values only; returns it and where it ended.

    Raises:
      Refused: the pickle names a function or class, whichever.
    """

    class Plain(_Reader):
        def find_class(self, module: str, name: str, /) -> NoReturn:
            raise Refused(f"{module}.{name}: {REFUSAL}")

    file = io.BytesIO(data)
    value = _finish(Plain(file).load())
    return value, file.tell()


# Reading. The pickle machine may call, and set the state of, every object it can
# reach, so it is handed objects made for one file that allow nothing else.


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if module == "ml_dtypes" and name in ML_DTYPES:
            return _Dtype(ML_DTYPES[name])
        function = _TABLE.get((module, name))
        if function is None:
            raise Refused(f"{module}.{name}: {REFUSAL}")
        return _Call(function)

    def persistent_load(self, pid: Any) -> NoReturn:
        raise Refused(f"a reference outside the file: {REFUSAL}")


class _Call:
    """A function of the table: it can be called, and nothing else."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> NoReturn:
        raise Refused(f"a function with a state: {REFUSAL}")


class _Dtype:
    """Stands for a numpy dtype; takes a byte order as its state, and nothing else."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype

    def __setstate__(self, state: Any) -> None:
        expected = self.dtype.__reduce__()[2]
        if (
            type(state) is not tuple
            or len(state) != 8
            or state[1] not in ("<", ">", "|", "=")
            or state[2:] != expected[2:]
        ):
            raise Refused(f"a dtype with the state {str(state)[:80]}: {REFUSAL}")
        if state[1] in "<>" and not is_ml_dtype(self.dtype):
            self.dtype = self.dtype.newbyteorder(state[1])


class _Pending:
    """An array that gets its numbers as state, as numpy's older pickles have it."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        self.array = _make_array(shape, dtype, data, "F" if is_fortran else "C")


def _make_array(shape: Any, dtype: Any, data: Any, order: str = "C") -> np.ndarray:
    dtype = _as_dtype(dtype)
    if type(shape) is int:
        shape = (shape,)
    if type(shape) is not tuple or any(type(n) is not int or n < 0 for n in shape):
        raise Refused(f"an array of shape {str(shape)[:80]}")
    if type(data) not in (bytes, bytearray) or order not in ("C", "F"):
        raise Refused(f"an array made from {type(data).__name__}: {REFUSAL}")
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for an array {dtype}{shape}")
    array = np.ndarray(shape, dtype, data, order=order)  # type: ignore[call-overload]
    return array if type(data) is bytearray else array.copy(order="K")


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    return _make_array(shape, dtype, data, order)


def _make_scalar(dtype: Any, data: Any) -> Any:
    return _make_array((), dtype, data)[()]


def _make_dtype(code: Any, align: Any = False, copy: Any = False) -> _Dtype:
    return _Dtype(_as_dtype(code))


def _as_dtype(code: Any) -> np.dtype[Any]:
    if type(code) is _Dtype:
        return code.dtype
    if type(code) is not str or not _DTYPE_CODE.fullmatch(code):
        raise Refused(f"the dtype {str(code)[:80]!r}: {REFUSAL}")
    return np.dtype(code)


_TABLE: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _make_array,
    ("numpy", "dtype"): _make_dtype,
}
for _core in ("numpy._core", "numpy.core"):
    _TABLE[_core + ".multiarray", "_reconstruct"] = lambda *args: _Pending()
    _TABLE[_core + ".multiarray", "scalar"] = _make_scalar
    _TABLE[_core + ".numeric", "_frombuffer"] = _from_buffer


def _finish(value: Any) -> Any:
    """Puts finished arrays in and refuses whatever is not plain."""
    done: dict[int, Any] = {}
    open_ids: set[int] = set()

    def visit(value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in ATOMS or isinstance(value, np.generic | np.ndarray):
            return value
        if kind is _Pending and value.array is not None:
            return value.array
        if kind not in (list, tuple, dict):
            raise Refused(f"a value of type {kind.__name__}: {REFUSAL}")
        if id(value) in done:
            return done[id(value)]
        if id(value) in open_ids or depth == MAX_DEPTH:
            raise Refused(f"containers in themselves or over {MAX_DEPTH} deep")
        open_ids.add(id(value))
        if kind is tuple:
            new = tuple(visit(child, depth + 1) for child in value)
        elif kind is list:
            value[:] = [visit(child, depth + 1) for child in value]
            new = value
        else:
            for key, child in children(value, ""):
                value[key] = visit(child, depth + 1)
            new = value
        open_ids.discard(id(value))
        done[id(value)] = new
        return new

    return visit(value, 0)

"""Reads pickles of plain containers and numpy arrays, and of nothing else.

Values are built through a fixed table of functions defined here; no module, class or
function is looked up by a name that stands in a file. Stands on `pickle_machine`, and
on `plain`, which says what is plain and writes it; `checkpoint` stands on all of them.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

import numpy as np

from retrax.storage.pickle_machine import REFUSAL, Machine, Refused
from retrax.storage.plain import (
    ATOMS,
    MAX_DEPTH,
    ML_DTYPES,
    children,
    is_ml_dtype,
)

__all__ = ["Refused", "read", "read_plain"]

_MAX_NDIM, _MAX_SIZE, _MAX_EMPTY = 64, 2**62, 2**20
_DTYPE_CODE = re.compile(r"[<>|=]?[?biufcSUVMm]\d{0,9}(\[\w{1,20}\])?")


def read(file: BinaryIO) -> Any:
    """Reads one pickle of plain values, written by `plain.Writer` or by numpy itself.

    It takes little more memory than the file has bytes, whatever is in it.

    Raises:
      Refused: the pickle names anything outside the table, or builds a value of
        another kind. Nothing that it names has been imported or called.
      Exception: whatever a damaged pickle raises.
    """
    return _finish(_Reader(file).load())


def read_plain(data: bytes) -> tuple[Any, int]:
    """Reads one pickle of plain values only; returns it and where it ended.

    Raises:
      Refused: the pickle names a function or class, whichever.
    """

    def find(module: str, name: str) -> NoReturn:
        raise Refused(f"{module}.{name}: {REFUSAL}")

    file = io.BytesIO(data)
    value = _finish(Machine(file, find, _call, _build).load())
    return value, file.tell()


# Reading. What a pickle can reach are objects made for one file that allow nothing but
# what stands here.


class _Reader:
    """Reads one file, and counts what its arrays take beside the bytes in the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._machine = Machine(file, self._find, self._counted_call, self._build)
        self._free = 4 * self._machine.size + (1 << 20)

    def load(self) -> Any:
        return self._machine.load()

    def _find(self, module: str, name: str) -> Any:
        if module == "ml_dtypes" and name in ML_DTYPES:
            return _Dtype(ML_DTYPES[name])
        function = _TABLE.get((module, name))
        if function is None:
            raise Refused(f"{module[:80]}.{name[:80]}: {REFUSAL}")
        return _Call(function)

    def _counted_call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        self._count(arguments)
        return _call(function, arguments)

    def _build(self, target: Any, state: Any) -> None:
        self._count(state if type(state) is tuple else ())
        _build(target, state)

    def _count(self, arguments: tuple[Any, ...]) -> None:
        """Refuses files that copy the same bytes into many arrays."""
        self._free -= sum(len(x) for x in arguments if type(x) in (bytes, bytearray))
        if self._free < 0:
            raise Refused("arrays of many times the size of the file")


def _call(function: Any, arguments: tuple[Any, ...]) -> Any:
    if type(function) is not _Call:
        raise Refused(f"a call of a {type(function).__name__}: {REFUSAL}")
    return function(*arguments)


def _build(target: Any, state: Any) -> None:
    if type(target) not in (_Call, _Dtype, _Pending):
        raise Refused(f"a {type(target).__name__} with a state: {REFUSAL}")
    target.set_state(state)


class _Call:
    """A function of the table: it can be called, and nothing else."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def set_state(self, state: Any) -> NoReturn:
        raise Refused(f"a function with a state: {REFUSAL}")


class _Dtype:
    """Stands for a numpy dtype; takes a byte order as its state, and nothing else."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype

    def set_state(self, state: Any) -> None:
        expected = self.dtype.__reduce__()[2]
        if (
            type(state) is not tuple
            or len(state) != 8
            or state[1] not in ("<", ">", "|", "=")
            or state[2:] != expected[2:]
        ):
            raise Refused(f"a dtype with a state of its own: {REFUSAL}")
        if state[1] in "<>" and not is_ml_dtype(self.dtype):
            self.dtype = self.dtype.newbyteorder(state[1])


class _Pending:
    """An array that gets its numbers as state, as numpy's older pickles have it."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: np.ndarray | None = None

    def set_state(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        self.array = _make_array(shape, dtype, data, "F" if is_fortran else "C")


def _make_array(shape: Any, dtype: Any, data: Any, order: str = "C") -> np.ndarray:
    dtype = _as_dtype(dtype)
    if type(shape) is int:
        shape = (shape,)
    if (
        type(shape) is not tuple
        or len(shape) > _MAX_NDIM
        or any(type(n) is not int or not 0 <= n <= _MAX_SIZE for n in shape)
    ):
        raise Refused("an array of a shape that no array has")
    if type(data) not in (bytes, bytearray) or order not in ("C", "F"):
        raise Refused(f"an array made from {type(data).__name__}: {REFUSAL}")
    if dtype.itemsize == 0 and math.prod(shape) > _MAX_EMPTY:
        raise Refused(f"an array of {math.prod(shape)} items without bytes")
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
    # Containers are not shown: what is shared in them would be written out again.
    if type(code) is not str:
        raise Refused(f"a dtype that is a {type(code).__name__}: {REFUSAL}")
    if not _DTYPE_CODE.fullmatch(code):
        raise Refused(f"the dtype {code[:80]!r}: {REFUSAL}")
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

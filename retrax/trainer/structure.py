"""When two layers are the same but for their values.

Equal layers can share a compiled program. Names and prints do not decide it, since two
functions may print alike; a fingerprint holds all that a layer is made of: classes,
numbers, arrays by their content, functions by code and by what they close over. What
it cannot look into counts as equal to itself only.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from retrax import trees
from retrax.layers.base import Layer

__all__ = ["fingerprint"]

# What a layer holds or remembers, and what does not change what it computes.
_NOT_STRUCTURE = frozenset(
    "_weights _state _rng _init_signature _owner _created_at _sublayers_to_print"
    " _trainable".split()
)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype)


def fingerprint(x: Any) -> Hashable:
    """Returns a hashable value that is equal for layers that compute the same.

    It is valid as long as the layers it was made of exist.

    Example:
      >>> from retrax import layers as tl
      >>> fingerprint(tl.Dense(3)) == fingerprint(tl.Dense(3))
      True
      >>> fingerprint(tl.Fn('F', lambda x: x)) == fingerprint(tl.Fn('F', lambda x: -x))
      False
    """
    return _of(x, {})


def _of(x: Any, seen: dict[int, tuple[int, Any]]) -> Hashable:
    if isinstance(x, _PLAIN):
        return type(x), repr(x)
    if isinstance(x, type) or isinstance(x, types.ModuleType):
        return "id", id(x)
    if isinstance(x, (np.ndarray, jax.Array)):
        return _array(x)
    if id(x) in seen:
        return "again", seen[id(x)][0]
    seen[id(x)] = len(seen), x  # Held, so that nothing else gets its id meanwhile.
    if isinstance(x, (tuple, list)):
        return type(x), tuple(_of(item, seen) for item in x)
    if isinstance(x, dict):
        return type(x), tuple((_of(k, seen), _of(v, seen)) for k, v in x.items())
    if isinstance(x, Layer):
        held = vars(x).items()
        structure = {k: v for k, v in held if k not in _NOT_STRUCTURE}
        return type(x), _of(structure, seen)
    if isinstance(x, functools.partial):
        return "partial", _of([x.func, x.args, x.keywords], seen)
    if isinstance(x, types.MethodType):
        return "method", _of([x.__func__, x.__self__], seen)
    if isinstance(x, types.FunctionType):
        return _function(x, seen)
    return "id", id(x)


def _function(f: types.FunctionType, seen: dict[int, tuple[int, Any]]) -> Hashable:
    cells = []
    for cell in f.__closure__ or ():
        try:
            cells.append(_of(cell.cell_contents, seen))
        except ValueError:  # Not filled yet.
            cells.append("empty")
    defaults = _of([f.__defaults__, f.__kwdefaults__], seen)
    return "function", id(f.__code__), id(f.__globals__), defaults, tuple(cells)


def _array(x: Any) -> Hashable:
    if not trees.is_concrete(x) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return "id", id(x)
    values = np.asarray(x)
    if values.dtype == object:
        return "id", id(x)
    digest = hashlib.sha256(values.tobytes()).hexdigest()
    return type(x).__name__, values.shape, str(values.dtype), digest

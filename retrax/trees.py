"""Trees of arrays, with paths.

Weights, state and slots are JAX pytrees. This module gives what `jax.tree` leaves
out: names for leaves, differences told by path, and splitting by a mask.
It knows nothing of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

__all__ = [
    "combine",
    "difference",
    "is_concrete",
    "leaves_with_path",
    "n_bytes",
    "partition",
    "path_str",
    "to_numpy",
]


def path_str(path: tuple[Any, ...]) -> str:
    """Writes a `jax.tree_util` key path as 'a/0/b'."""
    parts = []
    for key in path:
        for attribute in ("key", "idx", "name"):
            if hasattr(key, attribute):
                parts.append(str(getattr(key, attribute)))
                break
        else:
            parts.append(str(key))
    return "/".join(parts)


def leaves_with_path(tree: Any) -> list[tuple[str, Any]]:
    """Returns [(path, leaf), ...] in flattening order.

    Example:
      >>> leaves_with_path(((1, 2), {"b": 3}))
      [('0/0', 1), ('0/1', 2), ('1/b', 3)]
    """
    return [
        (path_str(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def difference(expected: Any, got: Any) -> str | None:
    """Returns the first difference in structure, shape or dtype, by path, or None.

    Only leaves with a shape are compared by shape and dtype.

    Example:
      >>> difference({"w": np.zeros(2)}, {"w": np.zeros(3)})
      'w: expected float64(2,), got float64(3,)'
    """
    a, b = leaves_with_path(expected), leaves_with_path(got)
    for (path_a, leaf_a), (path_b, leaf_b) in zip(a, b, strict=False):
        if path_a != path_b:
            return f"{path_a or '(root)'}: expected here, got {path_b or '(root)'}"
        said_a, said_b = _describe(leaf_a), _describe(leaf_b)
        if said_a != said_b:
            return f"{path_a or '(root)'}: expected {said_a}, got {said_b}"
    if len(a) != len(b):
        longer, what = (a, "missing") if len(a) > len(b) else (b, "not expected")
        return f"{longer[min(len(a), len(b))][0] or '(root)'}: {what}"
    if jax.tree.structure(expected) != jax.tree.structure(got):
        return (
            f"(root): expected structure {jax.tree.structure(expected)}, "
            f"got {jax.tree.structure(got)}"
        )
    return None


def _describe(leaf: Any) -> str:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"{leaf.dtype}{tuple(leaf.shape)}"
    return type(leaf).__name__


def partition(tree: Any, mask: list[bool]) -> tuple[Any, Any]:
    """Splits a tree in two of the same shape, with None where a leaf went to the other.

    None is no leaf, so each part holds only its own leaves.

    Example:
      >>> partition((1, (2, 3)), [True, False, True])
      ((1, (None, 3)), (None, (2, None)))
    """
    leaves, treedef = jax.tree.flatten(tree)
    chosen = [x if keep else None for x, keep in zip(leaves, mask, strict=True)]
    others = [None if keep else x for x, keep in zip(leaves, mask, strict=True)]
    return treedef.unflatten(chosen), treedef.unflatten(others)


def combine(chosen: Any, others: Any) -> Any:
    """Undoes `partition`."""
    return jax.tree.map(
        lambda a, b: b if a is None else a,
        chosen,
        others,
        is_leaf=lambda x: x is None,
    )


def is_concrete(tree: Any) -> bool:
    """Says whether a tree holds values only, none of them being traced by JAX."""
    return not any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def to_numpy(tree: Any) -> Any:
    """Copies a tree of arrays to the host; waits for values still being computed."""
    return jax.tree.map(np.asarray, jax.device_get(tree))


def n_bytes(tree: Any, count: Callable[[Any], int] | None = None) -> int:
    """Adds up the bytes of all arrays (or `count(leaf)` of each leaf)."""
    count = count or (lambda x: int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize)
    return sum(count(x) for x in jax.tree.leaves(tree))

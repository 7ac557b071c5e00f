"""Small trees of arrays kept in few buffers.

A step of a small model is mostly the cost of starting operations, one for each leaf of
the weights and each of its slots. Leaves of one kind that lie in one buffer are updated
by one operation, and a few arguments go to the compiled step where there were dozens.
`StepTrainer` keeps the carry of a small model so. Stands below it; knows JAX only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from retrax import trees

__all__ = ["Packing"]


class Packing:
    """Joins the leaves of a tree that are of one kind into one flat array, and back.

    Example:
      >>> tree = {'a': jnp.ones((2, 3)), 'b': jnp.int32(7), 'c': jnp.zeros(4)}
      >>> packing = Packing(tree)
      >>> [x.shape for x in packing.pack(tree)]
      [(10,), ()]
      >>> packing.unpack(packing.pack(tree))['b']
      Array(7, dtype=int32)
    """

    # Beyond these, cutting and compiling cost more than the saved operations: at 200
    # arrays of weights compiling took four times as long.
    MAX_BYTES = 1 << 20
    MAX_LEAVES = 40

    def __init__(
        self, tree: Any, kind: Callable[[tuple[Any, ...]], Hashable] = lambda path: None
    ) -> None:
        """Notes the structure, shapes and dtypes of `tree`.

        Args:
          tree: pytree of arrays.
          kind: function from a leaf's key path to its kind; leaves of the same kind and
            dtype share a buffer.
        """
        leaves, self._treedef = jax.tree_util.tree_flatten_with_path(tree)
        self._shapes = [jnp.shape(x) for _, x in leaves]
        self._groups: dict[Any, list[int]] = {}
        for i, (path, leaf) in enumerate(leaves):
            group = (jnp.result_type(leaf), kind(path))
            self._groups.setdefault(group, []).append(i)

    @classmethod
    def suits(cls, tree: Any) -> bool:
        """Whether the tree is so small that operations cost more than copies.

        Random keys have no place in a buffer: a tree that holds any is left as it is.
        """
        leaves = jax.tree.leaves(tree)
        if any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves):
            return False
        return len(leaves) <= cls.MAX_LEAVES and trees.n_bytes(tree) <= cls.MAX_BYTES

    def __eq__(self, other: object) -> bool:
        """Whether both pack the same structure, shapes and dtypes."""
        return isinstance(other, Packing) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def pack(self, tree: Any) -> tuple[Any, ...]:
        """Returns one array for each kind and dtype; NumPy outside of tracing."""
        leaves = jax.tree.leaves(tree)
        xp = np if trees.is_concrete(tree) else jnp
        packed = []
        for (dtype, _), group in self._groups.items():
            arrays = [xp.asarray(leaves[i], dtype) for i in group]
            alone = len(arrays) == 1
            packed.append(
                arrays[0] if alone else xp.concatenate([x.ravel() for x in arrays])
            )
        return tuple(packed)

    def unpack(self, packed: tuple[Any, ...]) -> Any:
        """Returns the tree; outside of tracing with copies of the values."""
        concrete = trees.is_concrete(packed)
        leaves: list[Any] = [None] * len(self._shapes)
        for buffer, group in zip(packed, self._groups.values(), strict=True):
            # On the host, cutting needs no compiled operation for each shape.
            flat = (np.array(buffer) if concrete else buffer).ravel()
            start = 0
            for i in group:
                size = int(np.prod(self._shapes[i], dtype=int))
                leaf = flat[start : start + size].reshape(self._shapes[i])
                leaves[i] = jnp.asarray(leaf) if concrete else leaf
                start += size
        return self._treedef.unflatten(leaves)

    def over(self, fn: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
        """Lifts `fn(tree, *rest) -> (tree, out)` to packed trees."""

        def lifted(packed: tuple[Any, ...], *rest: Any) -> tuple[Any, Any]:
            tree, out = fn(self.unpack(packed), *rest)
            return self.pack(tree), out

        return lifted

"""Norms, clipping, precision, Optax's blocks: what the rules share; first in the order.

`l2_norm` and `clip_grads` are public; the rest serves the rules of this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

__all__ = [
    "at_least_float32",
    "checked_max_norm",
    "clip_grads",
    "clipped",
    "l2_norm",
    "run_block",
    "zeros_slot",
]


_SMALL = 2**14  # elements


def l2_norm(tree: Any) -> jax.Array:
    """Returns the L2 norm of all numbers in a tree, at least in float32.

    Example:
      >>> float(l2_norm({'a': jnp.array([3.0]), 'b': jnp.array([[4.0]])}))
      5.0
    """
    leaves = [at_least_float32(jnp.asarray(x)) for x in jax.tree.leaves(tree)]
    # Many small sums cost more than their arithmetic: small arrays are summed as one.
    small = [x.ravel() for x in leaves if x.size <= _SMALL]
    parts = [x for x in leaves if x.size > _SMALL]
    if small:
        parts.append(jnp.concatenate(small))
    squares = [_sum_of_squares(x) for x in parts]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def clip_grads(grad_tree: Any, max_norm: float | None) -> Any:
    """Scales gradients down so that their global norm is at most max_norm.

    None or 0 means no clipping. Where the norm is not a number, or a gradient is
    infinite, nothing is scaled: bad entries stay to be seen, the finite ones stay
    finite. Finite gradients whose norm overflows float32 are scaled rightly.

    Example:
      >>> clip_grads((jnp.array([3.0, 4.0]),), 1.0)[0].round(3).tolist()
      [0.6000000238418579, 0.800000011920929]
    """
    limit = checked_max_norm(max_norm, "max_norm")
    if limit is None:
        return grad_tree
    leaves, treedef = jax.tree.flatten(grad_tree)
    leaves = [jnp.asarray(x) for x in leaves]
    return jax.tree.unflatten(treedef, clipped(leaves, l2_norm(leaves), limit))


def at_least_float32(x: jax.Array) -> jax.Array:
    """Raises half-precision arrays to float32; float32 and float64 stay.

    Rules calculate, and keep slots, in this precision: moving averages with decay
    0.999 would stand still in bfloat16.
    """
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def zeros_slot(weights: jax.Array) -> jax.Array:
    """Returns a slot of zeros, like weights but at least float32."""
    return jnp.zeros_like(weights, dtype=jnp.promote_types(weights.dtype, jnp.float32))


def run_block(
    block: optax.GradientTransformation, grads: jax.Array, state: Any
) -> tuple[jax.Array, Any]:
    """Runs a building block of Optax on one array; returns (direction, new state)."""
    direction: Any
    direction, state = block.update(grads, state)
    return direction, state


def checked_max_norm(max_norm: float | None, name: str) -> float | None:
    """Returns a limit for clipping, None where there is none; ValueError if < 0."""
    if max_norm is None or max_norm == 0:
        return None
    if not max_norm > 0:
        raise ValueError(
            f"{name} is {max_norm}; give a positive number, or None for no clipping."
        )
    return float(max_norm)


def clipped(
    grads: Sequence[jax.Array], norm: jax.Array, max_norm: float
) -> list[jax.Array]:
    """Returns gradients of the given norm scaled down to max_norm."""
    if not grads:
        return []
    # The second way of taking the norm costs another pass, so it runs only when the
    # plain one overflowed.
    norm = jax.lax.cond(jnp.isinf(norm), lambda: _safe_norm(grads, norm), lambda: norm)
    # A comparison with NaN is false: then the scale is 1 and NaN does not spread.
    over = norm > max_norm
    scale = jnp.where(over, max_norm / jnp.where(over, norm, 1), 1)
    return [(at_least_float32(g) * scale).astype(g.dtype) for g in grads]


def _safe_norm(grads: Sequence[jax.Array], like: jax.Array) -> jax.Array:
    """The norm without overflow of squares; NaN when a gradient is infinite."""
    wide = [at_least_float32(g) for g in grads if g.size]
    largest = jnp.stack([jnp.max(jnp.abs(g)).astype(like.dtype) for g in wide]).max()
    return (largest * l2_norm([g / largest for g in wide])).astype(like.dtype)


def _sum_of_squares(x: jax.Array) -> jax.Array:
    x = jnp.abs(at_least_float32(x))
    return jnp.sum(x * x)

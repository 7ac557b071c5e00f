"""Reversing layers: their inputs and gradients from their outputs.

What `ReversibleLayer` does for itself is here done for all that is made of such layers:
chains (`Serial`) and many equal blocks (`Repeat`). Those two stand above this module,
which knows them by how they run: `_chain_forward`, `_template`. Above `reversible`;
`reversible_run` builds on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from retrax.layers.base import Layer, State, Weights, to_list
from retrax.layers.reversible import ReversibleLayer
from retrax.layers.running import split_rng
from retrax.layers.stack import inputs_from_stack, packed

__all__ = [
    "add_cotangents",
    "computes",
    "is_chain",
    "is_reversible",
    "keys_of",
    "reverse",
    "reverse_and_grad",
    "reverse_blocks",
    "reverse_chain",
    "reverse_each",
    "with_float0",
    "without_float0",
    "zero_cotangent",
]


def is_chain(layer: Layer) -> bool:
    """Says whether a layer does nothing but run its sublayers along the data stack."""
    chain = getattr(type(layer), "_chain_forward", None)
    return chain is not None and chain is type(layer).forward


def is_reversible(layer: Layer) -> bool:
    """Says whether a layer is reversible, or made of nothing but reversible layers."""
    if isinstance(layer, ReversibleLayer):
        return True
    if is_chain(layer):
        return all(is_reversible(child) for child in layer.sublayers)
    return layer._template is not None and is_reversible(layer._template)


def computes(layer: Layer) -> bool:
    """Says whether a reversible layer does more than move data."""
    if is_chain(layer):
        return any(computes(child) for child in layer.sublayers)
    if isinstance(layer, ReversibleLayer):
        return not layer._only_moves
    return layer._template is not None and computes(layer._template)


def reverse_and_grad(
    layer: Layer,
    output: Any,
    grad: Any,
    weights: Weights,
    state: State,
    new_state: State,
    rng: Any,
    apart: bool = True,
) -> tuple[Any, tuple[Any, Any]]:
    """Does what `ReversibleLayer.reverse_and_grad` does for any reversible layer.

    `apart` is that of `reverse_chain`.
    """
    if isinstance(layer, ReversibleLayer):
        return layer.reverse_and_grad(output, grad, weights, state, new_state, rng)
    template = layer._template
    if template is not None:
        n = layer.__dict__["_n"]
        keys = None if rng is None else jax.random.split(rng, n)
        return reverse_blocks(
            template, n, output, grad, weights, state, new_state, keys
        )
    values = (weights, state, new_state, keys_of(layer, rng))
    return reverse_chain(layer.sublayers, output, grad, *values, apart=apart)


def reverse(
    layer: Layer,
    output: Any,
    weights: Weights,
    state: State,
    new_state: State,
    rng: Any,
) -> Any:
    """Does what `ReversibleLayer.reverse` does for any reversible layer."""
    values = (weights, state, new_state)
    if isinstance(layer, ReversibleLayer):
        return layer.reverse(output, *values, rng)
    template = layer._template
    if template is None:
        return reverse_each(layer.sublayers, output, *values, keys_of(layer, rng))

    def body(y: Any, block: Any) -> tuple[Any, None]:
        return _like(reverse(template, y, *block), y), None

    n = layer.__dict__["_n"]
    keys = None if rng is None else jax.random.split(rng, n)
    return jax.lax.scan(body, output, (*values, keys), length=n, reverse=True)[0]


def keys_of(layer: Layer, rng: Any) -> tuple[Any, ...]:
    """Returns the keys that a running layer with key `rng` gives its sublayers."""
    n = len(layer.sublayers)
    return (None,) * n if rng is None else split_rng(rng, n)


def reverse_each(
    layers: Sequence[Layer],
    output: Any,
    weights: Sequence[Weights],
    state: Sequence[State],
    new_state: Sequence[State],
    rngs: Sequence[Any],
) -> Any:
    """Finds the inputs of layers that ran one after another along the data stack."""
    stack = to_list(output)
    values = list(zip(layers, weights, state, new_state, rngs, strict=True))
    for layer, *own in reversed(values):
        x = reverse(layer, inputs_from_stack(stack, layer.n_out), *own)
        stack = to_list(x) + stack[layer.n_out :]
    return packed(stack)


def reverse_chain(
    layers: Sequence[Layer],
    output: Any,
    grad: Any,
    weights: Sequence[Weights],
    state: Sequence[State],
    new_state: Sequence[State],
    rngs: Sequence[Any],
    apart: bool = True,
) -> tuple[Any, tuple[Any, Any]]:
    """Reverses layers that ran one after another along the data stack.

    `apart` sees to it that a compiler finishes each layer before the next one; not
    needed in the body of a loop, where there are few.
    """
    stack, grads = to_list(output), to_list(grad)
    weight_grads: list[Any] = [None] * len(layers)
    for i in reversed(range(len(layers))):
        n = layers[i].n_out
        step = _one_at_a_time if apart else reverse_and_grad
        x, (gx, gw) = step(
            layers[i],
            inputs_from_stack(stack, n),
            inputs_from_stack(grads, n),
            weights[i],
            state[i],
            new_state[i],
            rngs[i],
        )
        stack, grads = to_list(x) + stack[n:], to_list(gx) + grads[n:]
        weight_grads[i] = gw
    return packed(stack), (packed(grads), tuple(weight_grads))


def _one_at_a_time(layer: Layer, y: Any, grad: Any, *values: Any) -> Any:
    """Does what `reverse_and_grad` does, after `y` and `grad` are there, all of it.

    Else a compiler may find the inputs of all layers first, and hold them all; barriers
    are taken out before it chooses an order. A branch stays, if one cannot tell that it
    is always taken.
    """

    def taken(y: Any, g: Any, values: Any) -> Any:
        x, (gx, gw) = reverse_and_grad(layer, y, with_float0(g, y), *values)
        return x, without_float0(gx), without_float0(gw)

    some = [v for v in jax.tree.leaves(y) if jnp.issubdtype(v.dtype, jnp.floating)]
    if not some or not computes(layer) or not isinstance(layer, ReversibleLayer):
        return reverse_and_grad(layer, y, grad, *values)
    args = (y, without_float0(grad), values)
    shapes = jax.eval_shape(taken, *args)

    def never(*args: Any) -> Any:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    one = some[0].reshape(-1)[0].astype(jnp.float32)
    always = jnp.clip(jnp.where(jnp.isfinite(one), one, 0), -1, 1) < 2
    x, gx, gw = jax.lax.cond(always, taken, never, *args)
    return x, (with_float0(gx, x), with_float0(gw, values[0]))


def reverse_blocks(
    block: Layer,
    n: int,
    output: Any,
    grad: Any,
    weights: Weights,
    state: State,
    new_state: State,
    keys: Any,
) -> tuple[Any, tuple[Any, Any]]:
    """Reverses n equal blocks whose weights, state and keys are stacked."""

    def body(carry: Any, values: Any) -> tuple[Any, Any]:
        y, g = carry
        w, s, new_s, key = values
        values = (w, s, new_s, key)
        grad = with_float0(g, y)
        x, (gx, gw) = reverse_and_grad(block, y, grad, *values, apart=False)
        return (_like(x, y), without_float0(_like(gx, y))), without_float0(gw)

    first = (output, without_float0(grad))
    values = (weights, state, new_state, keys)
    (x, gx), gw = jax.lax.scan(body, first, values, length=n, reverse=True)
    return x, (with_float0(gx, x), with_float0(gw, weights))


# --- Cotangents ---------------------------------------------------------------------


def add_cotangents(a: Any, b: Any) -> Any:
    """Adds cotangents of the same values; those of integers (float0) stay."""
    return jax.tree.map(lambda x, y: x if _is_float0(x) else x + y, a, b)


def zero_cotangent(x: Any) -> Any:
    """Returns a cotangent of zeros; integers and keys have those of dtype float0."""
    if jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(np.shape(x), jax.dtypes.float0)


def _is_float0(x: Any) -> bool:
    return getattr(x, "dtype", None) == jax.dtypes.float0


def without_float0(tree: Any) -> Any:
    """Leaves the cotangents of integers out, which are no values to JAX's loops."""
    return jax.tree.map(lambda g: None if _is_float0(g) else g, tree)


def with_float0(grads: Any, like: Any) -> Any:
    """Undoes `without_float0` for cotangents of `like`."""

    def fill(g: Any, x: Any) -> Any:
        return zero_cotangent(x) if g is None else g

    return jax.tree.map(fill, grads, like, is_leaf=lambda g: g is None)


def _like(x: Any, y: Any) -> Any:
    """The items of x in the kind of container that y is."""
    return tuple(to_list(x)) if isinstance(y, tuple) else x

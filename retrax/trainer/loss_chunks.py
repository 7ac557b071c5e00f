"""A loss computed for a few tokens at a time, exactly.

The logits of all tokens of a batch are often the largest array of a training step. The
loss, and the layers before it that treat each token alone, can run on chunks of tokens
instead: a weighted mean is put together from the means and weights of its parts. Which
layers treat tokens alone is found by trying; no names are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from retrax.errors import ConfigError
from retrax.layers.base import Layer, to_list
from retrax.layers.running import (
    batch_context,
    data_axis,
    outside_of_runs,
    row_mask,
)
from retrax.layers.stack import inputs_from_stack
from retrax.trainer.step import Aux, aux_of

__all__ = ["chunked_loss"]


def chunked_loss(
    layers: Sequence[Layer],
    inputs: Sequence[Any],
    weights: Sequence[Any],
    state: Sequence[Any],
    keys: Sequence[Any],
    chunk: int = 0,
) -> tuple[Any, Aux]:
    """Runs layers that end with a loss.

    Args:
      layers: the layers, in a row.
      inputs: the data stack before them.
      weights: of each layer.
      state: of each layer.
      keys: of each layer.
      chunk: number of tokens to compute at once; 0 means all.

    Returns:
      (loss, Aux with new state, weight and metrics).

    Raises:
      ConfigError: chunks are asked for, and the loss does not say what it weighs.
      ValueError: the layers leave more than the loss.
    """
    values = list(zip(layers, weights, state, keys, strict=True))
    n_whole = len(values)
    if chunk:
        n_whole = _first_of_tokens(values, inputs)
    stack, new_state, emitted = _run(values[:n_whole], list(inputs))
    if n_whole < len(values):
        loss, weight = _by_chunks(values[n_whole:], stack, chunk)
        stack, emitted = [loss], [*emitted, ("weight", weight)]
        new_state += [s for _, _, s, _ in values[n_whole:]]
    if len(stack) != 1:
        raise ValueError(
            f"the loss leaves {len(stack)} items on the data stack: end the model with "
            "a loss layer that takes all of them."
        )
    return stack[0], aux_of(tuple(new_state), emitted)


def _run(values: Any, stack: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns (stack, new states, what was emitted)."""
    states, emitted = [], []
    for layer, w, s, key in values:
        y, s, more = layer.apply(inputs_from_stack(stack, layer.n_in), w, s, key)
        stack = to_list(y) + stack[layer.n_in :]
        states.append(s)
        emitted += more
    return stack, states, emitted


def _by_chunks(values: Any, stack: list[Any], chunk: int) -> tuple[Any, Any]:
    """Returns (loss, weight) of layers that treat each token alone."""
    lead = min((x.shape for x in stack), key=len)
    if any(x.shape[: len(lead)] != lead for x in stack):
        raise ConfigError(
            "loss_chunk_size needs inputs of the loss with common first axes, got "
            f"shapes {[tuple(x.shape) for x in stack]}."
        )
    n = int(np.prod(lead))
    n_chunks = -(-n // chunk)
    mask = row_mask()
    rows = jnp.ones(lead[:1], jnp.float32) if mask is None else mask
    tokens = jnp.broadcast_to(rows.reshape((-1,) + (1,) * (len(lead) - 1)), lead)

    def cut(x: Any) -> Any:
        x = x.reshape((n, *x.shape[len(lead) :]))
        x = jnp.pad(x, [(0, n_chunks * chunk - n)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape((n_chunks, chunk, *x.shape[1:]))

    axis = data_axis()

    # What is computed for a chunk is not kept for the backward pass.
    @jax.checkpoint
    def one(xs: Any, tokens: Any) -> tuple[Any, Any]:
        with batch_context(axis, tokens):
            stack, _, emitted = _run(values, list(xs))
        found = [value for name, value in emitted if name == "weight"]
        if len(found) != 1:
            raise ConfigError(
                f"the loss {values[-1][0].name} does not say what a batch weighs, so "
                "it cannot be put together from chunks: use a loss that is a weighted "
                "mean, such as WeightedCategoryCrossEntropy, or loss_chunk_size=0."
            )
        loss = stack[0].astype(jnp.float32)
        return loss * found[0], found[0]

    def body(sums: Any, item: Any) -> tuple[Any, None]:
        more = one(*item)
        return jax.tree.map(jnp.add, sums, more), None

    zeros = (jnp.float32(0), jnp.float32(0))
    items = (tuple(map(cut, stack)), cut(tokens))
    (total, weight), _ = jax.lax.scan(body, zeros, items)
    empty = weight == 0
    return jnp.where(empty, 0, total / jnp.where(empty, 1, weight)), weight


def _first_of_tokens(values: Any, inputs: Sequence[Any]) -> int:
    """Finds the first layer from which on all treat each token alone."""
    avals = [[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]]
    with batch_context(None, None):
        for i in range(len(values)):
            stack = jax.eval_shape(
                lambda xs, one=values[i : i + 1]: _run(one, list(xs))[0], avals[-1]
            )
            avals.append(list(stack))
    first = len(values) - 1
    while first and _treats_tokens_alone(values[first - 1], avals[first - 1]):
        first -= 1
    return first


def _treats_tokens_alone(values: Any, stack: list[Any]) -> bool:
    """Tries a layer on four tokens at once, and on two and two."""
    layer, weights, state, _ = values
    if jax.tree.leaves(state):
        return False
    used = stack[: layer.n_in]
    n_lead = min((len(x.shape) for x in stack), default=0)
    rng = np.random.default_rng(0)

    def some(x: Any, lead: tuple[int, ...] = ()) -> Any:
        shape = (*lead, *x.shape[n_lead if lead else 0 :])
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.asarray(0.3 * rng.standard_normal(shape), x.dtype)
        return jnp.zeros(shape, x.dtype)

    try:
        with jax.ensure_compile_time_eval(), outside_of_runs():
            made = jax.tree.map(some, weights)
            whole = [some(x, (1, 4, *([1] * (n_lead - 2)))[:n_lead]) for x in used]
            if n_lead == 1:
                whole = [some(x, (4,)) for x in used]
            flat = [x.reshape((4, *x.shape[n_lead:])) for x in whole]

            def run(xs: list[Any]) -> list[Any]:
                xs_in = xs[0] if layer.n_in == 1 else tuple(xs)
                return to_list(layer.pure_fn(xs_in, made, state, None)[0])

            outputs = run(whole)
            halves = [run([x[i : i + 2] for x in flat]) for i in (0, 2)]
            for y, a, b in zip(outputs, *halves, strict=True):
                parts = np.concatenate([np.asarray(a, float), np.asarray(b, float)])
                y = np.asarray(y, float).reshape(parts.shape)
                if not np.allclose(y, parts, rtol=1e-2, atol=1e-2):
                    return False
    except Exception:  # It cannot even take such inputs.
        return False
    return True

"""What one layer costs: bytes, operations, and time when it is run by itself.

Above `walk`. Each distinct layer is compiled once, forward and with its backward pass;
nothing of a model's own values is needed.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from retrax import trees
from retrax.layers.base import to_list
from retrax.layers.reversing import (
    reverse_and_grad,
    with_float0,
    without_float0,
)
from retrax.layers.running import memory_context
from retrax.layers.stack import packed
from retrax.optimizers.base import Optimizer
from retrax.trainer.inspect.walk import Visit
from retrax.trainer.structure import fingerprint

__all__ = ["Cost", "costs", "n_bytes", "some_values", "temporary_bytes"]


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a layer costs, one of n_times equal ones.

    Attributes:
      weights: bytes.
      slots: bytes of the optimizer's slots.
      state: bytes.
      kept: bytes kept for the backward pass, weights not counted, if nothing is
        computed again or reversed; a compiler may find a way to keep less.
      temporary: bytes needed beside that, in its backward pass.
      flops: operations of both passes, as XLA counts them.
      forward_ms: milliseconds; None if it was not run.
      backward_ms: milliseconds; for a reversible layer of reversing it, gradients and
        all; for others of the backward pass alone.
    """

    weights: int
    slots: int
    state: int
    kept: int
    temporary: int
    flops: float
    forward_ms: float | None
    backward_ms: float | None


def costs(found: Sequence[Visit], optimizer: Optimizer, run: bool) -> list[Cost]:
    """Measures layers; equal ones once.

    Args:
      found: the layers.
      optimizer: whose slots are counted.
      run: whether to run them for their times.
    """
    known: dict[Any, Cost] = {}
    result = []
    for visit in found:
        shapes = jax.tree.leaves((visit.inputs, visit.weights, visit.state))
        key = (
            fingerprint(visit.layer),
            repr([(x.shape, x.dtype) for x in shapes]),
            visit.trainable,
        )
        if key not in known:
            known[key] = _measured(visit, optimizer, run)
        cost = known[key]
        if visit.is_shared:
            cost = dataclasses.replace(cost, weights=0, slots=0, state=0)
        result.append(cost)
    return result


def n_bytes(tree: Any) -> int:
    """Returns the bytes of all arrays of a tree, random keys among them."""
    return trees.n_bytes(tree, lambda x: math.prod(x.shape) * x.dtype.itemsize)


def temporary_bytes(compiled: Any) -> int:
    """Returns the bytes that a compiled function takes for itself while it runs."""
    return int(compiled.memory_analysis().temp_size_in_bytes)


def some_values(tree: Any, seed: int = 0) -> Any:
    """Makes arrays of the given shapes: small random floats, zeros, true flags."""
    rng = np.random.default_rng(seed)

    def make(s: Any) -> Any:
        if jnp.issubdtype(s.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(seed), s.shape)
        if jnp.issubdtype(s.dtype, jnp.floating):
            values = rng.standard_normal(s.shape, np.float32) * np.float32(0.1)
            return jnp.asarray(values, s.dtype)
        return jnp.ones(s.shape, s.dtype) * (s.dtype == bool)

    return jax.tree.map(make, tree)


# --- Helpers ------------------------------------------------------------------------


def _measured(visit: Visit, optimizer: Optimizer, run: bool) -> Cost:
    trained = trees.partition(visit.weights, list(visit.trainable))[0]
    slots = jax.eval_shape(lambda w: optimizer.tree_init(w)[0], trained)
    key = jax.eval_shape(lambda: jax.random.key(0))
    given = (visit.inputs, visit.weights, visit.state, key)
    forward = jax.jit(_forward(visit)).lower(*given).compile()
    _, new_state = jax.eval_shape(_forward(visit), *given)
    grads = tuple(y if _is_float(y) else None for y in visit.outputs)
    if visit.is_reversible:
        back, args = _reverse(visit), (visit.outputs, grads, *given[1:], new_state)
    else:
        back, args = _backward(visit), (*given, grads)
    backward = jax.jit(back).lower(*args).compile()
    flops = _flops(backward) + (_flops(forward) if visit.is_reversible else 0.0)
    forward_ms = backward_ms = None
    if run:
        forward_ms = _milliseconds(forward, given)
        backward_ms = _milliseconds(backward, args)
        if not visit.is_reversible:
            backward_ms = max(backward_ms - forward_ms, 0.0)
    return Cost(
        n_bytes(visit.weights),
        n_bytes(slots),
        n_bytes(visit.state),
        _kept(visit, given),
        temporary_bytes(backward),
        flops,
        forward_ms,
        backward_ms,
    )


def _forward(visit: Visit) -> Callable[..., Any]:
    def forward(inputs: Any, weights: Any, state: Any, key: Any) -> Any:
        with memory_context("plain"):
            y, new = visit.layer.pure_fn(packed(inputs), weights, state, key)
        return to_list(y), new

    return forward


def _vjp_of(visit: Visit) -> Callable[..., Any]:
    """(inputs, weights, state, key) -> (float outputs, their vjp)."""

    def vjp_of(inputs: Any, weights: Any, state: Any, key: Any) -> Any:
        moving, fixed = trees.partition(tuple(inputs), list(map(_is_float, inputs)))

        def run(moving: Any, weights: Any) -> Any:
            xs = trees.combine(moving, fixed)
            outputs, _ = _forward(visit)(xs, weights, state, key)
            return [y for y in outputs if _is_float(y)]

        return jax.vjp(run, moving, weights)

    return vjp_of


def _backward(visit: Visit) -> Callable[..., Any]:
    def backward(
        inputs: Any, weights: Any, state: Any, key: Any, grads: Any
    ) -> tuple[Any, Any]:
        outputs, vjp = _vjp_of(visit)(inputs, weights, state, key)
        return outputs, vjp([g for g in grads if g is not None])

    return backward


def _reverse(visit: Visit) -> Callable[..., Any]:
    def back(
        outputs: Any, grads: Any, weights: Any, state: Any, key: Any, new_state: Any
    ) -> tuple[Any, Any]:
        full = tuple(with_float0(g, y) for g, y in zip(grads, outputs, strict=True))
        x, (gx, gw) = reverse_and_grad(
            visit.layer,
            packed(outputs),
            packed(full),
            weights,
            state,
            new_state,
            key,
            apart=False,
        )
        return x, (without_float0(gx), without_float0(gw))

    return back


def _kept(visit: Visit, given: Any) -> int:
    """Bytes that the backward pass needs of the forward pass, weights not counted."""

    def kept_values(*args: Any) -> list[Any]:
        return jax.tree.leaves(_vjp_of(visit)(*args)[1])

    traced, shapes = jax.make_jaxpr(kept_values, return_shape=True)(*given)
    others = {id(var) for var in traced.jaxpr.invars[len(visit.inputs) :]}
    for eqn in traced.jaxpr.eqns:  # What is made of nothing need not be kept.
        if not any(isinstance(var, core.Var) for var in eqn.invars):
            others |= set(map(id, eqn.outvars))
    kept = {
        id(var): shape
        for var, shape in zip(traced.jaxpr.outvars, shapes, strict=True)
        if isinstance(var, core.Var) and id(var) not in others
    }
    return n_bytes(list(kept.values()))


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _flops(compiled: Any) -> float:
    found = compiled.cost_analysis() or {}
    found = found[0] if isinstance(found, list) else found
    return max(float(found.get("flops", 0.0)), 0.0)


def _milliseconds(compiled: Any, args: Any, rounds: int = 3) -> float:
    """Median over rounds, after one that does not count."""
    values = some_values(args)
    jax.block_until_ready(compiled(*values))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*values))
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)

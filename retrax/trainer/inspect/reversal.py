"""How well reversing finds what was there, layer by layer, with real numbers.

Above `costs`. A model's reversible runs are computed forward from random inputs of its
own signature, and backward twice: with the inputs that were there, and with those that
reversing finds. What reversing gets wrong adds up from the last layer of a run to its
first.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from retrax.layers.base import Layer, is_marker, to_list
from retrax.layers.reversing import (
    computes,
    is_reversible,
    reverse_and_grad,
    with_float0,
    without_float0,
    zero_cotangent,
)
from retrax.layers.running import memory_context
from retrax.layers.stack import inputs_from_stack, packed
from retrax.trainer.blocks import Place, places
from retrax.trainer.inspect.costs import some_values
from retrax.trainer.inspect.walk import structs
from retrax.trainer.structure import fingerprint

__all__ = ["Reversal", "WORST", "reversals"]

# Errors of gradients beyond this share of them are warned of.
WORST = 0.01


@dataclasses.dataclass(frozen=True)
class Reversal:
    """What reversing a run of layers down to one of them gets wrong.

    Attributes:
      path: the layer's.
      depth: how many layers that compute have been reversed, this one included.
      inputs: largest error of its inputs, as a share of the largest input.
      gradients: norm of the error of its gradients, as a share of their norm: of its
        weights if it has any, else of its inputs.
    """

    path: str
    depth: int
    inputs: float
    gradients: float


def reversals(model: Layer, inputs: Any, seed: int = 0) -> list[Reversal]:
    """Measures all reversible runs of a model.

    Weights are those of the model, or newly made ones if it has none. The cotangents of
    a run's outputs are random.

    Args:
      model: the model, with or without a loss.
      inputs: its inputs. For a signature inputs are made: random numbers, but 0 for
        whole ones, since ids outside of a vocabulary might come otherwise.
      seed: of new weights and inputs.
    """
    weights, state = model.weights, model.state
    if not jax.tree.leaves((weights, state)):
        weights, state = _made(model, inputs, seed)
    found: list[Reversal] = []
    run = _Runner(jax.random.key(seed))
    parts = to_list(inputs)
    if not all(isinstance(x, (np.ndarray, jax.Array)) for x in parts):
        parts = some_values(list(map(structs, parts)), seed)
    stack = [jnp.asarray(x) for x in parts]
    chain = places(model)
    reached: list[tuple[Place, Any, Any, Any, list[Any]]] = []
    known: dict[int, Any] = {}  # Later places of shared layers hold no values.
    for place in chain:
        w, s = place.take(weights), place.take(state)
        if is_marker(w) or is_marker(s):
            w, s = known[id(place.layer)]
        known.setdefault(id(place.layer), (w, s))
        inputs = inputs_from_stack(stack, place.layer.n_in)
        if not is_reversible(place.layer):
            found += _backward(run, reached, stack)
            reached = []
        else:
            reached.append((place, w, s, None, stack))
        outputs, new_state = run.forward(place.layer, inputs, w, s)
        if reached:
            reached[-1] = (*reached[-1][:3], new_state, reached[-1][4])
        stack = [*outputs, *stack[place.layer.n_in :]]
    return found + _backward(run, reached, stack)


def _made(model: Layer, inputs: Any, seed: int) -> tuple[Any, Any]:
    """Makes new weights and state; the model is left as it is."""
    sig = structs(inputs)
    return jax.jit(lambda key: model.init(sig, rng=key))(jax.random.key(seed))


def _backward(
    run: _Runner, reached: list[tuple[Place, Any, Any, Any, list[Any]]], end: list[Any]
) -> list[Reversal]:
    """Goes back through one run, whose layers are `reached`, from the stack `end`."""
    found: list[Reversal] = []
    rng = np.random.default_rng(1)
    stack = end
    true_grads = grads = [_some_cotangent(x, rng) for x in end]
    depth = 0
    for place, w, s, new_state, before in reversed(reached):
        layer = place.layer
        n_in, n_out = layer.n_in, layer.n_out
        x, gx, gw = run.back(layer, stack[:n_out], grads[:n_out], w, s, new_state)
        true_in = before[:n_in]
        true_gx, true_gw = run.true_back(layer, true_in, true_grads[:n_out], w, s)
        stack, grads = [*x, *stack[n_out:]], [*gx, *grads[n_out:]]
        true_grads = [*true_gx, *true_grads[n_out:]]
        if computes(layer):
            depth += 1
            both = (gw, true_gw) if jax.tree.leaves(true_gw) else (gx, true_gx)
            of_inputs = _largest_error(stack, before)
            found.append(Reversal(place.path, depth, of_inputs, _share(*both)))
    return found


class _Runner:
    """Runs layers by themselves; equal ones share what is compiled."""

    def __init__(self, rng: Any) -> None:
        self._rng = rng
        self._programs: dict[Any, Any] = {}
        self._layers: list[Layer] = []  # Fingerprints are valid while these exist.

    def forward(self, layer: Layer, x: Any, w: Any, s: Any) -> tuple[list[Any], Any]:
        """Returns (outputs, new state)."""

        def run(x: Any, w: Any, s: Any, key: Any) -> Any:
            with memory_context("plain"):
                y, new_state = layer.pure_fn(x, w, s, key)
            return to_list(y), new_state

        return self._call(layer, "forward", run, x, w, s)

    def back(
        self, layer: Layer, y: Any, grads: Any, w: Any, s: Any, new_state: Any
    ) -> tuple[list[Any], list[Any], Any]:
        """Returns (inputs found, cotangents of them, of the weights)."""

        def run(y: Any, g: Any, new_state: Any, w: Any, s: Any, key: Any) -> Any:
            full = [with_float0(each, v) for each, v in zip(g, y, strict=True)]
            x, (gx, gw) = reverse_and_grad(
                layer, packed(y), packed(full), w, s, new_state, key, apart=False
            )
            gx = [without_float0(each) for each in to_list(gx)]
            return to_list(x), gx, without_float0(gw)

        return self._call(layer, "back", run, list(y), list(grads), new_state, w, s)

    def true_back(
        self, layer: Layer, x: Any, grads: Any, w: Any, s: Any
    ) -> tuple[list[Any], Any]:
        """Returns cotangents of (inputs, weights) at the inputs that were there."""

        def run(x: Any, g: Any, w: Any, s: Any, key: Any) -> Any:
            def forward(x: Any, w: Any) -> Any:
                with memory_context("plain"):
                    return to_list(layer.pure_fn(packed(x), w, s, key)[0])

            y, vjp = jax.vjp(forward, x, w)
            gx, gw = vjp([with_float0(each, v) for each, v in zip(g, y, strict=True)])
            return [without_float0(each) for each in gx], without_float0(gw)

        return self._call(layer, "true", run, list(x), list(grads), w, s)

    def _call(self, layer: Layer, what: str, fn: Any, *args: Any) -> Any:
        key = (what, fingerprint(layer))
        if key not in self._programs:
            self._layers.append(layer)
            self._programs[key] = jax.jit(fn)
        return self._programs[key](*args, self._rng)


def _some_cotangent(x: Any, rng: np.random.Generator) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return without_float0(zero_cotangent(x))
    return jnp.asarray(rng.standard_normal(x.shape, np.float32), x.dtype)


def _largest_error(found: list[Any], wanted: list[Any]) -> float:
    """Largest difference as a share of the largest number in arrays of that shape."""
    sizes: dict[Any, float] = {}
    worst: dict[Any, float] = {}
    for x, y in zip(found, wanted, strict=False):
        if jnp.issubdtype(y.dtype, jnp.floating):
            a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
            sizes[y.shape] = max(sizes.get(y.shape, 0.0), float(np.abs(b).max()))
            with np.errstate(all="ignore"):
                error = float(np.nan_to_num(np.abs(a - b).max(), nan=np.inf))
            worst[y.shape] = max(worst.get(y.shape, 0.0), error)
    return max((worst[k] / size for k, size in sizes.items() if size), default=0.0)


def _share(found: Any, wanted: Any) -> float:
    """Norm of the difference as a share of the norm of what is wanted."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))
    arrays = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    with np.errstate(all="ignore"):
        error = sum(float(np.sum((a - b) ** 2)) for a, b in arrays)
    size = sum(float(np.sum(b**2)) for _, b in arrays)
    return (error / size) ** 0.5 if size else 0.0

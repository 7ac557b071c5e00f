"""How runs of reversible layers are differentiated: by reversing them.

`Serial` hands its consecutive reversible layers to `run_reversibly`, and `Repeat` its
block. The forward pass keeps the outputs of the whole run only; the backward pass finds
the inputs of one layer after the other, with the old state and the same keys, and
takes the gradients there. So memory does not grow with the number of layers.

Above `reversing`; under the combinators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from retrax.layers.base import Layer, State, Weights, is_marker, to_list
from retrax.layers.reversing import (
    computes,
    is_reversible,
    reverse_blocks,
    reverse_chain,
)
from retrax.layers.running import (
    Run,
    current_run,
    emit_named,
    memory_mode,
    named_values,
    open_run,
)
from retrax.layers.stack import arities, inputs_from_stack, packed

__all__ = ["find_runs", "run_blocks_reversibly", "run_reversibly"]

_Values = Any  # (weights, state, keys) of a run


def find_runs(layers: Sequence[Layer]) -> dict[int, int]:
    """Returns {first place: place after the last} of runs worth reversing."""
    runs: dict[int, int] = {}
    start = 0
    while start < len(layers):
        stop = start
        while stop < len(layers) and is_reversible(layers[stop]):
            stop += 1
        if any(computes(layer) for layer in layers[start:stop]):
            runs[start] = stop
        start = max(stop, start + 1)
    return runs


class _Result(NamedTuple):
    """What a run gives: outputs, new state, and what its layers emitted."""

    outputs: Any
    state: Any
    emitted: dict[str, Any]


def run_reversibly(
    layers: Sequence[Layer],
    stack: Any,
    weights: Sequence[Weights],
    state: Sequence[State],
    rngs: Sequence[Any],
) -> tuple[Any, list[State]] | None:
    """Runs reversible layers along the data stack, to be differentiated by reversing.

    With memory='remat' each layer is computed again in the backward pass instead.

    Returns:
      (stack, new state of each layer); None if this run has to be differentiated as
      usual: memory='plain' is asked for, or it has part in a layer that is used
      elsewhere too and has state, whose order of changes only the usual way keeps.
    """
    mode = memory_mode()
    if mode == "plain" or _shares_state(layers, weights):
        return None
    n_in, _ = arities(layers)
    items = to_list(stack)
    if len(items) < n_in:  # The usual way says which layer lacks inputs.
        return None
    xs = tuple(jax.tree.map(jnp.asarray, items[:n_in]))
    given = [_resolved(*triple) for triple in zip(layers, weights, state, strict=True)]
    values = (tuple(w for w, _ in given), tuple(s for _, s in given), tuple(rngs))

    def forward(context: dict[str, Any], xs: Any, values: _Values) -> _Result:
        return _run_chain(layers, context, xs, values, mode)

    def backward(
        y: Any, grad: Any, values: _Values, new_state: Any
    ) -> tuple[Any, tuple[Any, Any]]:
        ws, ss, keys = values
        x, (gx, gw) = reverse_chain(layers, y, grad, ws, ss, new_state, keys)
        return x, (tuple(to_list(gx)), gw)

    result = _run(forward, backward, mode, xs, values)
    emit_named(result.emitted)
    new_state = [_marked(s, old) for s, old in zip(result.state, state, strict=True)]
    return packed([*to_list(result.outputs), *items[n_in:]]), new_state


def run_blocks_reversibly(
    run_all: Callable[[Any, Weights, State, Any], tuple[Any, State, dict[str, Any]]],
    block: Layer,
    n: int,
    x: Any,
    weights: Weights,
    state: State,
    keys: Any,
) -> tuple[Any, State, dict[str, Any]]:
    """Runs `run_all(x, weights, state, keys)`, to be differentiated by reversing.

    `run_all` runs n blocks like the reversible `block`, whose values are stacked.
    """

    def forward(context: dict[str, Any], x: Any, values: _Values) -> _Result:
        with open_run("forward", **context):
            return _Result(*run_all(x, *values))

    def backward(
        y: Any, grad: Any, values: _Values, new_state: Any
    ) -> tuple[Any, tuple[Any, Any]]:
        w, s, keys = values
        return reverse_blocks(block, n, y, grad, w, s, new_state, keys)

    result = _run(forward, backward, "reversible", x, (weights, state, keys))
    return result.outputs, result.state, result.emitted


def _run(
    forward: Callable[..., _Result],
    backward: Callable[..., tuple[Any, tuple[Any, Any]]],
    mode: str,
    xs: Any,
    values: _Values,
) -> _Result:
    """Calls `forward` so that its derivative is `backward`."""
    run = current_run()
    context = {} if run is None else dict(run.context)
    mask = context.pop("row_mask", None)
    context.pop("memory", None)

    # All that is traced comes in by arguments: rules of derivatives must not close over
    # traced values.
    def run_forward(xs: Any, weights: Any, rest: Any) -> _Result:
        others, mask = rest
        # Under the rule for reversing nothing is differentiated as usual.
        how = "plain" if mode == "reversible" else mode
        inner = {**context, "row_mask": mask, "memory": how}
        return forward(inner, xs, (weights, *others))

    @jax.custom_vjp
    def reversible(xs: Any, weights: Any, rest: Any) -> _Result:
        return run_forward(xs, weights, rest)

    def keep(xs: Any, weights: Any, rest: Any) -> tuple[_Result, Any]:
        result = run_forward(xs, weights, rest)
        return result, (result.outputs, result.state, weights, rest)

    def reverse(kept: Any, grads: _Result) -> tuple[Any, Any, None]:
        y, new_state, weights, (others, mask) = kept
        inner = {**context, "row_mask": mask, "memory": mode}
        with open_run("forward", **inner):
            _, (gx, gw) = backward(y, grads.outputs, (weights, *others), new_state)
        return gx, gw, None

    reversible.defvjp(keep, reverse)
    call = run_forward if mode == "remat" else reversible
    weights, *others = values
    return call(xs, weights, (tuple(others), mask))


def _run_chain(
    layers: Sequence[Layer],
    context: dict[str, Any],
    xs: Any,
    values: _Values,
    mode: str,
) -> _Result:
    stack, new_state, emitted = list(xs), [], {}
    for layer, w, s, rng in zip(layers, *values, strict=True):

        def run_one(x: Any, w: Any, s: Any, rng: Any, layer: Layer = layer) -> Any:
            with open_run("forward", **context):
                y, new_s, values = layer.apply(x, w, s, rng)
            return y, new_s, named_values(values)

        if mode == "remat":
            run_one = jax.checkpoint(run_one, prevent_cse=True)
        y, new_s, named = run_one(inputs_from_stack(stack, layer.n_in), w, s, rng)
        stack = to_list(y) + stack[layer.n_in :]
        new_state.append(new_s)
        for name, value in named.items():
            emitted[f"{len(emitted):06d}{name[6:]}"] = value
    return _Result(packed(stack), tuple(new_state), emitted)


# --- Shared layers ------------------------------------------------------------------


def _shares_state(layers: Sequence[Layer], weights: Sequence[Weights]) -> bool:
    """Whether a layer of the run has state and is used at another place as well."""
    run = current_run()
    if run is None or not run.trace.stack:
        return False
    n_places = _n_places(run.trace.stack[0][0])
    shared = [x for x in _all_below(layers) if n_places.get(id(x), 1) > 1]
    if not shared and not any(map(is_marker, weights)):
        return False
    return any(jax.tree.leaves(_found(run, layer)[1]) for layer in shared)


def _n_places(root: Layer) -> dict[int, int]:
    """Counts in how many places each layer under the root stands."""
    counts: dict[int, int] = {}
    todo = [root]
    while todo:
        for child in _children(todo.pop()):
            counts[id(child)] = counts.get(id(child), 0) + 1
            if counts[id(child)] == 1:
                todo.append(child)
    return counts


def _children(layer: Layer) -> list[Layer]:
    template = layer._template
    return [*layer.sublayers, *([] if template is None else [template])]


def _all_below(layers: Sequence[Layer]) -> list[Layer]:
    found = {id(layer): layer for layer in layers}
    todo = list(found.values())
    while todo:
        for child in _children(todo.pop()):
            if id(child) not in found:
                found[id(child)] = child
                todo.append(child)
    return list(found.values())


def _found(run: Run, layer: Layer) -> tuple[Weights, State]:
    frame = run.find(layer)
    if frame is None:
        return (), ()
    return frame.weights, frame.state


def _resolved(layer: Layer, weights: Weights, state: State) -> tuple[Any, Any]:
    """Puts the values of shared layers at their later places too.

    Then each place has its own gradient, and JAX adds them up where they come from.
    """
    run = current_run()
    if run is not None and (is_marker(weights) or is_marker(state)):
        weights, state = _found(run, layer)
    n = len(layer.sublayers)
    if not n or len(weights) != n:
        return weights, state
    pairs = [
        _resolved(*triple)
        for triple in zip(layer.sublayers, weights, state, strict=False)
    ]
    return tuple(w for w, _ in pairs), (*(s for _, s in pairs), *state[n:])


def _marked(new: State, old: State) -> State:
    """Undoes `_resolved` for a new state; what was resolved holds nothing."""
    if is_marker(old):
        return old
    if type(old) is tuple and isinstance(new, (tuple, list)) and len(new) == len(old):
        return tuple(_marked(*pair) for pair in zip(new, old, strict=True))
    return new

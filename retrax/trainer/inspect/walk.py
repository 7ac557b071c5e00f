"""A model as a list of layers along the data stack, without any values.

Lowest part of `inspect`. Chains (`Serial`) are looked into; the blocks of a `Repeat`
are one block that stands for all. What a layer reads, writes and only moves is read
from its trace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from retrax.layers import tree as layer_tree
from retrax.layers.base import Layer, is_marker, to_list
from retrax.layers.reversing import is_chain, is_reversible
from retrax.layers.stack import inputs_from_stack

__all__ = ["Visit", "structs", "visits"]


@dataclasses.dataclass(frozen=True)
class Visit:
    """One layer at its place along the data stack.

    Attributes:
      path: where it is, as in the names of weights.
      layer: the layer.
      n_times: how many equal ones there are, in the blocks of a `Repeat`.
      inputs: shapes of the items it takes, the top first.
      outputs: shapes of the items it gives.
      weights: shapes of the weights of one of them.
      state: shapes of its state.
      trainable: for each leaf of the weights, whether it is trained.
      is_shared: its values are those of an earlier place.
      reads: which of its inputs it computes from.
      moves: output -> input, where an output is an input as it was.
      stack: shapes of all items below its inputs.
    """

    path: str
    layer: Layer
    n_times: int
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    weights: Any
    state: Any
    trainable: tuple[bool, ...]
    is_shared: bool
    reads: frozenset[int]
    moves: dict[int, int]
    stack: tuple[Any, ...]

    @property
    def is_reversible(self) -> bool:
        """Whether its inputs can be computed from its outputs."""
        return is_reversible(self.layer)

    @property
    def writes(self) -> frozenset[int]:
        """Which of its outputs are new."""
        return frozenset(set(range(len(self.outputs))) - set(self.moves))


def structs(tree: Any) -> Any:
    """Returns a tree of `jax.ShapeDtypeStruct`s for anything with shapes and dtypes."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
        tree,
        is_leaf=lambda x: hasattr(x, "shape"),
    )


def visits(model: Layer, input_signature: Any) -> list[Visit]:
    """Returns the layers of a model in the order in which they run.

    Args:
      model: the model; need not be initialised, and stays as it is.
      input_signature: what `model.init` takes.

    Raises:
      LayerError: the model cannot take such inputs.
    """
    sig = structs(input_signature)
    weights, state = model.weights_and_state_signature(sig)
    walk = _Walk(to_list(sig))
    return list(walk.run(model, structs(weights), structs(state), "", 1, True))


class _Walk:
    """Goes along the data stack, and remembers the values of shared layers."""

    def __init__(self, stack: list[Any]) -> None:
        self._stack = stack
        self._known: dict[int, tuple[Any, Any]] = {}
        self._visited: set[int] = set()

    def run(
        self,
        layer: Layer,
        weights: Any,
        state: Any,
        path: str,
        n_times: int,
        trainable: bool,
    ) -> Iterator[Visit]:
        trainable = trainable and layer.trainable
        weights, state = self._resolved(layer, weights, state)
        template = layer._template
        if is_chain(layer):
            for i, child in enumerate(layer.sublayers):
                name = f"{path}/{i}.{layer_tree.label(child)}".lstrip("/")
                yield from self.run(
                    child, weights[i], state[i], name, n_times, trainable
                )
        elif template is not None:
            w, s = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (weights, state)
            )
            n = n_times * layer.__dict__["_n"]
            name = f"{path}/block" if path else "block"
            yield from self.run(template, w, s, name, n, trainable)
        else:
            yield self._visit(layer, weights, state, path, n_times, trainable)

    def _visit(
        self,
        layer: Layer,
        weights: Any,
        state: Any,
        path: str,
        n_times: int,
        trainable: bool,
    ) -> Visit:
        n_in = layer.n_in
        is_shared = layer.has_weights and id(layer) in self._visited
        self._visited.add(id(layer))
        inputs = tuple(self._stack[:n_in])
        given = inputs_from_stack(self._stack, n_in)
        outputs, reads, moves = _traced(layer, given, weights, state)
        self._stack = [*outputs, *self._stack[n_in:]]
        on = layer_tree.trainable_list(layer, weights)
        return Visit(
            path or layer_tree.label(layer),
            layer,
            n_times,
            inputs,
            tuple(outputs),
            weights,
            state,
            tuple(trainable and x for x in on),
            is_shared,
            reads,
            moves,
            tuple(self._stack[len(outputs) :]),
        )

    def _resolved(self, layer: Layer, weights: Any, state: Any) -> tuple[Any, Any]:
        """Puts the values of shared layers in place of their markers."""
        if is_marker(weights) or is_marker(state):
            return self._known.get(id(layer), ((), ()))
        n = len(layer.sublayers)
        if n and isinstance(weights, tuple) and len(weights) == n:
            pairs = [
                self._resolved(child, w, s)
                for child, w, s in zip(layer.sublayers, weights, state, strict=False)
            ]
            weights = tuple(w for w, _ in pairs)
            state = (*(s for _, s in pairs), *state[n:])
        self._known.setdefault(id(layer), (weights, state))
        return weights, state


def _traced(
    layer: Layer, inputs: Any, weights: Any, state: Any
) -> tuple[list[Any], frozenset[int], dict[int, int]]:
    """Returns (shapes of outputs, inputs that are computed from, outputs moved)."""
    key = jax.eval_shape(lambda: jax.random.key(0))

    def run(x: Any, weights: Any, state: Any, key: Any) -> list[Any]:
        return to_list(layer.pure_fn(x, weights, state, key)[0])

    traced, outputs = jax.make_jaxpr(run, return_shape=True)(
        inputs, weights, state, key
    )
    jaxpr = traced.jaxpr
    n_in = len(to_list(inputs))
    places = {id(var): i for i, var in enumerate(jaxpr.invars[:n_in])}
    used = {id(var) for eqn in jaxpr.eqns for var in eqn.invars}
    reads = frozenset(i for var, i in places.items() if var in used)
    moves = {
        i: places[id(var)] for i, var in enumerate(jaxpr.outvars) if id(var) in places
    }
    return outputs, reads, moves

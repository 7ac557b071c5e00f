"""Combinators that change how a layer runs: choices, memory, axes and directions.

They build on `combinators.py` and on `scan.py`, whose loops this module hands on, as
it does `Repeat` of `repeat.py`. What layers compute inside of a branch lives in a trace
of its own: values that they emit there (`running.emit`) do not reach the caller of
`Layer.apply`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from retrax.layers.base import Layer, to_list
from retrax.layers.combinators import Branch, Serial
from retrax.layers.repeat import Repeat
from retrax.layers.scan import Chunk, Scan, check_state_kept, for_each, packed
from retrax.layers.stack import (
    child_rngs,
    inputs_from_stack,
    outputs_onto_stack,
    remember_output,
)
from retrax.layers.stack_layers import Concatenate
from retrax.shapes import ShapeDtype

__all__ = [
    "BatchLeadingAxes",
    "Bidirectional",
    "Cache",
    "Chunk",
    "Cond",
    "Repeat",
    "Scan",
]


class Cond(Layer):
    """Runs one of two layers, chosen at run time by the output of a third one.

    `cond` takes its inputs from the top of the stack and gives one bool (or number, of
    size 1; other than 0 is true); the chosen layer takes its own inputs below those.
    Whatever lies below them passes by. Both layers have weights and state at all times;
    the state of the one not chosen stays.

    Example:
      >>> from retrax import layers as tl
      >>> m = tl.Cond(tl.Fn('Big', lambda x: x > 2), tl.Fn('Half', lambda x: x / 2))
      >>> float(m((jnp.array(4.), jnp.array(8.)))), float(m((jnp.array(1.), 8.)))
      (4.0, 8.0)
    """

    _accepts_longer_stack = True

    def __init__(
        self,
        cond: Layer,
        true: Layer,
        false: Layer | None = None,
        name: str | None = None,
    ) -> None:
        """Makes a choice between `true` and `false`.

        Args:
          cond: layer with one output.
          true: layer that runs where cond's output is true.
          false: layer that runs otherwise; None for the identity.
          name: name of the layer.

        Raises:
          ValueError: the arities do not fit.
        """
        false = Serial() if false is None else false
        if cond.n_out != 1:
            raise ValueError(
                f"Cond needs a condition with one output; {cond.name} has {cond.n_out}."
            )
        if (true.n_in, true.n_out) != (false.n_in, false.n_out):
            raise ValueError(
                f"Cond needs branches alike: {true.name} has n_in={true.n_in}, "
                f"n_out={true.n_out}; {false.name} has n_in={false.n_in}, "
                f"n_out={false.n_out}. Without `false` it is the identity of one input."
            )
        super().__init__(cond.n_in + true.n_in, true.n_out, name)
        self._sublayers = [cond, true, false]

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Initialises all three layers."""
        cond, true, false = self.sublayers
        cond_in, branch_in, rest = self._parts(input_signature)
        parts = [
            cond.init(cond_in, use_cache=True),
            true.init(branch_in, use_cache=True),
            false.init(branch_in, use_cache=True),
        ]
        self.weights = tuple(w for w, _ in parts)
        self.state = tuple(s for _, s in parts)
        outputs = true.output_signature(branch_in)
        other = false.output_signature(branch_in)
        if tuple(to_list(outputs)) != tuple(to_list(other)):
            raise ValueError(
                f"Cond needs branches with equal outputs: {true.name} gives {outputs}, "
                f"{false.name} gives {other}."
            )
        remember_output(self, input_signature, outputs_onto_stack(outputs, rest, 0))

    def forward(self, xs: Any) -> Any:
        """Runs the condition, then one branch."""
        cond, *branches = self.sublayers
        cond_in, branch_in, rest = self._parts(xs)
        rngs = child_rngs(self)
        chosen, cond_state = cond.pure_fn(
            cond_in, self.weights[0], self.state[0], rngs[0], use_cache=True
        )
        if jnp.size(chosen) != 1:
            raise ValueError(
                f"Cond's condition {cond.name} has to give one value, got the shape "
                f"{jnp.shape(chosen)}; reduce it, with jnp.all or jnp.any."
            )
        states = self.state[1:]

        def run(i: int) -> Any:
            def branch(x: Any) -> Any:
                y, s = branches[i].pure_fn(
                    x, self.weights[i + 1], states[i], rngs[i + 1]
                )
                check_state_kept(branches[i], states[i], s)
                y = tuple(to_list(y)) if self.n_out != 1 else y
                return y, tuple(s if j == i else states[j] for j in (0, 1))

            return branch

        outputs, branch_states = jax.lax.cond(
            jnp.reshape(chosen, ()).astype(bool), run(0), run(1), branch_in
        )
        self.state = (cond_state, *branch_states)
        return outputs_onto_stack(outputs, rest, 0)

    def _parts(self, stack: Any) -> tuple[Any, Any, tuple[Any, ...]]:
        n = self.sublayers[0].n_in
        cond_in = inputs_from_stack(stack, n)
        items = tuple(to_list(stack)[n:])
        branch_in = inputs_from_stack(items, self.sublayers[1].n_in)
        return cond_in, branch_in, items[self.sublayers[1].n_in :]


class Cache(Layer):
    """Computes its layer at the first call and gives the same outputs ever after.

    The state is (state of the layer, outputs); the outputs are () until the first
    call, so a compiled function is compiled once more for the calls after it. After
    `reset_state()` it computes again.
    """

    has_own_state = True

    def __init__(
        self, layer: Layer, name: str | None = None, mode: str = "predict"
    ) -> None:
        """Makes a layer that computes `layer` once.

        Args:
          layer: the layer.
          name: name of the layer.
          mode: nothing is kept in any mode but 'predict'; the layer is there in the
            others so that models have the same tree of weights in all modes.
        """
        super().__init__(layer.n_in, layer.n_out, name)
        self._sublayers = [layer]
        self._keeps = mode == "predict"

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Initialises the layer; nothing is kept yet."""
        layer = self.sublayers[0]
        weights, state = layer.init(input_signature, use_cache=True)
        self.weights, self.state = (weights,), (state, ())
        remember_output(self, input_signature, layer.output_signature(input_signature))

    def start_state(self, state: Any) -> Any:
        """Forgets the outputs."""
        return ()

    def forward(self, inputs: Any) -> Any:
        """Returns what is kept, or computes it."""
        if isinstance(self.state[1], tuple) and self.state[1]:
            return self.state[1][0]
        outputs, state = self.sublayers[0].pure_fn(
            inputs, self.weights[0], self.state[0], child_rngs(self)[0], use_cache=True
        )
        self.state = (state, (outputs,) if self._keeps else ())
        return outputs

    def __repr__(self) -> str:
        return super().__repr__() if self._keeps else repr(self.sublayers[0])


class BatchLeadingAxes(Layer):
    """Runs a layer with all axes but the last ones made one batch axis.

    All inputs have the same leading axes, which the outputs have again.

    Example:
      >>> from retrax import layers as tl
      >>> last = tl.BatchLeadingAxes(tl.Fn('Shape', lambda x: x[:, :1]))
      >>> last(jnp.zeros((2, 3, 4, 5))).shape
      (2, 3, 4, 1)
    """

    def __init__(
        self, layer: Layer, n_last_axes_to_keep: int = 1, name: str | None = None
    ) -> None:
        """Makes the combinator, which keeps the last n_last_axes_to_keep axes."""
        if n_last_axes_to_keep < 0 or layer.n_in < 1:
            raise ValueError(
                "BatchLeadingAxes needs n_last_axes_to_keep >= 0 and a layer with "
                f"inputs, got {n_last_axes_to_keep} and n_in={layer.n_in}."
            )
        super().__init__(layer.n_in, layer.n_out, name)
        self._sublayers = [layer]
        self._n_keep = n_last_axes_to_keep

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Initialises the layer for inputs with one leading axis."""
        layer = self.sublayers[0]
        lead = self._leading(to_list(input_signature))
        sigs = [
            ShapeDtype(_flat_shape(s.shape, lead), s.dtype)
            for s in to_list(input_signature)
        ]
        weights, state = layer.init(packed(sigs), use_cache=True)
        self.weights, self.state = (weights,), (state,)
        outputs = to_list(layer.output_signature(packed(sigs)))
        restored = [ShapeDtype((*lead, *y.shape[1:]), y.dtype) for y in outputs]
        remember_output(self, input_signature, packed(restored))

    def forward(self, inputs: Any) -> Any:
        """Runs the layer on reshaped inputs."""
        xs = to_list(inputs)
        lead = self._leading(xs)
        flat = [jnp.reshape(x, _flat_shape(x.shape, lead)) for x in xs]
        outputs, state = self.sublayers[0].pure_fn(
            packed(flat),
            self.weights[0],
            self.state[0],
            child_rngs(self)[0],
            use_cache=True,
        )
        self.state = (state,)
        ys = to_list(outputs) if self.n_out != 1 else [outputs]
        return packed([jnp.reshape(y, (*lead, *y.shape[1:])) for y in ys])

    def _leading(self, xs: list[Any]) -> tuple[int, ...]:
        shapes = [tuple(x.shape) for x in xs]
        leads = {shape[: max(len(shape) - self._n_keep, 0)] for shape in shapes}
        if len(leads) > 1 or any(len(shape) < self._n_keep for shape in shapes):
            raise ValueError(
                f"BatchLeadingAxes(n_last_axes_to_keep={self._n_keep}) needs inputs "
                f"with the same axes before the last {self._n_keep}, got {shapes}."
            )
        return leads.pop()


def Bidirectional(
    forward_layer: Layer, axis: int = 1, merge_layer: Layer | None = None
) -> Layer:
    """Runs a layer forwards and a copy of it backwards along an axis, and merges both.

    Args:
      forward_layer: a recurrent layer, as `GRU(n)`.
      axis: the time axis.
      merge_layer: joins the outputs of both; a new Concatenate() if None. Unlike in
        Trax the default is not one instance for all.
    """
    backward_layer = copy.deepcopy(forward_layer)

    def flip(x: Any) -> Any:
        return jnp.flip(x, axis)

    backward = Serial(
        for_each("_FlipAlongTimeAxis", flip, forward_layer.n_in),
        backward_layer,
        for_each("_FlipAlongTimeAxis", flip, forward_layer.n_out),
    )
    merge_layer = Concatenate() if merge_layer is None else merge_layer
    return Serial(Branch(forward_layer, backward), merge_layer)


# --- Helpers ------------------------------------------------------------------------


def _flat_shape(shape: Sequence[int], lead: Sequence[int]) -> tuple[int, ...]:
    size = 1
    for n in lead:
        size *= n
    return (size, *shape[len(lead) :])

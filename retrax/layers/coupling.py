"""What reversible couplings have in common: a residual made of layers.

Above `reversible` and `combinators`; `reversible_residual` builds on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from retrax.layers.base import Layer, State, to_list
from retrax.layers.combinators import Serial
from retrax.layers.reversible import ReversibleLayer
from retrax.layers.reversing import keys_of
from retrax.layers.stack import (
    arities,
    ensure_layers,
    inputs_from_stack,
    outputs_onto_stack,
    remember_output,
)

__all__ = ["Coupling", "running_again"]


class Coupling(ReversibleLayer):
    """What couplings share: layers that compute a residual from part of the stack."""

    def __init__(
        self, layers: Any, attention_layer: Layer | None, name: str | None
    ) -> None:
        inner = Serial(ensure_layers(layers, type(self).__name__))
        sublayers: list[Layer] = [inner]
        if attention_layer is not None:
            if not hasattr(attention_layer, "forward_and_or_backward"):
                raise TypeError(
                    f"attention_layer must define forward_and_or_backward(), "
                    f"{attention_layer!r} does not; pass it among the other layers."
                )
            sublayers = [*([inner] if inner.sublayers else []), attention_layer]
        needed, left = arities(sublayers)
        if left < 1:
            raise ValueError(f"{type(self).__name__}: its layers leave no output.")
        n = max(needed + 1, 2)
        super().__init__(n_in=n, n_out=n, name=name)
        self._sublayers = sublayers
        self._attention_layer = attention_layer

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Initialises the layers along the stack that the residual is made from."""
        weights, states = [], []

        def run(layer: Layer, i: int, inputs: Any) -> Any:
            w, s = layer.init(inputs, use_cache=True)
            weights.append(w)
            states.append(s)
            return layer.output_signature(inputs)

        residual = self._along_stack(run, self._context(input_signature))
        self._check(residual, input_signature[0])
        self.weights, self.state = tuple(weights), tuple(states)
        remember_output(self, input_signature, tuple(input_signature))

    def _context(self, items: Any) -> tuple[Any, ...]:
        raise NotImplementedError

    def _along_stack(self, run: Callable[[Layer, int, Any], Any], stack: Any) -> Any:
        """Runs the sublayers and returns what is on top in the end: the residual."""
        for i, layer in enumerate(self._sublayers):
            outputs = run(layer, i, inputs_from_stack(stack, layer.n_in))
            stack = outputs_onto_stack(outputs, stack, layer.n_in)
        return to_list(stack)[0]

    def _residual(
        self,
        context: Any,
        weights: Any,
        state: Any,
        rngs: Any,
        use_cache: bool = False,
    ) -> tuple[Any, State]:
        """Returns (residual, new state)."""
        new_state = []

        def run(layer: Layer, i: int, inputs: Any) -> Any:
            y, s = layer.pure_fn(inputs, weights[i], state[i], rngs[i], use_cache)
            new_state.append(s)
            return y

        return self._along_stack(run, context), tuple(new_state)

    def _residual_and_vjp(
        self, context: Any, weights: Any, state: Any, rng: Any
    ) -> tuple[Any, Any]:
        """Returns (residual, its vjp to (context, weights)), as in the forward pass."""
        rngs = keys_of(self, rng)
        state = running_again(state)

        def forward(context: Any, weights: Any) -> Any:
            return self._residual(context, weights, state, rngs)[0]

        return jax.vjp(forward, tuple(context), weights)

    def _check(self, residual: Any, accumulator: Any) -> None:
        if tuple(residual.shape) != tuple(accumulator.shape):
            raise ValueError(
                f"{self.name} adds what its layers compute to the top of the stack, so "
                f"shapes must be equal: they give {tuple(residual.shape)}, the top is "
                f"{tuple(accumulator.shape)}."
            )


def running_again(state: State) -> State:
    """Tells layers that ask for it that they run for the second time (as in Trax)."""
    if isinstance(state, dict):
        return {
            f"{k}_yes" if k == "running_second_time" else k: running_again(v)
            for k, v in state.items()
        }
    if type(state) in (tuple, list):
        return type(state)(running_again(s) for s in state)
    return state

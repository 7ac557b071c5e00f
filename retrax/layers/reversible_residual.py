"""Reversible couplings, and reversible layers in a row.

A coupling adds to one stack item what layers compute from the items below it, so that
it can be taken off again. Above `coupling`.
"""

from __future__ import annotations

from typing import Any

import jax

from retrax.layers.base import Layer, State, Weights, to_list
from retrax.layers.combinators import Serial
from retrax.layers.coupling import Coupling, running_again
from retrax.layers.reversible import ReversibleLayer
from retrax.layers.reversing import (
    add_cotangents,
    is_reversible,
    keys_of,
    reverse_chain,
    reverse_each,
    zero_cotangent,
)
from retrax.layers.stack import (
    child_rngs,
    ensure_layers,
    inputs_from_stack,
    outputs_onto_stack,
)

__all__ = [
    "ReversibleHalfResidual",
    "ReversibleMomentumResidual",
    "ReversibleSerial",
]


class ReversibleHalfResidual(Coupling):
    """Adds to the top of the stack what layers compute from the items below it.

    Takes (accumulator, *context) and gives (accumulator + f(*context), *context), f
    being the layers in a row; only their first output is used. Alternating with
    `ReversibleSwap` it makes reversible residual networks (arXiv 1707.04585).

    The backward pass computes f once, both to take it off and for its gradients. An
    attention layer may do that in one go by a method
    `forward_and_or_backward(inputs, weights, state, rng, output_grad=None,
    compute_output=True, update_state=True)` that returns (output, new_state,
    grads_inputs, grads_weights).

    Example:
      >>> from retrax import layers as tl
      >>> from retrax.shapes import ShapeDtype
      >>> half = ReversibleHalfResidual(tl.Dense(4), tl.Relu())
      >>> _ = half.init((ShapeDtype((2, 4)), ShapeDtype((2, 4))))
      >>> half
      ReversibleHalfResidual_in2_out2[
        Serial[
          Dense_4
          Relu
        ]
      ]
    """

    def __init__(
        self,
        *residual_layers: Any,
        attention_layer: Layer | None = None,
        name: str | None = None,
    ) -> None:
        """Makes the layer.

        Args:
          *residual_layers: layers that compute the residual, in a row.
          attention_layer: layer after them that defines forward_and_or_backward.
          name: name of the layer.

        Raises:
          TypeError: attention_layer does not define forward_and_or_backward.
        """
        super().__init__(residual_layers, attention_layer, name)

    def _context(self, items: Any) -> tuple[Any, ...]:
        return tuple(items[1:])

    def forward(self, inputs: Any) -> Any:
        """Adds the residual."""
        accumulator, *context = inputs
        residual, self.state = self._residual(
            tuple(context), self.weights, self.state, child_rngs(self), use_cache=True
        )
        self._check(residual, accumulator)
        return accumulator + residual.astype(accumulator.dtype), *context

    def reverse(
        self,
        output: Any,
        weights: Weights = (),
        state: State = (),
        new_state: State = (),
        rng: Any = None,
    ) -> Any:
        """Takes the residual off."""
        accumulator, *context = output
        residual, _ = self._residual(
            tuple(context), weights, running_again(state), keys_of(self, rng)
        )
        return accumulator - residual.astype(accumulator.dtype), *context

    def reverse_and_grad(
        self,
        output: Any,
        grad: Any,
        weights: Weights = (),
        state: State = (),
        new_state: State = (),
        rng: Any = None,
    ) -> tuple[Any, tuple[Any, Any]]:
        """Takes the residual off, and computes gradients from the same pass."""
        accumulator, *context = output
        grad_top, *grad_context = grad
        args = (tuple(context), weights, state, rng)
        if self._attention_layer is None:
            residual, vjp = self._residual_and_vjp(*args)
            grads_in, grads_w = vjp(grad_top.astype(residual.dtype))
        else:
            residual, (grads_in, grads_w) = self._fused(*args, grad_top)
        inputs = (accumulator - residual.astype(accumulator.dtype), *context)
        grad_context = add_cotangents(tuple(grad_context), grads_in)
        return inputs, ((grad_top, *grad_context), grads_w)

    def _fused(
        self, context: Any, weights: Any, state: Any, rng: Any, grad: Any
    ) -> tuple[Any, tuple[Any, Any]]:
        """Residual and gradients where the attention layer computes both at once."""
        *before, attention = self._sublayers
        rngs, state = keys_of(self, rng), running_again(state)

        def inputs_of_attention(context: Any, weights: Any) -> Any:
            stack = context
            for i, layer in enumerate(before):
                inputs = inputs_from_stack(stack, layer.n_in)
                y, _ = layer.pure_fn(inputs, weights[i], state[i], rngs[i])
                stack = outputs_onto_stack(y, stack, layer.n_in)
            return inputs_from_stack(stack, attention.n_in)

        given = (context, tuple(weights[:-1]))
        inputs, vjp = jax.vjp(inputs_of_attention, *given)
        output, _, grads_inputs, grads_attention = attention.forward_and_or_backward(
            inputs,
            weights[-1],
            state[-1],
            rngs[-1],
            output_grad=grad,
            compute_output=True,
            update_state=False,
        )
        grads_inputs = _all_cotangents(inputs, grads_inputs)
        if attention.n_in == 1:
            (grads_inputs,) = grads_inputs
        grads_context, grads_before = vjp(grads_inputs)
        grads = (*grads_before, grads_attention)
        return to_list(output)[0], (grads_context, grads)


class ReversibleMomentumResidual(Coupling):
    """A residual step with momentum, reversible without splitting the features.

    Takes (x, v, *context) and gives (x', v', *context) with
    v' = gamma v + (1 - gamma) f(x, *context) and x' = x + v' (Momentum Residual
    Networks, arXiv 2102.07870, eq. 5). Unlike in a half residual, f sees and changes
    the whole x. Reversing divides by gamma: a rounding error grows by 1 / gamma per
    layer, so choose 1 - gamma small against 1 / depth. A stack begins with
    v = 0, see `docs/reversible.md`.
    """

    def __init__(
        self, *residual_layers: Any, gamma: float = 0.9, name: str | None = None
    ) -> None:
        """Makes the layer.

        Args:
          *residual_layers: layers that compute f, in a row, from x and what is below v.
          gamma: part of v that stays in each step, 0 < gamma < 1.
          name: name of the layer.

        Raises:
          ValueError: gamma is out of range.
        """
        if not 0 < gamma < 1:
            raise ValueError(
                f"gamma must lie between 0 and 1, got {gamma}: with 0 the step cannot "
                "be reversed, with 1 its layers are not used."
            )
        super().__init__(residual_layers, None, name)
        self._gamma = gamma

    def _context(self, items: Any) -> tuple[Any, ...]:
        return (items[0], *items[2:])

    def forward(self, inputs: Any) -> Any:
        """Makes one step."""
        x, v, *context = inputs
        residual, self.state = self._residual(
            (x, *context), self.weights, self.state, child_rngs(self), use_cache=True
        )
        self._check(residual, x)
        self._check(v, x)
        v = self._gamma * v + (1 - self._gamma) * residual.astype(v.dtype)
        return x + v, v, *context

    def reverse(
        self,
        output: Any,
        weights: Weights = (),
        state: State = (),
        new_state: State = (),
        rng: Any = None,
    ) -> Any:
        """Takes one step back."""
        x, v, *context = output
        x = x - v
        residual, _ = self._residual(
            (x, *context), weights, running_again(state), keys_of(self, rng)
        )
        return x, self._old_v(v, residual), *context

    def reverse_and_grad(
        self,
        output: Any,
        grad: Any,
        weights: Weights = (),
        state: State = (),
        new_state: State = (),
        rng: Any = None,
    ) -> tuple[Any, tuple[Any, Any]]:
        """Takes one step back, and computes gradients from the same pass."""
        x, v, *context = output
        grad_x, grad_v, *grad_context = grad
        x = x - v
        residual, vjp = self._residual_and_vjp((x, *context), weights, state, rng)
        grad_v = grad_v + grad_x
        to_f = ((1 - self._gamma) * grad_v).astype(residual.dtype)
        grads_in, grads_w = vjp(to_f)
        grads = add_cotangents((grad_x, *grad_context), grads_in)
        inputs = (x, self._old_v(v, residual), *context)
        return inputs, ((grads[0], self._gamma * grad_v, *grads[1:]), grads_w)

    def _old_v(self, v: Any, residual: Any) -> Any:
        return (v - (1 - self._gamma) * residual.astype(v.dtype)) / self._gamma


class ReversibleSerial(ReversibleLayer, Serial):
    """Reversible layers one after another, as one reversible layer."""

    def __init__(self, *sublayers: Any, name: str | None = None) -> None:
        """Makes the layer; nested lists and tuples are flattened.

        Raises:
          ValueError: a layer is not reversible; says which.
        """
        layers = ensure_layers(sublayers, "ReversibleSerial")
        for i, layer in enumerate(layers):
            if not is_reversible(layer):
                raise ValueError(
                    f"Sub-layer {i} of ReversibleSerial is not reversible: "
                    f"{layer.name}. Use Serial, which reverses what it can, or make it "
                    "part of a ReversibleHalfResidual."
                )
        Serial.__init__(self, layers, name=name)

    def reverse(
        self,
        output: Any,
        weights: Weights = (),
        state: State = (),
        new_state: State = (),
        rng: Any = None,
    ) -> Any:
        """Reverses the layers, the last one first."""
        rngs = keys_of(self, rng)
        return reverse_each(self.sublayers, output, weights, state, new_state, rngs)

    def reverse_and_grad(
        self,
        output: Any,
        grad: Any,
        weights: Weights = (),
        state: State = (),
        new_state: State = (),
        rng: Any = None,
    ) -> tuple[Any, tuple[Any, Any]]:
        """Reverses the layers with their gradients, the last one first."""
        values = (weights, state, new_state, keys_of(self, rng))
        return reverse_chain(self.sublayers, output, grad, *values)


def _all_cotangents(inputs: Any, grads: Any) -> Any:
    """Cotangents of all inputs, where a layer gave None for some of them."""
    inputs, grads = to_list(inputs), to_list(grads)
    return tuple(
        zero_cotangent(x) if g is None else g
        for x, g in zip(inputs, grads, strict=True)
    )

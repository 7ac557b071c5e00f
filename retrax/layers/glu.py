"""Feed-forward layers with a gate: SwiGLU, GEGLU, ReGLU and their common form.

Above `base` and `initializers`. The gate alone, without weights, is `Glu` of
`activation_fns`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gin
import jax
import jax.numpy as jnp

from retrax.layers import initializers as init
from retrax.layers.base import Layer

__all__ = ["GEGLU", "GatedFeedForward", "ReGLU", "SwiGLU"]


@gin.configurable(module="retrax.layers")
class GatedFeedForward(Layer):
    """Computes y = (activation(x W + b) * (x V + c)) U + d.

    Source: Shazeer 2020, https://arxiv.org/abs/2002.05202, equation 6, where there are
    no biases. With three matrices instead of two, take d_ff = 2/3 of that of an
    ordinary feed-forward layer for equal size.

    x: (..., d_model) float, y: (..., d_out). Weights: (W, V, U), each an array, or with
    biases ((W, b), (V, c), (U, d)).
    """

    def __init__(
        self,
        d_ff: int,
        activation_fn: Callable[[Any], Any] = jax.nn.silu,
        d_out: int | None = None,
        use_bias: bool = False,
        kernel_initializer: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        """Makes a gated feed-forward layer.

        Args:
          d_ff: size of the product in the middle.
          activation_fn: function of arrays, applied to the gate.
          d_out: size of the output; None: that of the input.
          use_bias: whether there are b, c and d; they start at 0.
          kernel_initializer: makes each matrix from (shape, rng); Glorot uniform by
            default.
          name: name of the layer.

        Raises:
          ValueError: a size is not positive.
        """
        super().__init__(name=name or f"GatedFeedForward_{d_ff}")
        if d_ff < 1 or (d_out is not None and d_out < 1):
            raise ValueError(
                f"{self.name} needs d_ff and d_out of at least 1, got d_ff={d_ff}, "
                f"d_out={d_out}."
            )
        self._d_ff = d_ff
        self._activation_fn = activation_fn
        self._d_out = d_out
        self._use_bias = use_bias
        self._kernel_initializer = kernel_initializer or init.GlorotUniformInitializer()

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes (W, V, U)."""
        if not input_signature.shape:
            raise ValueError(
                f"{self.name} needs inputs of shape (..., d_model), got a scalar."
            )
        d_model = input_signature.shape[-1]
        d_out = d_model if self._d_out is None else self._d_out
        shapes = [(d_model, self._d_ff), (d_model, self._d_ff), (self._d_ff, d_out)]
        weights = []
        for shape, rng in zip(shapes, jax.random.split(self.rng, 3), strict=True):
            w = self._kernel_initializer(shape, rng)
            weights.append((w, jnp.zeros(shape[1], w.dtype)) if self._use_bias else w)
        self.weights = tuple(weights)

    def forward(self, x: Any) -> Any:
        """Computes the gate, the product and the output."""
        gate, value, out = self.weights
        return self._dense(
            self._activation_fn(self._dense(x, gate)) * self._dense(x, value), out
        )

    def _dense(self, x: Any, weights: Any) -> Any:
        if not self._use_bias:
            return jnp.dot(x, weights)
        return jnp.dot(x, weights[0]) + weights[1]


@gin.configurable(module="retrax.layers")
def SwiGLU(d_ff: int, d_out: int | None = None, use_bias: bool = False) -> Layer:
    """Returns (silu(x W) * x V) U, silu(a) = a sigmoid(a); see `GatedFeedForward`.

    Example:
      >>> from retrax.shapes import ShapeDtype
      >>> weights, _ = SwiGLU(5).init(ShapeDtype((2, 3)))
      >>> [w.shape for w in weights]
      [(3, 5), (3, 5), (5, 3)]
    """
    return GatedFeedForward(d_ff, jax.nn.silu, d_out, use_bias, name="SwiGLU")


@gin.configurable(module="retrax.layers")
def GEGLU(d_ff: int, d_out: int | None = None, use_bias: bool = False) -> Layer:
    """Returns (gelu(x W) * x V) U, gelu exact as in `Gelu`; see `GatedFeedForward`."""
    return GatedFeedForward(d_ff, _gelu, d_out, use_bias, name="GEGLU")


@gin.configurable(module="retrax.layers")
def ReGLU(d_ff: int, d_out: int | None = None, use_bias: bool = False) -> Layer:
    """Returns (relu(x W) * x V) U; see `GatedFeedForward`."""
    return GatedFeedForward(d_ff, jax.nn.relu, d_out, use_bias, name="ReGLU")


def _gelu(x: Any) -> Any:
    return jax.nn.gelu(x, approximate=False)

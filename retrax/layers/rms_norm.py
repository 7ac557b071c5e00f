"""`RMSNorm`: normalization by the mean square alone.

Above `base`, beside `normalization`.
"""

from __future__ import annotations

from typing import Any

import gin
import jax
import jax.numpy as jnp

from retrax.layers.base import Layer

__all__ = ["RMSNorm"]


@gin.configurable(module="retrax.layers")
class RMSNorm(Layer):
    """Divides each vector along the last axis by its root mean square.

    y = x / sqrt(mean(x^2) + epsilon) * scale (Zhang and Sennrich 2019,
    https://arxiv.org/abs/1910.07467, equation 4; the epsilon is not theirs). Weights:
    scale (d,), a bare array.

    x: (..., d) float; half precision is normalized in float32 and returned as it came.

    Example:
      >>> from retrax.shapes import ShapeDtype
      >>> norm = RMSNorm()
      >>> _ = norm.init(ShapeDtype((2,)))
      >>> [round(float(v), 4) for v in norm(jnp.array([3.0, 4.0]))]  # of rms 5 / sqrt 2
      [0.8485, 1.1314]
    """

    def __init__(self, epsilon: float = 1e-6, name: str | None = None) -> None:
        """Makes a normalization.

        Args:
          epsilon: added to the mean square.
          name: name of the layer.

        Raises:
          ValueError: epsilon is negative.
        """
        super().__init__(name=name)
        if epsilon < 0:
            raise ValueError(f"epsilon must not be negative, got {epsilon}.")
        self._epsilon = epsilon

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes the scale."""
        if not input_signature.shape:
            raise ValueError("RMSNorm needs inputs of shape (..., d), got a scalar.")
        self.weights = jnp.ones(input_signature.shape[-1], jnp.float32)

    def forward(self, x: Any) -> Any:
        """Normalizes the last axis."""
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.float32
        # As in LayerNorm: without it compiled code can grow with the square of depth.
        x = jax.lax.optimization_barrier(x)
        x = x.astype(jnp.promote_types(dtype, jnp.float32))
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        y = x * jax.lax.rsqrt(mean_square + self._epsilon) * self.weights
        return y.astype(dtype)

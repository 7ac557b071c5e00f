"""Plain gradient descent: the smallest rule, and the model for writing others."""

from __future__ import annotations

from typing import Any

import gin
import jax

from retrax.optimizers.base import Optimizer, OptParams
from retrax.optimizers.norms import at_least_float32

__all__ = ["SGD"]


@gin.configurable(module="retrax.optimizers")
class SGD(Optimizer):
    """Steps against the gradient: w' = w - lr * g.

    Defaults: learning_rate 0.01 (`optax.sgd` has none). Equal to `optax.sgd(lr)`.

    Example:
      >>> import jax.numpy as jnp
      >>> opt = SGD(learning_rate=0.5)
      >>> slots, opt_params = opt.tree_init((jnp.array([1.0]),))
      >>> new_weights, slots, stats = opt.tree_update(
      ...     1, (jnp.array([2.0]),), (jnp.array([1.0]),), slots, opt_params)
      >>> new_weights[0].tolist(), slots
      ([0.0], (None,))
    """

    def init(self, weights: jax.Array) -> None:
        return None

    def update(
        self,
        step: Any,
        grads: jax.Array,
        weights: jax.Array,
        slots: None,
        opt_params: OptParams,
    ) -> tuple[jax.Array, None]:
        w, g = at_least_float32(weights), at_least_float32(grads)
        return (w - opt_params["learning_rate"] * g).astype(weights.dtype), None

"""RMSProp: steps divided by the root of the running mean square gradient."""

from __future__ import annotations

from typing import Any

import gin
import jax
import jax.numpy as jnp
import optax

from retrax.optimizers.base import Optimizer, OptParams
from retrax.optimizers.norms import at_least_float32, run_block, zeros_slot

__all__ = ["RMSProp"]


@gin.configurable(module="retrax.optimizers")
class RMSProp(Optimizer):
    """Divides each gradient by a running root mean square of itself.

    a' = gamma * a + (1 - gamma) * g^2; w' = w - lr * g / (sqrt(a') + eps)
    (Tieleman and Hinton, 2012). The average starts at ones, as in Trax, so the first
    steps are small. Equal to `optax.rmsprop(lr, decay=gamma, eps=eps,
    initial_scale=1.0, eps_in_sqrt=False)`; Optax's own defaults start at zero and put
    eps inside the root.

    Slots: a, shape of the weights, at least float32.
    """

    def __init__(
        self,
        learning_rate: float = 0.001,
        gamma: float = 0.9,
        eps: float = 1e-8,
        clip_grad_norm: float | None = None,
    ) -> None:
        """Sets the hyper-parameters.

        Args:
          learning_rate: step size (Optax: no default).
          gamma: share of the average kept per step.
          eps: added to the root, outside it.
          clip_grad_norm: largest global gradient norm.
        """
        super().__init__(
            learning_rate=learning_rate,
            clip_grad_norm=clip_grad_norm,
            gamma=gamma,
            eps=eps,
        )

    def init(self, weights: jax.Array) -> jax.Array:
        return jnp.ones_like(zeros_slot(weights))

    def update(
        self,
        step: Any,
        grads: jax.Array,
        weights: jax.Array,
        slots: jax.Array,
        opt_params: OptParams,
    ) -> tuple[jax.Array, jax.Array]:
        w, g = at_least_float32(weights), at_least_float32(grads)
        rule = optax.scale_by_rms(
            opt_params["gamma"], opt_params["eps"], eps_in_sqrt=False
        )
        direction, state = run_block(rule, g, optax.ScaleByRmsState(nu=slots))
        new_w = w - opt_params["learning_rate"] * direction
        return new_w.astype(weights.dtype), state.nu

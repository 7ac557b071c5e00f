"""Lion: the sign of a mix of momentum and gradient."""

from __future__ import annotations

from typing import Any

import gin
import jax
import jax.numpy as jnp
import optax

from retrax.optimizers.base import Optimizer, OptParams
from retrax.optimizers.norms import at_least_float32, run_block, zeros_slot

__all__ = ["Lion"]


@gin.configurable(module="retrax.optimizers")
class Lion(Optimizer):
    """Steps by the sign of a momentum (Chen et al., arXiv 2302.06675, algorithm 2).

    u = sign(b1 m + (1 - b1) g); m' = b2 m + (1 - b2) g;
    w' = w - lr * (u + weight_decay_rate * w).

    Equal to `optax.lion` with its defaults (b1 0.9, b2 0.99, weight decay 1e-3); the
    learning rate, which Optax leaves open, is 1e-4. As there, and unlike `Adam` and
    `Momentum` here, the decay is multiplied by the learning rate. Trax has no Lion.

    Slots: m, shape of the weights, at least float32.
    """

    def __init__(
        self,
        learning_rate: float = 0.0001,
        weight_decay_rate: float = 1e-3,
        b1: float = 0.9,
        b2: float = 0.99,
        clip_grad_norm: float | None = None,
    ) -> None:
        """Sets the hyper-parameters.

        Args:
          learning_rate: step size of every weight, also of the decay.
          weight_decay_rate: decay per step is learning_rate * weight_decay_rate.
          b1: share of the momentum in the step's direction.
          b2: share of the momentum kept per step.
          clip_grad_norm: largest global gradient norm.
        """
        super().__init__(
            learning_rate=learning_rate,
            clip_grad_norm=clip_grad_norm,
            weight_decay_rate=weight_decay_rate,
            b1=b1,
            b2=b2,
        )

    def init(self, weights: jax.Array) -> jax.Array:
        return zeros_slot(weights)

    def update(
        self,
        step: Any,
        grads: jax.Array,
        weights: jax.Array,
        slots: jax.Array,
        opt_params: OptParams,
    ) -> tuple[jax.Array, jax.Array]:
        w, g = at_least_float32(weights), at_least_float32(grads)
        rule = optax.scale_by_lion(opt_params["b1"], opt_params["b2"])
        state = optax.ScaleByLionState(count=jnp.asarray(step), mu=slots)
        direction, new = run_block(rule, g, state)
        direction = direction + opt_params["weight_decay_rate"] * w
        new_w = w - opt_params["learning_rate"] * direction
        return new_w.astype(weights.dtype), new.mu

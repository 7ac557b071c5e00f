"""Gradient descent with momentum, plain or Nesterov's."""

from __future__ import annotations

from typing import Any

import gin
import jax
import optax

from retrax.optimizers.base import Optimizer, OptParams
from retrax.optimizers.norms import at_least_float32, run_block, zeros_slot

__all__ = ["Momentum"]


@gin.configurable(module="retrax.optimizers")
class Momentum(Optimizer):
    """Accumulates gradients into a velocity and steps along it.

    v' = mass * v + g; u = mass * v' + g with Nesterov's form, v' without (Sutskever et
    al., 2013, as `optax.trace` has it); w' = (1 - weight_decay_rate) * w - lr * u.

    The decay is not multiplied by the learning rate (as in Trax; `optax.sgd` has no
    decay): a weight shrinks by weight_decay_rate per step, whatever the schedule says.

    Slots: v, shape of the weights, at least float32.
    """

    def __init__(
        self,
        learning_rate: float = 0.01,
        mass: float = 0.9,
        weight_decay_rate: float = 1e-5,
        nesterov: bool = True,
        clip_grad_norm: float | None = None,
    ) -> None:
        """Sets the hyper-parameters.

        Args:
          learning_rate: step size.
          mass: share of the velocity kept per step (Optax: no default).
          weight_decay_rate: share of each weight taken off per step.
          nesterov: use Nesterov's form (Optax: False).
          clip_grad_norm: largest global gradient norm (Trax has no such argument here).
        """
        super().__init__(
            learning_rate=learning_rate,
            clip_grad_norm=clip_grad_norm,
            mass=mass,
            weight_decay_rate=weight_decay_rate,
        )
        self._nesterov = nesterov

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
        rule = optax.trace(opt_params["mass"], nesterov=self._nesterov)
        direction, state = run_block(rule, g, optax.TraceState(trace=slots))
        kept = 1 - opt_params["weight_decay_rate"]
        new_w = kept * w - opt_params["learning_rate"] * direction
        return new_w.astype(weights.dtype), state.trace

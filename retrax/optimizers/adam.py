"""Adam, with Trax's or with Optax's (AdamW) kind of decoupled weight decay."""

from __future__ import annotations

from typing import Any, TypeAlias

import gin
import jax
import jax.numpy as jnp
import optax

from retrax.optimizers.base import Optimizer, OptParams
from retrax.optimizers.norms import at_least_float32, run_block, zeros_slot

__all__ = ["Adam", "AdamW"]

_Moments: TypeAlias = tuple[jax.Array, jax.Array]


class _AdamRule(Optimizer):
    """What all kinds of Adam share: parameters, moments, their direction."""

    def __init__(
        self,
        learning_rate: float,
        weight_decay_rate: float,
        b1: float,
        b2: float,
        eps: float,
        clip_grad_norm: float | None,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate,
            clip_grad_norm=clip_grad_norm,
            weight_decay_rate=weight_decay_rate,
            b1=b1,
            b2=b2,
            eps=eps,
        )

    def init(self, weights: jax.Array) -> _Moments:
        return zeros_slot(weights), zeros_slot(weights)

    def update(
        self,
        step: Any,
        grads: jax.Array,
        weights: jax.Array,
        slots: _Moments,
        opt_params: OptParams,
    ) -> tuple[jax.Array, _Moments]:
        direction, slots = _direction(step, grads, slots, opt_params)
        new_w = self._moved(at_least_float32(weights), direction, opt_params)
        return new_w.astype(weights.dtype), slots

    def _moved(self, w: jax.Array, direction: Any, opt_params: OptParams) -> Any:
        """Applies step and decay to weights of at least float32."""
        raise NotImplementedError


@gin.configurable(module="retrax.optimizers")
class Adam(_AdamRule):
    """Adam (Kingma and Ba, arXiv 1412.6980, algorithm 1) with decoupled weight decay.

    m' = b1 m + (1 - b1) g; v' = b2 v + (1 - b2) g^2;
    w' = (1 - weight_decay_rate) w - lr * m'/(1 - b1^step) / (sqrt(v'/(1 - b2^step)) +
    eps), with step = 1 in the first update.

    The decay is not multiplied by the learning rate (as in Trax; see `AdamW` for the
    other kind, and set weight_decay_rate=0 for the paper's Adam, `optax.adam`).
    Two differences: Trax's defaults are learning_rate 1e-4 and eps 1e-5 (Optax: none
    and 1e-8); and Trax corrects the first step of its Loop by b^2, here by b^1, as the
    paper and Optax do.

    Slots: (m, v), shape of the weights, at least float32.

    Example:
      >>> opt = Adam(learning_rate=0.1, weight_decay_rate=0.0, eps=0.0)
      >>> weights = {'w': jnp.array([1.0])}
      >>> slots, opt_params = opt.tree_init(weights)
      >>> new, slots, _ = opt.tree_update(
      ...     1, {'w': jnp.array([5.0])}, weights, slots, opt_params)
      >>> f"{float(new['w'][0]):.3f}"  # the first step has size lr
      '0.900'
    """

    def __init__(
        self,
        learning_rate: float = 0.0001,
        weight_decay_rate: float = 1e-5,
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-5,
        clip_grad_norm: float | None = None,
    ) -> None:
        """Sets the hyper-parameters.

        Args:
          learning_rate: step size.
          weight_decay_rate: share of each weight taken off per step.
          b1: share of the mean gradient kept per step.
          b2: share of the mean square gradient kept per step.
          eps: added to the root, outside it.
          clip_grad_norm: largest global gradient norm.
        """
        super().__init__(learning_rate, weight_decay_rate, b1, b2, eps, clip_grad_norm)

    def _moved(self, w: jax.Array, direction: Any, opt_params: OptParams) -> Any:
        kept = 1 - opt_params["weight_decay_rate"]
        return kept * w - opt_params["learning_rate"] * direction


@gin.configurable(module="retrax.optimizers")
class AdamW(_AdamRule):
    """Adam with weight decay times the learning rate (arXiv 1711.05101, algorithm 2).

    w' = w - lr * (Adam's direction + weight_decay_rate * w): equal to `optax.adamw`,
    and with its defaults (b1 0.9, b2 0.999, eps 1e-8, weight decay 1e-4); the learning
    rate, which Optax leaves open, is 1e-3. Trax has no AdamW.

    Slots: (m, v), shape of the weights, at least float32.
    """

    def __init__(
        self,
        learning_rate: float = 0.001,
        weight_decay_rate: float = 1e-4,
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-8,
        clip_grad_norm: float | None = None,
    ) -> None:
        """Sets the hyper-parameters.

        Args:
          learning_rate: step size, also of the decay.
          weight_decay_rate: decay per step is learning_rate * weight_decay_rate.
          b1: share of the mean gradient kept per step.
          b2: share of the mean square gradient kept per step.
          eps: added to the root, outside it.
          clip_grad_norm: largest global gradient norm.
        """
        super().__init__(learning_rate, weight_decay_rate, b1, b2, eps, clip_grad_norm)

    def _moved(self, w: jax.Array, direction: Any, opt_params: OptParams) -> Any:
        direction = direction + opt_params["weight_decay_rate"] * w
        return w - opt_params["learning_rate"] * direction


def _direction(
    step: Any, grads: jax.Array, slots: _Moments, opt_params: OptParams
) -> tuple[jax.Array, _Moments]:
    """Returns (bias-corrected mean over root mean square, new slots)."""
    rule = optax.scale_by_adam(opt_params["b1"], opt_params["b2"], opt_params["eps"])
    # Optax counts finished steps, we count this one.
    state = optax.ScaleByAdamState(jnp.asarray(step) - 1, slots[0], slots[1])
    direction, new = run_block(rule, at_least_float32(grads), state)
    return direction, (new.mu, new.nu)

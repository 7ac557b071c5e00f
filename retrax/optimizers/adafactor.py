"""Adafactor: Adam-like steps with the memory of a row and a column per matrix."""

from __future__ import annotations

from typing import Any, TypeAlias

import gin
import jax
import jax.numpy as jnp
import optax

from retrax.optimizers.base import Optimizer, OptParams
from retrax.optimizers.norms import at_least_float32, run_block

__all__ = ["Adafactor"]

_Slots: TypeAlias = list[jax.Array]


@gin.configurable(module="retrax.optimizers")
class Adafactor(Optimizer):
    """Adafactor (Shazeer and Stern, arXiv 1804.04235, algorithms 4 and 5).

    With b = 1 - step^-decay_rate and q = g^2 + epsilon1, arrays of two or more
    dimensions keep r' = b r + (1-b) mean(q over columns) and c' likewise over rows of
    their last two axes, and take v' = r' c' / mean(r'); others keep v' = b v + (1-b) q.
    Then u = g / sqrt(v'), u /= max(1, rms(u) / clipping_threshold),
    s = lr * max(rms(w), epsilon2) * u, and w' = (1 - weight_decay_rate) w - s, with s
    replaced by its moving average if do_momentum.

    The decay is not multiplied by the learning rate (as in Trax and Optax).
    Differences from Trax: its exponent is (step + 1), and it adds epsilon1 to r', c'
    and v' instead of to g^2; here both are as in the paper and Optax.
    Differences from `optax.adafactor`: that factors the two largest axes, and only if
    both have 128 or more entries (here, as in Trax, the last two, whatever their size);
    its defaults are epsilon 1e-30 and no weight decay. With rank 2 or less the two are
    equal for equal arguments and min_dim_size_to_factor=1.

    Slots: [r, c] or [v], and the average of s if do_momentum; at least float32.
    """

    def __init__(
        self,
        learning_rate: float = 0.05,
        factored: bool = True,
        multiply_by_parameter_scale: bool = True,
        do_clipping: bool = True,
        do_momentum: bool = False,
        momentum_in_bfloat16: bool = False,
        beta1: float = 0.0,
        decay_rate: float = 0.8,
        clipping_threshold: float | None = 1.0,
        weight_decay_rate: float = 1e-5,
        weight_decay_n_steps: int = 0,
        epsilon1: float = 1e-16,
        epsilon2: float = 1e-3,
        clip_grad_norm: float | None = None,
    ) -> None:
        """Sets the hyper-parameters.

        Args:
          learning_rate: step size, relative to the weights' root mean square if
            multiply_by_parameter_scale.
          factored: keep row and column means only, for arrays of rank 2 or more.
          multiply_by_parameter_scale: scale steps by max(rms(weights), epsilon2).
          do_clipping: limit the root mean square of each array's step.
          do_momentum: average steps; needs beta1 > 0 to have an effect.
          momentum_in_bfloat16: keep that average in bfloat16.
          beta1: share of the average step kept per step.
          decay_rate: exponent of the second-moment schedule.
          clipping_threshold: limit for do_clipping; None: no limit.
          weight_decay_rate: share of each weight taken off per step.
          weight_decay_n_steps: the decay falls linearly to 0 at this step; 0: constant.
          epsilon1: added to squared gradients.
          epsilon2: smallest scale of an array of weights.
          clip_grad_norm: largest global gradient norm (Trax has no such argument here).
        """
        super().__init__(
            learning_rate=learning_rate,
            clip_grad_norm=clip_grad_norm,
            beta1=beta1,
            decay_rate=decay_rate,
            clipping_threshold=1.0
            if clipping_threshold is None
            else clipping_threshold,
            weight_decay_rate=weight_decay_rate,
            weight_decay_n_steps=weight_decay_n_steps,
            epsilon1=epsilon1,
            epsilon2=epsilon2,
        )
        self._factored = factored
        self._multiply_by_parameter_scale = multiply_by_parameter_scale
        self._do_clipping = do_clipping and clipping_threshold is not None
        self._do_momentum = do_momentum
        self._momentum_in_bfloat16 = momentum_in_bfloat16

    def init(self, weights: jax.Array) -> _Slots:
        shape, dtype = weights.shape, jnp.promote_types(weights.dtype, jnp.float32)
        shapes = [shape]
        if self._factored and weights.ndim >= 2:
            shapes = [shape[:-1], shape[:-2] + shape[-1:]]
        slots = [jnp.zeros(s, dtype) for s in shapes]
        if self._do_momentum:
            m_dtype = jnp.bfloat16 if self._momentum_in_bfloat16 else dtype
            slots.append(jnp.zeros(shape, m_dtype))
        return slots

    def update(
        self,
        step: Any,
        grads: jax.Array,
        weights: jax.Array,
        slots: _Slots,
        opt_params: OptParams,
    ) -> tuple[jax.Array, _Slots]:
        w, g = at_least_float32(weights), at_least_float32(grads)
        move, new_slots = self._scaled(step, g, slots, opt_params)
        if self._do_clipping:
            clip = optax.clip_by_block_rms(opt_params["clipping_threshold"])
            move, _ = run_block(clip, move, clip.init(w))
        move = opt_params["learning_rate"] * move
        if self._multiply_by_parameter_scale:
            move = move * jnp.maximum(_rms(w), opt_params["epsilon2"])
        if self._do_momentum:
            beta1, old = opt_params["beta1"], slots[-1]
            move = beta1 * old.astype(w.dtype) + (1 - beta1) * move
            new_slots.append(move.astype(old.dtype))
        new_w = (1 - _weight_decay(step, opt_params)) * w - move
        return new_w.astype(weights.dtype), new_slots

    def _scaled(
        self, step: Any, g: jax.Array, slots: _Slots, opt_params: OptParams
    ) -> tuple[jax.Array, _Slots]:
        """Returns (gradient over its root mean square, [r, c] or [v])."""
        t = jnp.asarray(step, jnp.float32)
        decay = 1 - t ** -opt_params["decay_rate"]
        squares = g * g + opt_params["epsilon1"]
        if not (self._factored and g.ndim >= 2):
            v = decay * slots[0] + (1 - decay) * squares
            return g * v**-0.5, [v]
        row = decay * slots[0] + (1 - decay) * squares.mean(axis=-1)
        col = decay * slots[1] + (1 - decay) * squares.mean(axis=-2)
        row_factor = (row / row.mean(axis=-1, keepdims=True)) ** -0.5
        scaled = g * row_factor[..., :, None] * (col**-0.5)[..., None, :]
        return scaled, [row, col]


def _rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(x * x))


def _weight_decay(step: Any, opt_params: OptParams) -> jax.Array:
    rate, n = opt_params["weight_decay_rate"], opt_params["weight_decay_n_steps"]
    falling = rate * jnp.maximum(n - step, 0) / jnp.maximum(n, 1)
    return jnp.where(n < 1, rate, falling)

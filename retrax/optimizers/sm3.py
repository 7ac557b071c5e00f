"""SM3: adaptive steps with the memory of one vector per dimension."""

from __future__ import annotations

import enum
import functools
from typing import Any, TypeAlias

import gin
import jax
import jax.numpy as jnp

from retrax.optimizers.base import Optimizer, OptParams
from retrax.optimizers.norms import at_least_float32, zeros_slot

__all__ = ["SM3", "MomentumType"]

_Slots: TypeAlias = tuple[jax.Array, list[jax.Array]]


class MomentumType(enum.IntEnum):
    """How SM3 averages its steps."""

    EMA = 1
    HEAVY_BALL = 2
    NESTEROV = 3


@gin.configurable(module="retrax.optimizers")
class SM3(Optimizer):
    """SM3-II (Anil et al., arXiv 1901.11150, algorithm SM3-II).

    Every axis i of an array keeps one accumulator vector. nu is the minimum of them at
    each entry; nu' = nu + g^2 (or, with second_moment_averaging b < 1,
    b nu + (1 - b) g^2); the new accumulators are nu' maximised over the other axes.
    u = g / sqrt(nu') + weight_decay * w, 0 / sqrt(0) taken as 0. A momentum m of u
    follows, then w' = w - lr * m. The decay is thus multiplied by the learning rate, as
    in Trax.

    `optax.sm3` has EMA momentum only, no decay, adds 1e-8 inside the root (the paper
    adds nothing, nor do we) and takes no scalars. Trax rescales steps to the norm of
    the b = 1 step when b < 1; the paper and Optax do not, nor do we.

    Slots: (m, [accumulator per axis]), at least float32.
    """

    def __init__(
        self,
        learning_rate: float = 0.01,
        momentum: float = 0.9,
        second_moment_averaging: float = 1.0,
        weight_decay: float = 0.0,
        momentum_type: MomentumType | int | str = MomentumType.EMA,
        clip_grad_norm: float | None = None,
    ) -> None:
        """Sets the hyper-parameters.

        Args:
          learning_rate: step size (Optax: no default).
          momentum: share of m kept per step; 0 is no momentum.
          second_moment_averaging: 1 sums squared gradients, less averages them.
          weight_decay: added to the step as weight_decay * weights.
          momentum_type: EMA (m' = momentum m + (1 - momentum) u), HEAVY_BALL
            (m' = momentum m + u) or NESTEROV (steps by momentum m' + u); a
            `MomentumType` or its number or name.
          clip_grad_norm: largest global gradient norm (Trax has no such argument here).
        """
        super().__init__(
            learning_rate=learning_rate,
            clip_grad_norm=clip_grad_norm,
            momentum=momentum,
            second_moment_averaging=second_moment_averaging,
            weight_decay=weight_decay,
        )
        self._momentum_type = _momentum_type(momentum_type)

    def init(self, weights: jax.Array) -> _Slots:
        m = zeros_slot(weights)
        return m, [jnp.zeros(n, m.dtype) for n in weights.shape or (1,)]

    def update(
        self,
        step: Any,
        grads: jax.Array,
        weights: jax.Array,
        slots: _Slots,
        opt_params: OptParams,
    ) -> tuple[jax.Array, _Slots]:
        w, g = at_least_float32(weights), at_least_float32(grads)
        m, accumulators = slots
        b = opt_params["second_moment_averaging"]
        nu = functools.reduce(
            jnp.minimum,
            [_along(v, i, len(accumulators)) for i, v in enumerate(accumulators)],
        )
        nu = b * nu + jnp.where(b == 1, 1, 1 - b) * jnp.atleast_1d(g * g)
        safe = jnp.where(nu > 0, nu, 1)
        scale = jnp.where(nu > 0, jax.lax.rsqrt(safe), 0).reshape(g.shape)
        direction = g * scale + opt_params["weight_decay"] * w
        move, m = self._with_momentum(direction, m, opt_params["momentum"])
        new_w = w - opt_params["learning_rate"] * move
        new_accumulators = [_max_of_others(nu, i) for i in range(len(accumulators))]
        return new_w.astype(weights.dtype), (m, new_accumulators)

    def _with_momentum(
        self, direction: jax.Array, m: jax.Array, momentum: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (what to step by, new m)."""
        if self._momentum_type is MomentumType.EMA:
            m = momentum * m + (1 - momentum) * direction
            return m, m
        m = momentum * m + direction
        if self._momentum_type is MomentumType.HEAVY_BALL:
            return m, m
        return momentum * m + direction, m


def _along(v: jax.Array, axis: int, rank: int) -> jax.Array:
    return v.reshape([-1 if i == axis else 1 for i in range(rank)])


def _max_of_others(x: jax.Array, axis: int) -> jax.Array:
    # `initial` lets arrays with no entries through; accumulators are never negative.
    return x.max(axis=[i for i in range(x.ndim) if i != axis], initial=0)


def _momentum_type(value: MomentumType | int | str) -> MomentumType:
    for kind in MomentumType:
        if value == kind or value == kind.name:
            return kind
    raise ValueError(
        f"momentum_type is {value!r}; give one of "
        f"{', '.join(f'MomentumType.{kind.name}' for kind in MomentumType)}."
    )

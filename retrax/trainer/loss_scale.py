"""Loss scales: numbers that a loss is multiplied by before it is differentiated.

Gradients that are too small for float16 are then not, and are divided by the number
afterwards, in float32. All three kinds are pytrees that go through the compiled step.
Micikevicius et al. 2018 (https://arxiv.org/abs/1710.03740), section 3.2. Under `step`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from retrax import trees

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "NoLossScale",
    "StaticLossScale",
    "current_loss_scale",
    "loss_scale_context",
]

_HALF_RANGE = 2.0**64


class LossScale:
    """Base of the loss scales.

    Attributes:
      names: the attributes that hold arrays; they change in training and are saved.
    """

    names: tuple[str, ...] = ()

    def scale(self, loss: Any) -> Any:
        """Multiplies the loss."""
        return loss

    def unscale(self, grads: Any) -> Any:
        """Divides gradients of the scaled loss."""
        return grads

    def update(self, finite: Any) -> LossScale:
        """Returns the scale after a step whose gradients were finite, or not."""
        return self

    def stats(self) -> dict[str, Any]:
        """Names what a log shows."""
        return {}

    def payload(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: name -> NumPy value."""
        return {name: np.asarray(getattr(self, name)) for name in self.names}

    def restored(self, payload: dict[str, Any]) -> LossScale:
        """Returns this scale with saved values; what was not saved stays as it is."""
        own = [payload.get(n, getattr(self, n)) for n in self.names]
        leaves = [jnp.asarray(x) for x in own]
        return jax.tree.unflatten(jax.tree.structure(self), leaves)

    def tree_flatten(self) -> tuple[Any, Any]:
        """Returns (arrays, the rest), as JAX asks of a pytree."""
        static = {k: v for k, v in vars(self).items() if k not in self.names}
        return tuple(getattr(self, n) for n in self.names), tuple(static.items())

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> LossScale:
        """Undoes `tree_flatten`."""
        scale = object.__new__(cls)
        vars(scale).update(zip(cls.names, leaves, strict=True))
        vars(scale).update(static)
        return scale


@jax.tree_util.register_pytree_node_class
class NoLossScale(LossScale):
    """Leaves losses as they are."""


@jax.tree_util.register_pytree_node_class
class StaticLossScale(LossScale):
    """Multiplies losses by a number that stays.

    Args:
      loss_scale: the number, above 0.

    Raises:
      ValueError: it is not finite, or not above 0.
    """

    names = ("loss_scale",)

    def __init__(self, loss_scale: Any = 2.0**15) -> None:
        _check_scale("loss_scale", loss_scale)
        self.loss_scale = jnp.asarray(loss_scale, jnp.float32)

    def scale(self, loss: Any) -> Any:
        """Multiplies the loss."""
        return loss * self.loss_scale

    def unscale(self, grads: Any) -> Any:
        """Divides gradients of the scaled loss.

        Compilers divide by a scalar by multiplying by its reciprocal, and that of a
        scale above 2**126 is flushed to 0. So this multiplies by two reciprocals.
        """
        large = self.loss_scale > _HALF_RANGE
        first = jnp.where(large, jnp.float32(1 / _HALF_RANGE), 1.0)
        second = 1.0 / (self.loss_scale * first)
        first, second = jax.lax.optimization_barrier((first, second))
        return jax.tree.map(
            lambda g: (g * first.astype(g.dtype)) * second.astype(g.dtype), grads
        )

    def stats(self) -> dict[str, Any]:
        """Names the scale."""
        return {"loss_scale": self.loss_scale}


@jax.tree_util.register_pytree_node_class
class DynamicLossScale(StaticLossScale):
    """Doubles the scale after so many good steps, and halves it after a bad one.

    A scale whose double would be infinite is kept. The scale after a bad step is at
    least `min_scale`.

    Args:
      init: the first scale, above 0.
      growth_interval: number of good steps in a row after which the scale grows.
      factor: what it grows and shrinks by, above 1.
      min_scale: lower bound of what a bad step leaves.
      good_steps: number of good steps so far.

    Raises:
      ValueError: a number is out of its range.

    Example:
      >>> scale = DynamicLossScale(8.0, growth_interval=2)
      >>> scale = scale.update(jnp.bool_(True)).update(jnp.bool_(True))
      >>> float(scale.loss_scale), int(scale.good_steps)
      (16.0, 0)
      >>> float(scale.update(jnp.bool_(False)).loss_scale)
      8.0
    """

    names = ("loss_scale", "good_steps", "bad_steps_at_min")

    def __init__(
        self,
        init: Any = 2.0**15,
        growth_interval: int = 2000,
        factor: float = 2.0,
        min_scale: float = 1.0,
        good_steps: Any = 0,
    ) -> None:
        _check_scale("init", init)
        _check_scale("min_scale", min_scale)
        if growth_interval < 1:
            raise ValueError(
                f"growth_interval must be at least 1, got {growth_interval}."
            )
        if not factor > 1 or not math.isfinite(factor):
            raise ValueError(f"factor must be above 1, got {factor}.")
        self.loss_scale = jnp.asarray(init, jnp.float32)
        self.good_steps = jnp.asarray(good_steps, jnp.int32)
        self.bad_steps_at_min = jnp.int32(0)
        self._growth_interval = growth_interval
        self._factor, self._min_scale = factor, min_scale

    @property
    def min_scale(self) -> float:
        """Lower bound of what a bad step leaves."""
        return self._min_scale

    def update(self, finite: Any) -> DynamicLossScale:
        """Returns the scale after a step whose gradients were finite, or not."""
        old = self.loss_scale
        good = self.good_steps + 1
        is_due = good >= self._growth_interval
        larger = old * self._factor
        grown = jnp.where(is_due & jnp.isfinite(larger), larger, old)
        smaller = jnp.maximum(old / self._factor, self._min_scale)
        at_min = jnp.where(old <= self._min_scale, self.bad_steps_at_min + 1, 0)
        leaves = (
            jnp.where(finite, grown, smaller),
            jnp.where(finite & ~is_due, good, 0),
            jnp.where(finite, 0, at_min),
        )
        return jax.tree.unflatten(jax.tree.structure(self), leaves)

    def stats(self) -> dict[str, Any]:
        """Names the scale, and the steps since it last changed."""
        return {name: getattr(self, name) for name in self.names}


# --- Which scale applies while a step is traced ---------------------------------------

_CURRENT: ContextVar[LossScale] = ContextVar("retrax_loss_scale")


@contextlib.contextmanager
def loss_scale_context(scale: LossScale) -> Iterator[None]:
    """Makes `from_loss` in this block differentiate scaled losses."""
    token = _CURRENT.set(scale)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_loss_scale() -> LossScale:
    """Returns the scale that losses are to be multiplied by."""
    return _CURRENT.get(NoLossScale())


def _check_scale(name: str, value: Any) -> None:
    if trees.is_concrete(value) and not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and above 0, got {float(value)}.")

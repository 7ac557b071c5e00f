"""Layers that normalize activations by their own statistics.

Above `base` and `running`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gin
import jax
import jax.numpy as jnp

from retrax.layers.base import EMPTY_WEIGHTS, Layer
from retrax.layers.running import data_axis, row_mask

__all__ = ["BatchNorm", "FilterResponseNorm", "LayerNorm"]


@gin.configurable(module="retrax.layers", denylist=["mode"])
class BatchNorm(Layer):
    """Normalizes by mean and variance over the batch, or by their running averages.

    y = (x - mean) / sqrt(var + epsilon) * scale + bias, in mode 'train' with the
    moments over `axis` of this batch, else with running averages (Ioffe and Szegedy
    2015, https://arxiv.org/abs/1502.03167).

    x: any shape. Weights: (bias, scale), each with the sizes of x along the axes not
    in `axis`, () where there is none. State: (mean, var, n_batches); mean and var keep
    all axes, those in `axis` at size 1; n_batches is an int32 count.

    The batch is the whole batch: over all devices that share it, without rows that
    are padding (if `axis` has 0). So n devices give what one gives, where Trax
    normalizes every device's part by itself. Under gradient accumulation each
    micro-batch has moments of its own, as a smaller batch would.

    The variance is the mean squared distance from the mean. Trax takes
    E[x^2] - E[x]^2, which in float32 is wrong if the mean is large.
    """

    state_sync = "mean"

    def __init__(
        self,
        axis: int | Sequence[int] = (0, 1, 2),
        epsilon: float = 1e-5,
        center: bool = True,
        scale: bool = True,
        momentum: float = 0.999,
        mode: str = "train",
        name: str | None = None,
    ) -> None:
        """Makes a batch normalization.

        Args:
          axis: axes that are averaged over.
          epsilon: added to the variance.
          center: whether there is a trainable bias.
          scale: whether there is a trainable scale.
          momentum: share of the old running average kept at each batch.
          mode: 'train' uses and updates the batch's moments; others the averages.
          name: name of the layer.

        Raises:
          ValueError: epsilon or momentum is out of range.
        """
        super().__init__(name=name)
        if epsilon < 0:
            raise ValueError(f"epsilon must not be negative, got {epsilon}.")
        if not 0.0 <= momentum <= 1.0:
            raise ValueError(f"momentum must be in [0, 1], got {momentum}.")
        self._axis = (axis,) if isinstance(axis, int) else tuple(axis)
        self._epsilon = epsilon
        self._center = center
        self._scale = scale
        self._momentum = momentum
        self._mode = mode

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes (bias, scale) and (mean, var, n_batches)."""
        shape = input_signature.shape
        axes = self._axes(len(shape))
        moments = tuple(1 if i in axes else d for i, d in enumerate(shape))
        kept = tuple(d for i, d in enumerate(shape) if i not in axes)
        dtype = jnp.promote_types(input_signature.dtype, jnp.float32)
        self.weights = (
            jnp.zeros(kept, jnp.float32) if self._center else EMPTY_WEIGHTS,
            jnp.ones(kept, jnp.float32) if self._scale else EMPTY_WEIGHTS,
        )
        self.state = (
            jnp.zeros(moments, dtype),
            jnp.ones(moments, dtype),
            jnp.zeros((), jnp.int32),
        )

    def forward(self, x: Any) -> Any:
        """Normalizes; in mode 'train' updates the running averages."""
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.float32
        x = x.astype(jnp.promote_types(dtype, jnp.float32))
        mean, var, n_batches = self.state
        if self._mode == "train":
            batch_mean, batch_var, count = self._moments(x)
            self.state = self._updated(batch_mean, batch_var, count)
            mean, var = batch_mean, batch_var
        y = (x - mean) * jax.lax.rsqrt(var + self._epsilon)
        bias, scale = self.weights
        if self._scale:
            y = y * jnp.reshape(scale, mean.shape)
        if self._center:
            y = y + jnp.reshape(bias, mean.shape)
        return y.astype(dtype)

    def _axes(self, ndim: int) -> tuple[int, ...]:
        if any(not -ndim <= a < ndim for a in self._axis):
            raise ValueError(
                f"BatchNorm over axes {self._axis} needs inputs that have them, got "
                f"{ndim} axes; pass axis=0 for (batch, features)."
            )
        return tuple(a % ndim for a in self._axis)

    def _moments(self, x: Any) -> tuple[Any, Any, Any]:
        """Mean and variance over the batch of all devices, and how many items."""
        axes = self._axes(x.ndim)
        mask = row_mask() if 0 in axes else None
        if mask is not None and mask.shape[0] == x.shape[0]:
            mask = jnp.reshape(mask, mask.shape + (1,) * (x.ndim - 1)).astype(x.dtype)
            per_row = math.prod(x.shape[a] for a in axes if a != 0)
            count = self._over_devices(jnp.sum(mask) * per_row)
        else:
            mask = None
            count = self._over_devices(
                jnp.asarray(math.prod(x.shape[a] for a in axes), x.dtype)
            )

        def mean_of(values: Any) -> Any:
            if mask is not None:
                values = jnp.where(mask > 0, values, 0)
            total = self._over_devices(jnp.sum(values, axis=axes, keepdims=True))
            return total / jnp.maximum(count, 1)

        mean = mean_of(x)
        return mean, mean_of(jnp.square(x - mean)), count

    def _over_devices(self, x: Any) -> Any:
        axis = data_axis()
        return x if axis is None else jax.lax.psum(x, axis)

    def _updated(self, batch_mean: Any, batch_var: Any, count: Any) -> tuple[Any, ...]:
        mean, var, n_batches = self.state
        # A batch that is nothing but padding leaves everything as it was.
        keep = jnp.where(count > 0, self._momentum, 1.0).astype(mean.dtype)
        stop = jax.lax.stop_gradient
        return (
            keep * mean + (1 - keep) * stop(batch_mean).astype(mean.dtype),
            keep * var + (1 - keep) * stop(batch_var).astype(var.dtype),
            n_batches + (count > 0).astype(n_batches.dtype),
        )


@gin.configurable(module="retrax.layers")
class LayerNorm(Layer):
    """Normalizes each vector along the last axis to mean 0 and variance 1.

    y = (x - mean) / sqrt(var + epsilon) * scale + bias (Ba et al. 2016,
    https://arxiv.org/abs/1607.06450, equation 4). Weights: (scale, bias). With
    center=False nothing is subtracted, var is the mean square, and the bias, still
    there, is not used.

    x: (..., d) float; half precision is normalized in float32 and returned as it came.
    The error is a few roundings of y, however far the mean is from 0: for vectors of
    mean 1000 and deviation 1 it is below 2e-6 in float32.
    """

    def __init__(
        self, center: bool = True, epsilon: float = 1e-6, name: str | None = None
    ) -> None:
        """Makes a layer normalization.

        Args:
          center: whether the mean is subtracted and the bias added.
          epsilon: added to the variance.
          name: name of the layer.
        """
        super().__init__(name=name)
        self._center = center
        self._epsilon = epsilon

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes (scale, bias)."""
        if not input_signature.shape:
            raise ValueError("LayerNorm needs inputs of shape (..., d), got a scalar.")
        d = input_signature.shape[-1]
        self.weights = (jnp.ones(d, jnp.float32), jnp.zeros(d, jnp.float32))

    def forward(self, x: Any) -> Any:
        """Normalizes the last axis."""
        scale, bias = self.weights
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.float32
        # Without the barrier XLA may compute all layers below once more for each use of
        # x: compiled code then grows with the square of depth (JAX 0.10, on the CPU).
        x = jax.lax.optimization_barrier(x)
        x = x.astype(jnp.promote_types(dtype, jnp.float32))
        if not self._center:
            var = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
            y = x * jax.lax.rsqrt(var + self._epsilon) * scale
            return y.astype(dtype)
        # Differences from any element of the vector keep their digits where the mean is
        # large, and the result is the same for every choice: it has no gradient.
        x = x - jax.lax.stop_gradient(x[..., :1])
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        var = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        y = x * jax.lax.rsqrt(var + self._epsilon)
        return (y * scale + bias).astype(dtype)


@gin.configurable(module="retrax.layers", denylist=["mode"])
class FilterResponseNorm(Layer):
    """Normalizes each channel of each example by its mean square over space.

    y = scale * x / sqrt(nu2 + epsilon) + bias, nu2 being the mean of x^2 over all axes
    but the first and last (Singh and Krishnan 2019, https://arxiv.org/abs/1911.09737,
    equation 1). Usually followed by `ThresholdedLinearUnit`.

    x: (batch, ..., channels) float. Weights: (scale, bias, (learnt,)), the last one ()
    if epsilon is fixed; else epsilon = init_epsilon + |learnt|.
    """

    def __init__(
        self,
        mode: str | None = None,
        learn_epsilon: bool = False,
        init_epsilon: float = 1e-6,
        init_learnt_epsilon: float = 1e-4,
        name: str | None = None,
    ) -> None:
        """Makes a filter response normalization.

        Args:
          mode: not used; all modes are alike.
          learn_epsilon: whether epsilon is trained.
          init_epsilon: epsilon, or its least value if trained.
          init_learnt_epsilon: initial value of its trained part.
          name: name of the layer.

        Raises:
          ValueError: an epsilon is not positive.
        """
        super().__init__(name=name)
        del mode
        if init_epsilon <= 0 or init_learnt_epsilon <= 0:
            raise ValueError(
                f"init_epsilon ({init_epsilon}) and init_learnt_epsilon "
                f"({init_learnt_epsilon}) must be positive."
            )
        self._learn_epsilon = learn_epsilon
        self._init_epsilon = init_epsilon
        self._init_learnt_epsilon = init_learnt_epsilon

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes (scale, bias, learnt part of epsilon)."""
        if len(input_signature.shape) < 3:
            raise ValueError(
                "FilterResponseNorm needs inputs of shape (batch, ..., channels) with "
                f"an axis between, got {input_signature.shape}."
            )
        d = input_signature.shape[-1]
        learnt: Any = EMPTY_WEIGHTS
        if self._learn_epsilon:
            learnt = (jnp.asarray(self._init_learnt_epsilon, jnp.float32),)
        self.weights = (jnp.ones(d, jnp.float32), jnp.zeros(d, jnp.float32), learnt)

    def forward(self, x: Any) -> Any:
        """Normalizes by the mean square over space."""
        scale, bias, learnt = self.weights
        dtype = x.dtype
        x = x.astype(jnp.promote_types(dtype, jnp.float32))
        epsilon: Any = self._init_epsilon
        if learnt:
            epsilon = epsilon + jnp.abs(learnt[0])
        nu2 = jnp.mean(jnp.square(x), axis=tuple(range(1, x.ndim - 1)), keepdims=True)
        return (scale * x * jax.lax.rsqrt(nu2 + epsilon) + bias).astype(dtype)

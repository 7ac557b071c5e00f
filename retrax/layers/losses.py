"""Losses: weighted means whose gradient trains a model.

Above `weighted`, whose protocol of weights they keep. Inputs come as (model_output,
targets) or (model_output, targets, weights); values are computed in float32 at least.
"""

from __future__ import annotations

from typing import Any

import gin
import jax
import jax.numpy as jnp

from retrax.layers.weighted import (
    WeightedMean,
    at_least_float32,
    check_categories,
    check_same_shape,
    fit_weights,
    weighted_mean,
)

__all__ = [
    "BinaryCrossEntropy",
    "CategoryCrossEntropy",
    "L2Loss",
    "SmoothL1Loss",
    "WeightedCategoryCrossEntropy",
    "category_cross_entropy",
    "weighted_category_cross_entropy",
]


@gin.configurable(module="retrax.layers")
class CategoryCrossEntropy(WeightedMean):
    """Computes the mean cross-entropy of targets under the softmax of logits.

    Inputs: logits (..., n_categories) float, targets (...) int. With smoothing s the
    target distribution is (1 - s) one_hot + s / n_categories (Szegedy et al. 2015,
    https://arxiv.org/abs/1512.00567, section 7). A target outside of [0, n_categories)
    is no category: its one_hot is all zeros, as in Trax.

    Example:
      >>> loss = CategoryCrossEntropy()
      >>> round(float(loss((jnp.zeros((2, 4)), jnp.array([0, 3])))), 4)  # log 4
      1.3863
    """

    n_inputs = 2

    def __init__(
        self, label_smoothing: float | None = None, name: str | None = None
    ) -> None:
        """Makes the loss.

        Raises:
          ValueError: label_smoothing is not in [0, 1].
        """
        super().__init__(name)
        self._label_smoothing = _checked_smoothing(label_smoothing)

    def per_example(self, inputs: Any) -> tuple[Any, Any]:
        """Returns the cross-entropies."""
        model_output, targets = inputs
        return _cross_entropies(model_output, targets, self._label_smoothing, 0.0), None


@gin.configurable(module="retrax.layers")
class WeightedCategoryCrossEntropy(WeightedMean):
    """Computes the weighted mean cross-entropy under the softmax of logits.

    Inputs: logits (..., n_categories) float, targets (...) int, weights (...).
    Values as in `CategoryCrossEntropy`; with a cutoff c they become max(value, c) - c,
    so that targets predicted well enough have no gradient.
    """

    def __init__(
        self,
        label_smoothing: float | None = None,
        cutoff: float = 0.0,
        name: str | None = None,
    ) -> None:
        """Makes the loss.

        Raises:
          ValueError: label_smoothing is not in [0, 1] or cutoff is negative.
        """
        super().__init__(name)
        if cutoff < 0:
            raise ValueError(f"cutoff must not be negative, got {cutoff}.")
        self._label_smoothing = _checked_smoothing(label_smoothing)
        self._cutoff = cutoff

    def per_example(self, inputs: Any) -> tuple[Any, Any]:
        """Returns (cross-entropies, weights)."""
        model_output, targets, weights = inputs
        values = _cross_entropies(
            model_output, targets, self._label_smoothing, self._cutoff
        )
        return values, weights


class BinaryCrossEntropy(WeightedMean):
    """Computes the mean binary cross-entropy of targets under the sigmoid of logits.

    Inputs: logits (...) float, targets (...) in [0, 1]. Computed from the logits, so it
    stays finite where the sigmoid rounds to 0 or 1 (Trax's does not).
    """

    n_inputs = 2

    def per_example(self, inputs: Any) -> tuple[Any, Any]:
        """Returns the cross-entropies."""
        model_output, targets = inputs
        check_same_shape("targets", targets, "the outputs", model_output)
        x = at_least_float32(model_output)
        return jax.nn.softplus(x) - x * targets.astype(x.dtype), None


@gin.configurable(module="retrax.layers")
class L2Loss(WeightedMean):
    """Computes the weighted mean of squared differences.

    Inputs: outputs, targets and weights, all of the same shape.
    """

    def per_example(self, inputs: Any) -> tuple[Any, Any]:
        """Returns (squared differences, weights)."""
        difference, weights = _difference(inputs)
        return jnp.square(difference), weights


class SmoothL1Loss(WeightedMean):
    """Computes the weighted mean of d^2 / 2 where |d| < 1, |d| - 1/2 elsewhere.

    Inputs: outputs, targets and weights, all of the same shape; d is the difference.
    Source: Girshick 2015, https://arxiv.org/abs/1504.08083, equation 3.
    """

    def per_example(self, inputs: Any) -> tuple[Any, Any]:
        """Returns (smoothed distances, weights)."""
        difference, weights = _difference(inputs)
        distance = jnp.abs(difference)
        small = jnp.minimum(distance, 1.0)
        return 0.5 * jnp.square(small) + (distance - small), weights


# --- Functions of arrays ------------------------------------------------------------


def category_cross_entropy(
    model_output: Any, targets: Any, label_smoothing: float | None = None
) -> Any:
    """Returns the mean cross-entropy of integer targets under softmax of logits."""
    smoothing = _checked_smoothing(label_smoothing)
    return jnp.mean(_cross_entropies(model_output, targets, smoothing, 0.0))


def weighted_category_cross_entropy(
    model_output: Any,
    targets: Any,
    weights: Any,
    label_smoothing: float | None = None,
    cutoff: float = 0.0,
) -> Any:
    """Returns the weighted mean cross-entropy of integer targets; 0 without weight."""
    smoothing = _checked_smoothing(label_smoothing)
    values = _cross_entropies(model_output, targets, smoothing, cutoff)
    return weighted_mean(values, fit_weights(weights, values))[0]


# --- Helpers ------------------------------------------------------------------------


def _checked_smoothing(label_smoothing: float | None) -> float:
    smoothing = 0.0 if label_smoothing is None else label_smoothing
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}.")
    return smoothing


def _cross_entropies(
    model_output: Any, targets: Any, smoothing: float, cutoff: float
) -> Any:
    check_categories(model_output, targets)
    x = at_least_float32(model_output)
    # Shifted scores: exact differences, where score - logsumexp would cancel.
    x = x - jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    log_sum = jnp.log(jnp.sum(jnp.exp(x), axis=-1))
    is_category = (targets >= 0) & (targets < x.shape[-1])
    index = jnp.clip(targets, 0, x.shape[-1] - 1)[..., None]
    at_target = jnp.take_along_axis(x, index, axis=-1, mode="clip")[..., 0]
    values = (1.0 - smoothing) * jnp.where(is_category, log_sum - at_target, 0.0)
    if smoothing:
        values = values + smoothing * (log_sum - jnp.mean(x, axis=-1))
    if cutoff:
        values = jnp.maximum(values, cutoff) - cutoff
    return values


def _difference(inputs: Any) -> tuple[Any, Any]:
    model_output, targets, weights = inputs
    check_same_shape("targets", targets, "the outputs", model_output)
    return at_least_float32(model_output) - at_least_float32(targets), weights

"""Losses and metrics under Trax's older names, as public code still calls them.

Above `weighted` and `functions`. All take (model_output, targets, weights) but
`WeightedSum`, which takes (values, weights). Sums (`...Sum`) emit no weight, and rows
that are padding do not count in them.
"""

from __future__ import annotations

from typing import Any

import gin
import jax.numpy as jnp

from retrax.layers.base import Layer
from retrax.layers.combinators import Serial
from retrax.layers.functions import ArgMax, LogSoftmax
from retrax.layers.weighted import (
    WeightedMean,
    at_least_float32,
    check_categories,
    check_same_shape,
    fit_weights,
    mask_rows,
)

__all__ = [
    "Accuracy",
    "BinaryCrossEntropyLoss",
    "BinaryCrossEntropySum",
    "CrossEntropyLoss",
    "CrossEntropyLossWithLogSoftmax",
    "CrossEntropySum",
    "SequenceAccuracy",
    "WeightedSum",
]


def Accuracy(classifier: Layer | None = None) -> Layer:
    """Makes a metric: the weighted share of classifier(output) equal to the target.

    Args:
      classifier: layer from outputs to categories; `ArgMax()` by default,
        `ThresholdToBinary()` for one probability each.
    """
    return Serial(
        classifier or ArgMax(), _Accuracy(), name="Accuracy", sublayers_to_print=[]
    )


@gin.configurable(module="retrax.layers")
def SequenceAccuracy(classifier: Layer | None = None) -> Layer:
    """Makes a metric: the share of sequences right at all positions that have weight.

    Args:
      classifier: layer from outputs to categories (batch, ...); `ArgMax()` by default.
        All axes but the first belong to the sequence.
    """
    return Serial(
        classifier or ArgMax(),
        _SequenceAccuracy(),
        name="SequenceAccuracy",
        sublayers_to_print=[],
    )


class CrossEntropyLoss(WeightedMean):
    """Computes the weighted mean of -log p(target) from log-probabilities.

    Inputs: log-probabilities (..., n_categories), as `LogSoftmax` gives them; targets
    (...) int; weights (...). For logits there is `WeightedCategoryCrossEntropy`.
    """

    def per_example(self, inputs: Any) -> tuple[Any, Any]:
        """Returns (cross-entropies, weights)."""
        model_output, targets, weights = inputs
        return _negative_log_p(model_output, targets), weights


@gin.configurable(module="retrax.layers")
def CrossEntropyLossWithLogSoftmax() -> Layer:
    """Makes `LogSoftmax` followed by `CrossEntropyLoss`."""
    return Serial(
        LogSoftmax(),
        CrossEntropyLoss(),
        name="CrossEntropyLossWithLogSoftmax",
        sublayers_to_print=[],
    )


class BinaryCrossEntropyLoss(WeightedMean):
    """Computes the weighted mean binary cross-entropy from probabilities.

    Inputs: probabilities, targets in [0, 1] and weights, all of the same shape.
    Probabilities are kept 1e-7 away from 0 and 1. Trax's ignores the weights and takes
    one column only; where its result makes sense (equal weights) ours is the same. For
    logits there is `BinaryCrossEntropy`.
    """

    def per_example(self, inputs: Any) -> tuple[Any, Any]:
        """Returns (cross-entropies, weights)."""
        model_output, targets, weights = inputs
        return _binary_cross_entropies(model_output, targets), weights


class WeightedSum(Layer):
    """Computes sum(values * weights)."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(n_in=2, name=name)

    def forward(self, inputs: Any) -> Any:
        """Sums over all elements."""
        values, weights = inputs
        return _sum(values, weights)


class CrossEntropySum(Layer):
    """Computes the weighted sum of -log p(target) from log-probabilities."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(n_in=3, name=name)

    def forward(self, inputs: Any) -> Any:
        """Sums over all elements."""
        model_output, targets, weights = inputs
        return _sum(_negative_log_p(model_output, targets), weights)


class BinaryCrossEntropySum(Layer):
    """Computes the weighted sum of binary cross-entropies from probabilities."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(n_in=3, name=name)

    def forward(self, inputs: Any) -> Any:
        """Sums over all elements."""
        model_output, targets, weights = inputs
        return _sum(_binary_cross_entropies(model_output, targets), weights)


# --- Helpers ------------------------------------------------------------------------


class _Accuracy(WeightedMean):
    def per_example(self, inputs: Any) -> tuple[Any, Any]:
        predictions, targets, weights = inputs
        check_same_shape("targets", targets, "the predictions", predictions)
        return predictions == targets, weights


class _SequenceAccuracy(WeightedMean):
    def per_example(self, inputs: Any) -> tuple[Any, Any]:
        predictions, targets, weights = inputs
        check_same_shape("targets", targets, "the predictions", predictions)
        check_same_shape("weights", weights, "the targets", targets)
        right = (predictions == targets) | (weights == 0)
        return jnp.all(right, axis=tuple(range(1, right.ndim))), None


def _negative_log_p(log_p: Any, targets: Any) -> Any:
    """-log p(target); 0 for a target that is no category, as in Trax."""
    check_categories(log_p, targets)
    log_p = at_least_float32(log_p)
    is_category = (targets >= 0) & (targets < log_p.shape[-1])
    index = jnp.clip(targets, 0, log_p.shape[-1] - 1)[..., None]
    at_target = jnp.take_along_axis(log_p, index, axis=-1, mode="clip")[..., 0]
    return jnp.where(is_category, -at_target, 0.0)


def _binary_cross_entropies(probabilities: Any, targets: Any) -> Any:
    check_same_shape("targets", targets, "the outputs", probabilities)
    p = jnp.clip(at_least_float32(probabilities), 1e-7, 1 - 1e-7)
    t = targets.astype(p.dtype)
    return -(t * jnp.log(p) + (1 - t) * jnp.log1p(-p))


def _sum(values: Any, weights: Any) -> Any:
    values = at_least_float32(values)
    weights, _ = mask_rows(fit_weights(weights, values))
    return jnp.sum(jnp.where(weights == 0, 0, values * weights))

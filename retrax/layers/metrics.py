"""Metrics: what says how good a model is, without training it.

Above `weighted`, whose protocol of weights they keep (F-scores are no means and emit
no weight). Inputs come as (model_output, targets) or (model_output, targets, weights),
with scores over categories along the last axis of the output and integer targets.
"""

from __future__ import annotations

from typing import Any

import gin
import jax.numpy as jnp

from retrax.layers.base import Layer
from retrax.layers.weighted import (
    WeightedMean,
    check_categories,
    check_same_shape,
    fit_weights,
    mask_rows,
    weighted_mean,
)

__all__ = [
    "CategoryAccuracy",
    "MacroAveragedFScore",
    "MaskedSequenceAccuracy",
    "WeightedCategoryAccuracy",
    "WeightedFScore",
    "category_accuracy",
    "weighted_category_accuracy",
]


class CategoryAccuracy(WeightedMean):
    """Computes the share of targets that have the highest score.

    Inputs: scores (..., n_categories), targets (...) int.
    """

    n_inputs = 2

    def per_example(self, inputs: Any) -> tuple[Any, Any]:
        """Returns 1 for a hit, 0 for a miss."""
        return _hits(*inputs), None


@gin.configurable(module="retrax.layers")
class WeightedCategoryAccuracy(WeightedMean):
    """Computes the weighted share of targets that have the highest score.

    Inputs: scores (..., n_categories), targets (...) int, weights (...).
    """

    def per_example(self, inputs: Any) -> tuple[Any, Any]:
        """Returns (1 for a hit, 0 for a miss; weights)."""
        model_output, targets, weights = inputs
        return _hits(model_output, targets), weights


class MaskedSequenceAccuracy(WeightedMean):
    """Computes the share of sequences right at all positions that have weight.

    Inputs: scores (..., length, n_categories), targets (..., length) int, weights of
    the same shape as the targets; only whether they are 0 matters. A sequence without
    any weight counts as right, as in Trax.
    """

    def per_example(self, inputs: Any) -> tuple[Any, Any]:
        """Returns 1 for a sequence that is right, else 0."""
        model_output, targets, weights = inputs
        hits = _hits(model_output, targets)
        check_same_shape("weights", weights, "the targets", targets)
        return jnp.all((hits == 1) | (weights == 0), axis=-1), None


class _FScore(Layer):
    """Base of F-scores; subclasses say how those of the categories are combined."""

    def __init__(
        self,
        beta: float = 1.0,
        initial_category_index: int = 0,
        name: str | None = None,
    ) -> None:
        """Makes the metric.

        Args:
          beta: how much more recall counts than precision.
          initial_category_index: categories before it are left out.
          name: name of the layer.
        """
        super().__init__(n_in=2, name=name)
        self._beta = beta
        self._initial_category_index = initial_category_index

    def forward(self, inputs: Any) -> Any:
        """Counts hits, predictions and targets of each category and combines."""
        model_output, targets = inputs
        check_categories(model_output, targets)
        first, n = self._initial_category_index, model_output.shape[-1]
        if not 0 <= first < n:
            raise ValueError(
                f"initial_category_index {first} leaves none of {n} categories."
            )
        categories = jnp.arange(first, n)
        counted = mask_rows(jnp.ones(targets.shape, jnp.float32))[0].reshape(-1, 1)
        predictions = jnp.argmax(model_output, axis=-1).reshape(-1, 1)
        is_predicted = (predictions == categories) * counted
        is_target = (targets.reshape(-1, 1) == categories) * counted
        n_hits = jnp.sum(is_predicted * is_target, axis=0)
        n_predicted = jnp.sum(is_predicted, axis=0)
        n_targets = jnp.sum(is_target, axis=0)
        # (1 + b^2) P R / (b^2 P + R) with P and R written out: no 0 / 0 but the last.
        b2 = self._beta**2
        below = b2 * n_targets + n_predicted
        scores = (1 + b2) * n_hits / jnp.where(below == 0, 1, below)
        return self._combine(scores, n_targets)

    def _combine(self, scores: Any, n_targets: Any) -> Any:
        raise NotImplementedError


@gin.configurable(module="retrax.layers")
class MacroAveragedFScore(_FScore):
    """Computes the mean over categories of F = (1 + b^2) P R / (b^2 P + R).

    Inputs: scores (..., n_categories), targets (...) int. P is precision, R recall of
    one category against all others; F is 0 for a category without hits.
    """

    def _combine(self, scores: Any, n_targets: Any) -> Any:
        return jnp.mean(scores)


@gin.configurable(module="retrax.layers")
class WeightedFScore(_FScore):
    """Computes the mean F of `MacroAveragedFScore`, weighted by numbers of targets.

    It is 0 if no target is of a category that counts.
    """

    def _combine(self, scores: Any, n_targets: Any) -> Any:
        return weighted_mean(scores, n_targets)[0]


# --- Functions of arrays ------------------------------------------------------------


def category_accuracy(model_output: Any, targets: Any) -> Any:
    """Returns the share of integer targets that have the highest score."""
    return jnp.mean(_hits(model_output, targets))


def weighted_category_accuracy(model_output: Any, targets: Any, weights: Any) -> Any:
    """Returns the weighted share of integer targets with the highest score."""
    hits = _hits(model_output, targets)
    return weighted_mean(hits, fit_weights(weights, hits))[0]


def _hits(model_output: Any, targets: Any) -> Any:
    check_categories(model_output, targets)
    return (jnp.argmax(model_output, axis=-1) == targets).astype(jnp.float32)

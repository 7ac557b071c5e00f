"""What losses and metrics share: checks, the weighted mean, and its weight.

Above `base` and `running`; under `losses`, `metrics` and `legacy_metrics`.

The protocol of weights. A loss or metric that is a weighted mean over elements derives
from `WeightedMean`. Its output is sum(v w) / sum(w), and while it runs it *emits*
('weight', sum(w)), a float32 scalar. Whoever runs it through `Layer.apply` over parts
of a batch (devices, micro-batches, batches of an evaluation) gets the value for the
whole from sum(output * weight) / sum(weight), exactly. Means without weights have a
weight of 1 for each element. Rows that `row_mask()` marks as padding have weight 0.

What emits no weight is no weighted mean: sums, F-scores, and means whose leading axis
is not that of the row mask while there is one. Parts of those can only be averaged.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from retrax.layers.base import Layer
from retrax.layers.running import emit, row_mask

__all__ = [
    "WeightedMean",
    "at_least_float32",
    "check_categories",
    "check_same_shape",
    "fit_weights",
    "mask_rows",
    "weighted_mean",
]


class WeightedMean(Layer):
    """Base of losses and metrics that are weighted means of values of elements.

    Subclasses write `per_example` and set the class attribute `n_inputs`.
    """

    n_inputs = 3

    def __init__(self, name: str | None = None) -> None:
        super().__init__(n_in=self.n_inputs, name=name)

    def per_example(self, inputs: Any) -> tuple[Any, Any]:
        """Returns (values, weights); weights None means 1 for every value."""
        raise NotImplementedError(f"{type(self).__name__} does not define per_example.")

    def forward(self, inputs: Any) -> Any:
        """Computes the weighted mean and emits its weight.

        The mean of nothing (a total weight of 0) is 0, and so is its gradient.
        """
        values, weights = self.per_example(inputs)
        values = at_least_float32(values)
        if weights is None and row_mask() is None and values.size:
            # A weight that is the same for every batch is a number, not an array: an
            # output of the step more would cost more than a small model's step.
            emit("weight", np.float32(values.size))
            return jnp.mean(values)
        weights = fit_weights(weights, values)
        weights, masked = mask_rows(weights)
        mean, total = weighted_mean(values, weights)
        if masked:
            emit("weight", total.astype(jnp.float32))
        return mean


def weighted_mean(values: Any, weights: Any) -> tuple[Any, Any]:
    """Returns (sum(v w) / sum(w), sum(w)); the mean is 0 if the weights sum to 0."""
    total = jnp.sum(weights)
    # Values without weight may be infinite or NaN, and must not count even so.
    weighted = jnp.sum(jnp.where(weights == 0, 0, values * weights))
    is_empty = total == 0
    return jnp.where(is_empty, 0, weighted / jnp.where(is_empty, 1, total)), total


def mask_rows(weights: Any) -> tuple[Any, bool]:
    """Gives weight 0 to rows that are padding; False if rows cannot be told."""
    mask = row_mask()
    if mask is None:
        return weights, True
    if weights.ndim == 0 or weights.shape[0] != mask.shape[0]:
        return weights, False
    mask = jnp.reshape(mask, mask.shape + (1,) * (weights.ndim - 1))
    return weights * mask.astype(weights.dtype), True


def at_least_float32(x: Any) -> Any:
    """Returns x in float32, or in float64 if it is that."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def check_categories(model_output: Any, targets: Any) -> None:
    """Checks that targets are integers, one for each row of scores.

    Raises:
      TypeError: the targets are not integers.
      ValueError: their shape is not that of the outputs without the last axis.
    """
    wanted = tuple(model_output.shape[:-1])
    if tuple(targets.shape) != wanted:
        shape = tuple(targets.shape)
        if shape == (*wanted, 1):
            fix = "drop the last axis: np.squeeze(targets, -1)"
        elif shape == tuple(model_output.shape):
            fix = "turn one-hot targets into integers: np.argmax(targets, -1)"
        else:
            fix = "the last axis of the outputs holds one score for each category"
        raise ValueError(
            f"targets have shape {shape} but the outputs {tuple(model_output.shape)} "
            f"ask for {wanted}; {fix}."
        )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(
            f"targets must be integers (categories), got {targets.dtype}; convert them "
            "in the data: targets.astype('int32')."
        )


def check_same_shape(what_a: str, a: Any, what_b: str, b: Any) -> None:
    """Raises ValueError unless two arrays have the same shape."""
    if tuple(a.shape) != tuple(b.shape):
        raise ValueError(
            f"{what_a} have shape {tuple(a.shape)} but {what_b} {tuple(b.shape)}; they "
            "must be the same (squeeze or expand one of them)."
        )


def fit_weights(weights: Any, values: Any) -> Any:
    """Broadcasts weights to the values, so that their sum counts elements.

    Raises:
      ValueError: they are no scalar and differ in rank or size.
    """
    if weights is None:
        return jnp.ones(values.shape, values.dtype)
    shape, wanted = tuple(weights.shape), tuple(values.shape)
    fits = len(shape) == len(wanted) and all(
        a in (1, b) for a, b in zip(shape, wanted, strict=True)
    )
    # NumPy would also take (n,) for (n, n), along the wrong axis.
    if shape and not fits:
        fix = "give one weight for each target"
        if shape == wanted[: len(shape)]:
            axes = ", None" * (len(wanted) - len(shape))
            fix = f"for one weight each along the first axes pass weights[...{axes}]"
        raise ValueError(
            f"weights have shape {shape} but the targets ask for {wanted}; {fix}."
        )
    return jnp.broadcast_to(at_least_float32(weights), wanted)

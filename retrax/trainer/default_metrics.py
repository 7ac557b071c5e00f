"""The metrics reported when nobody chose any."""

from __future__ import annotations

from retrax.layers import metrics as tm
from retrax.layers.base import Layer

__all__ = ["default_metrics"]


def default_metrics(loss_fn: Layer) -> dict[str, Layer]:
    """Returns the loss, and accuracies if it is a cross-entropy over categories.

    Args:
      loss_fn: the loss layer; one of three inputs has weighted metrics beside it.
    """
    metrics: dict[str, Layer] = {"loss": loss_fn}
    if "CategoryCrossEntropy" not in loss_fn.name:
        return metrics
    if loss_fn.n_in == 3:
        metrics["accuracy"] = tm.WeightedCategoryAccuracy()
        metrics["sequence_accuracy"] = tm.MaskedSequenceAccuracy()
    else:
        metrics["accuracy"] = tm.CategoryAccuracy()
    return metrics

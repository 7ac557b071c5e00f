"""The metrics reported when nobody chose any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrax.layers import metrics as tm
from retrax.layers.base import Layer

__all__ = ["default_metrics", "target_rank"]


def default_metrics(loss_fn: Layer, target_rank: int = 1) -> dict[str, Layer]:
    """Returns the loss, and accuracies if it is a cross-entropy over categories.

    Args:
      loss_fn: the loss layer; one of three inputs has weighted metrics beside it.
      target_rank: number of axes of the targets, the batch included; from 2 on they
        are sequences, of which the share that is right as a whole is measured, too.
    """
    metrics: dict[str, Layer] = {"loss": loss_fn}
    if "CategoryCrossEntropy" not in loss_fn.name:
        return metrics
    if loss_fn.n_in == 3:
        metrics["accuracy"] = tm.WeightedCategoryAccuracy()
        if target_rank > 1:
            metrics["sequence_accuracy"] = tm.MaskedSequenceAccuracy()
    else:
        metrics["accuracy"] = tm.CategoryAccuracy()
    return metrics


def target_rank(signature: Sequence[Any]) -> int:
    """Number of axes of the targets, part 1 of a batch, given all parts' signatures."""
    return len(signature[1].shape) if len(signature) > 1 else 1

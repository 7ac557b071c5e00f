"""Initial weights of a model with its loss, for Trainer and Loop."""

from __future__ import annotations

import os
from typing import Any

import jax

from retrax.layers.base import Layer
from retrax.trainer import hosts

__all__ = ["init_model"]


def init_model(
    model_with_loss: Layer,
    signature: tuple[Any, ...],
    rng: Any,
    init_checkpoint: str | os.PathLike[str] | None = None,
    keep: bool = False,
) -> None:
    """Initialises Serial(model, loss) for batches of a signature.

    Several processes all get the values of the first.

    Args:
      model_with_loss: the model and its loss.
      signature: of the parts of a batch.
      rng: key for random weights.
      init_checkpoint: file to take the model's weights from.
      keep: leave a model as it is that has weights or state already.
    """
    model = model_with_loss.sublayers[0]
    held = (model.weights, model.state) if keep else ((), ())
    model_with_loss.init(signature[0] if len(signature) == 1 else signature, rng=rng)
    if jax.tree.leaves(held):
        model.weights, model.state = held
    if init_checkpoint is not None:
        path = os.fspath(init_checkpoint)

        def read() -> bytes:
            model.init_from_file(path, weights_only=True)
            return b""

        hosts.from_first(read)
    if hosts.count() > 1:
        whole = hosts.share_weights((model_with_loss.weights, model_with_loss.state))
        model_with_loss.weights, model_with_loss.state = whole

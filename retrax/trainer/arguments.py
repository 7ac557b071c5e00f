"""What trainers are given, checked and made; each mistake says how to mend it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from retrax.data.inputs import Inputs
from retrax.errors import ConfigError, DataError
from retrax.layers.base import Layer
from retrax.optimizers.base import Optimizer
from retrax.trainer import hosts

__all__ = [
    "check_arity",
    "check_clipping",
    "check_count",
    "check_metric_name",
    "check_schedule",
    "made_inputs",
    "made_model",
    "made_optimizer",
    "stream_of",
]


def made_model(model: Any, mode: str) -> Layer:
    """Returns the layer that a function of `mode` makes."""
    if isinstance(model, Layer) or not callable(model):
        raise TypeError(
            "model must be a function of mode that makes a layer, such as "
            f"lambda mode: Serial(...), got {model!r}."
        )
    made = model(mode=mode)
    if not isinstance(made, Layer):
        raise TypeError(f"model(mode={mode!r}) must return a layer, got {made!r}.")
    return made


def made_optimizer(optimizer: Any) -> Optimizer:
    """Returns an optimizer given itself, or a class or function that makes it."""
    made = optimizer if isinstance(optimizer, Optimizer) else None
    if made is None and callable(optimizer):
        made = optimizer()
    if not isinstance(made, Optimizer):
        raise TypeError(
            "optimizer must be an Optimizer, or a class or function that makes one, "
            f"got {optimizer!r}."
        )
    return made


def made_inputs(inputs: Any) -> Inputs:
    """Returns Inputs given themselves, or a function that makes them."""
    made = inputs() if callable(inputs) else inputs
    if not isinstance(made, Inputs):
        raise TypeError(f"inputs must be data.Inputs, got {made!r}.")
    return made


def stream_of(inputs: Inputs, kind: str, n_devices: int) -> Any:
    """Makes a stream of the inputs, of our share if several processes train.

    Args:
      inputs: the streams; their methods need know of shares only where there are any.
      kind: 'train_stream', 'eval_stream' or 'train_eval_stream'.
      n_devices: number of devices, of all processes.
    """
    share = (hosts.shard(),) if hosts.count() > 1 else ()
    return getattr(inputs, kind)(n_devices, *share)


def check_arity(model_with_loss: Layer, n_parts: int) -> None:
    """Sees that batches have as many parts as the model with its loss takes.

    Raises:
      DataError: they have not; names the loss, the numbers and the fix.
    """
    n_in = model_with_loss.n_in
    if n_parts == n_in:
        return
    model, loss = model_with_loss.sublayers
    hint = ""
    if n_parts == n_in - 1 and loss.n_in == 3:
        hint = (
            " The third input is a weight for each example: add it to the batches "
            "(data.AddLossWeights), or use a loss without weights."
        )
    elif n_parts > n_in:
        hint = " Use a loss with weights, or drop the rest in the data."
    raise DataError(
        f"batches have {n_parts} parts, but the model (n_in={model.n_in}) with the "
        f"loss {loss!r} takes {n_in}.{hint}"
    )


def check_metric_name(argument: str, name: str | None, metrics: Iterable[str]) -> None:
    """Raises ConfigError unless `name` is None or one of the metrics."""
    if name is not None and name not in metrics:
        raise ConfigError(
            f"{argument}={name!r} is no metric of this run; there are: "
            f"{', '.join(sorted(metrics))}."
        )


def check_schedule(argument: str, schedule: Any) -> Callable[[int], Any]:
    """Returns a learning-rate schedule if it is a function; raises TypeError if not."""
    if not callable(schedule):
        raise TypeError(
            f"{argument} must be a function of the step, got {schedule!r}; for a "
            "constant rate: lambda step: 0.01."
        )
    return schedule


def check_count(argument: str, value: Any, least: int = 0) -> int:
    """Returns a whole number of at least `least` as an int.

    Raises:
      TypeError: it is no whole number.
      ConfigError: it is less.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{argument} must be a whole number, got {value!r}.")
    number = operator.index(value)
    if number < least:
        raise ConfigError(f"{argument} must be at least {least}, got {number}.")
    return number


_GLOBAL_NORMS = (None, "two_pass", "per_layer")


def check_clipping(optimizer: Any, global_norm: str | None) -> None:
    """Checks that an optimizer for single layers clips in a way that is said.

    Raises:
      TypeError: it is no optimizer.
      ConfigError: global_norm is unknown, or missing where the optimizer clips.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer_fn must make an Optimizer, it made {optimizer!r}.")
    if global_norm not in _GLOBAL_NORMS:
        raise ConfigError(
            f"global_norm must be one of {_GLOBAL_NORMS}, got {global_norm!r}."
        )
    limit = optimizer.clip_grad_norm
    if limit and global_norm is None:
        raise ConfigError(
            f"the optimizer clips gradients by their global norm ({limit}), but "
            "layers are updated before all gradients are there. "
            "global_norm='two_pass' goes through the backward pass twice and clips "
            "exactly; 'per_layer' clips each layer by its own norm; or take an "
            "optimizer without clip_grad_norm."
        )

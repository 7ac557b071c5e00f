"""`TrainTask` and `EvalTask`: data with what is to be done on it.

Under `training`, whose Loop runs them. A task holds no model.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gin
from absl import logging

from retrax.data.checks import checked
from retrax.data.sources import as_stream
from retrax.data.streams import Batch, Stream
from retrax.errors import ConfigError, DataError
from retrax.layers.base import Layer
from retrax.optimizers.base import Optimizer
from retrax.trainer.arguments import check_count, check_schedule, made_optimizer

__all__ = ["EvalTask", "TrainTask"]

_MANY = 1000  # Batches of a bare iterator held in memory that are worth a warning.


@gin.configurable(module="retrax.supervised.training")
class TrainTask:
    """Data to train on, the loss, and the optimizer with its learning rates.

    Example:
      >>> from retrax import data, layers as tl, optimizers
      >>> task = TrainTask(data.digits(batch_size=8).train_stream(),
      ...                  tl.CategoryCrossEntropy(), optimizers.Adam(1e-3))
      >>> task.loss_name, task.learning_rate(1)
      ('CategoryCrossEntropy', 0.0010000000474974513)
    """

    def __init__(
        self,
        labeled_data: Any,
        loss_layer: Layer,
        optimizer: Optimizer | Callable[..., Optimizer],
        lr_schedule: Callable[[int], float] | None = None,
        n_steps_per_checkpoint: int = 100,
        n_steps_per_permanent_checkpoint: int | None = None,
        loss_name: str | None = None,
        sample_batch: Any = None,
        export_prefix: str | None = None,
    ) -> None:
        """Makes a task.

        Args:
          labeled_data: batches: an iterator, a function that returns one, a `Stream`,
            or whatever `data.as_stream` takes. The batch looked at here for its shapes
            is the first one trained on.
          loss_layer: from the model's outputs and the rest of a batch to one number.
          optimizer: an optimizer, or a class or function that makes one.
          lr_schedule: learning rate per step as a function of the step, from 1; by
            default the optimizer's own rate.
          n_steps_per_checkpoint: steps between checkpoints and evaluations of a Loop
            whose first task this is.
          n_steps_per_permanent_checkpoint: steps between checkpoints that are kept for
            good; None keeps none.
          loss_name: name in logs and history; by default the loss layer's.
          sample_batch: a batch with the shapes of the data; by default its first.
          export_prefix: name of the task and of its folder of logs.

        Raises:
          TypeError, ConfigError: an argument cannot work; says which and why.
          DataError: there is no batch.
        """
        self._labeled_data = labeled_data
        if not isinstance(loss_layer, Layer):
            raise TypeError(
                f"loss_layer must be a loss layer, got {loss_layer!r}."
                + _instance_hint(loss_layer)
            )
        self._loss_layer = loss_layer
        self._optimizer = made_optimizer(optimizer)
        if lr_schedule is not None:
            check_schedule("lr_schedule", lr_schedule)
        self._lr_schedule = lr_schedule
        self._n_steps_per_checkpoint = check_count(
            "n_steps_per_checkpoint", n_steps_per_checkpoint, least=1
        )
        if n_steps_per_permanent_checkpoint is not None:
            check_count(
                "n_steps_per_permanent_checkpoint",
                n_steps_per_permanent_checkpoint,
                least=1,
            )
        self._n_steps_per_permanent_checkpoint = n_steps_per_permanent_checkpoint
        self._loss_name = loss_name or loss_layer.name
        self._export_prefix = _checked_prefix(export_prefix)
        self._stream, self._sample_batch = _opened(
            labeled_data, sample_batch, "training"
        )

    @property
    def labeled_data(self) -> Stream:
        """The batches, as a stream that begins with the first one."""
        return self._stream

    @property
    def sample_batch(self) -> Any:
        """A batch with the shapes of the data."""
        return self._sample_batch

    @property
    def loss_layer(self) -> Layer:
        """The loss layer."""
        return self._loss_layer

    @property
    def loss_name(self) -> str:
        """Name of the loss in logs and history."""
        return self._loss_name

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        return self._optimizer

    @property
    def lr_schedule(self) -> Callable[[int], float] | None:
        """Learning rate per step as a function of the step; None: the optimizer's."""
        return self._lr_schedule

    @property
    def n_steps_per_checkpoint(self) -> int:
        """Steps between checkpoints and evaluations."""
        return self._n_steps_per_checkpoint

    @property
    def n_steps_per_permanent_checkpoint(self) -> int | None:
        """Steps between checkpoints that are kept for good."""
        return self._n_steps_per_permanent_checkpoint

    @property
    def export_prefix(self) -> str | None:
        """Name of the task."""
        return self._export_prefix

    def next_batch(self) -> Batch:
        """Returns the next batch; a Loop that trains on this task will not see it."""
        return next(self._stream)

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate at a step, counted from 1."""
        if self._lr_schedule is not None:
            return self._lr_schedule(step)
        return float(self._optimizer.opt_params["learning_rate"])


@gin.configurable(module="retrax.supervised.training")
class EvalTask:
    """Data to evaluate on, with metrics.

    Each evaluation sees the same batches: data that can begin again is read from its
    start. A bare iterator cannot, so the batches that one evaluation needs are read
    once and kept in memory.
    """

    def __init__(
        self,
        labeled_data: Any,
        metrics: Sequence[Layer] | Layer,
        metric_names: Sequence[str] | None = None,
        n_eval_batches: int | None = 1,
        sample_batch: Any = None,
        export_prefix: str | None = None,
    ) -> None:
        """Makes a task.

        Args:
          labeled_data: batches, as of `TrainTask`.
          metrics: metric layers, from the model's outputs and the rest of a batch to
            one number.
          metric_names: names in logs and history; by default those of the layers.
          n_eval_batches: batches in one evaluation, fewer if the data has fewer; None
            takes the whole of a finite set, each example once.
          sample_batch: a batch with the shapes of the data; by default its first.
          export_prefix: name of the task and of its folder of logs.

        Raises:
          TypeError, ConfigError: an argument cannot work; says which and why.
          DataError: there is no batch.
        """
        self._labeled_data = labeled_data
        self._metrics = _checked_metrics(metrics)
        self._metric_names = _checked_names(self._metrics, metric_names)
        if n_eval_batches is not None:
            check_count("n_eval_batches", n_eval_batches, least=1)
        self._n_eval_batches = n_eval_batches
        self._export_prefix = _checked_prefix(export_prefix)
        self._stream, self._sample_batch = _opened(
            labeled_data, sample_batch, "evaluation"
        )
        if n_eval_batches is None and self._stream.is_endless:
            raise ConfigError(
                "n_eval_batches=None takes the whole evaluation data, but it never "
                "ends: give a number of batches, or a finite pass such as "
                "ArrayStream(..., shuffle=False, repeat=False)."
            )
        self._kept: list[Batch] | None = None

    @property
    def labeled_data(self) -> Stream:
        """The batches, as a stream that begins with the first one."""
        return self._stream

    @property
    def sample_batch(self) -> Any:
        """A batch with the shapes of the data."""
        return self._sample_batch

    @property
    def metrics(self) -> list[Layer]:
        """The metric layers."""
        return self._metrics

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics in logs and history."""
        return self._metric_names

    @property
    def n_eval_batches(self) -> int | None:
        """Batches in one evaluation; None is all."""
        return self._n_eval_batches

    @property
    def export_prefix(self) -> str | None:
        """Name of the task."""
        return self._export_prefix

    def next_batch(self) -> Batch:
        """Returns the next batch; evaluations begin at the start all the same."""
        return next(self._stream)

    def batches(self) -> Iterator[Batch]:
        """Returns the batches of one evaluation, the same ones each time."""
        if self._kept is None:
            try:
                stream = checked(self._stream.fresh(), same_shapes=False)
            except TypeError:  # A bare iterator, which has one run only.
                self._kept = list(self._first_batches())
            else:
                return itertools.islice(stream, self._n_eval_batches)
        return iter(self._kept)

    def _first_batches(self) -> Iterator[Batch]:
        stream = checked(self._stream, same_shapes=False)
        for i, batch in enumerate(itertools.islice(stream, self._n_eval_batches)):
            if i == _MANY:
                logging.warning(
                    "An evaluation keeps more than %d batches of an iterator in memory;"
                    " data that can begin again, such as a function that returns an "
                    "iterator, is read anew instead.",
                    _MANY,
                )
            yield batch


def _opened(source: Any, sample: Any, what: str) -> tuple[Stream, Any]:
    try:
        stream = as_stream(source)
    except TypeError as e:
        raise TypeError(f"labeled_data: {e}") from e
    except ValueError as e:
        raise DataError(f"the {what} data is empty: {e}") from e
    if sample is not None:
        return stream, sample
    try:
        return stream, stream.peek()
    except StopIteration:
        raise DataError(
            f"the {what} data holds no batch: is its source empty, or read to its end "
            "already?"
        ) from None


def _checked_metrics(metrics: Any) -> list[Layer]:
    if isinstance(metrics, Layer):
        return [metrics]
    if isinstance(metrics, (str, Mapping)) or not isinstance(metrics, Iterable):
        raise TypeError(
            f"metrics must be a list of metric layers, got {metrics!r}."
            + _instance_hint(metrics)
        )
    found = list(metrics)
    for metric in found:
        if not isinstance(metric, Layer):
            raise TypeError(
                f"a metric must be a layer, got {metric!r}." + _instance_hint(metric)
            )
    if not found:
        raise ConfigError("metrics is empty: an EvalTask needs at least one.")
    return found


def _checked_names(metrics: list[Layer], names: Any) -> list[str]:
    if names is None:
        names = [metric.name for metric in metrics]
    names = [names] if isinstance(names, str) else list(names)
    if len(names) != len(metrics):
        raise ConfigError(
            f"there are {len(metrics)} metrics ({', '.join(m.name for m in metrics)}) "
            f"but {len(names)} metric_names ({', '.join(map(str, names))}); give a "
            "name for each."
        )
    if len(set(names)) != len(names):
        raise ConfigError(
            f"metric names must differ, got {', '.join(names)}; give metric_names."
        )
    return names


def _checked_prefix(prefix: Any) -> str | None:
    if prefix is None or re.fullmatch(r"[\w-][\w.-]*", str(prefix)):
        return prefix
    raise ConfigError(
        f"export_prefix must be a folder name such as 'copy_task', got {prefix!r}."
    )


def _instance_hint(x: Any) -> str:
    if isinstance(x, type) or (callable(x) and not isinstance(x, Layer)):
        name = getattr(x, "__name__", "it")
        return f" Make an instance: {name}()."
    return ""

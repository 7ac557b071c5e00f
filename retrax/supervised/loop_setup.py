"""What a Loop is given, checked and named; each mistake says how to mend it.

Under `training`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax

from retrax import trees
from retrax.errors import ConfigError, DataError
from retrax.layers.base import Layer
from retrax.shapes import signature
from retrax.supervised.tasks import EvalTask, TrainTask
from retrax.trainer.callback import Callback

__all__ = [
    "check_metrics_fit",
    "checked_model",
    "eval_task_list",
    "init_eval_model",
    "labels",
    "metric_labels",
    "train_task_list",
]


def train_task_list(tasks: Any) -> list[TrainTask]:
    """Returns training tasks given one or several."""
    found = _task_list("tasks", tasks, TrainTask)
    if not found:
        raise ConfigError("tasks is empty: a Loop needs at least one TrainTask.")
    return found


def eval_task_list(eval_tasks: Any, eval_task: Any) -> list[EvalTask]:
    """Returns evaluation tasks given one or several, or by their old name."""
    if eval_task is not None:
        if eval_tasks is not None:
            raise ConfigError("give eval_tasks or eval_task, its old name, not both.")
        return _task_list("eval_task", eval_task, EvalTask)
    if isinstance(eval_tasks, (list, tuple)):
        eval_tasks = [task for task in eval_tasks if task is not None]
    return [] if eval_tasks is None else _task_list("eval_tasks", eval_tasks, EvalTask)


def checked_model(argument: str, model: Any) -> Layer:
    """Returns a model if it is a layer; raises TypeError if not."""
    if isinstance(model, Layer):
        return model
    hint = ""
    if callable(model):
        hint = " Call it: Loop takes the model that it makes, such as Model('train')."
    raise TypeError(f"{argument} must be a layer, got {model!r}.{hint}")


def labels(tasks: Sequence[Any]) -> list[str]:
    """Returns a name for each task, '' for a single one."""
    if len(tasks) == 1:
        return [""]
    names = [task.export_prefix or str(i) for i, task in enumerate(tasks)]
    if len(set(names)) != len(names):
        raise ConfigError(f"tasks need different export_prefixes, got {names}.")
    return names


def metric_labels(tasks: Sequence[Any], names: list[list[str]]) -> list[list[str]]:
    """Returns names of metrics in the history: those of a task with a name after it.

    So are those that several tasks have.
    """
    everywhere = list(itertools.chain(*names))
    found = []
    for task, label, own in zip(tasks, labels(tasks), names, strict=True):
        found.append(
            [
                f"{label}/{name}"
                if label and (task.export_prefix or everywhere.count(name) > 1)
                else name
                for name in own
            ]
        )
    return found


def check_metrics_fit(model: Layer, task: EvalTask) -> None:
    """Raises DataError if a metric takes more than model and batch leave for it."""
    n_parts = len(task.sample_batch)
    n_left = n_parts - model.n_in + model.n_out
    for name, metric in zip(task.metric_names, task.metrics, strict=True):
        if metric.n_in > n_left or n_parts < model.n_in:
            raise DataError(
                f"metric {name!r} ({metric!r}) takes {metric.n_in} inputs, but of a "
                f"batch of {n_parts} parts the model (n_in={model.n_in}, "
                f"n_out={model.n_out}) leaves {n_left}: does the batch lack example "
                "weights (data.AddLossWeights)?"
            )


def init_eval_model(eval_model: Layer, model: Layer, batch: tuple[Any, ...]) -> None:
    """Initialises an evaluation model and sees that the model's weights fit it.

    Raises:
      ConfigError: they do not; names the first difference.
    """
    if not jax.tree.leaves((eval_model.weights, eval_model.state)):
        parts = tuple(map(signature, batch[: max(eval_model.n_in, 1)]))
        sig = parts[0] if eval_model.n_in == 1 else parts
        eval_model.init(sig, rng=jax.random.key(0))
    for what in ("weights", "state"):
        wrong = trees.difference(getattr(model, what), getattr(eval_model, what))
        if wrong:
            raise ConfigError(
                f"eval_model has not the {what} of the model: {wrong}. Make both by "
                "one function, with mode='train' and mode='eval'."
            )


def _task_list(argument: str, tasks: Any, kind: type) -> list[Any]:
    found = list(tasks) if isinstance(tasks, (list, tuple)) else [tasks]
    made_by = "labeled_data, loss_layer, optimizer"
    if kind is EvalTask:
        made_by = "labeled_data, metrics"
    for task in found:
        if not isinstance(task, kind):
            hint = f"make one: {kind.__name__}({made_by})"
            if isinstance(task, (TrainTask, EvalTask)):
                hint = f"this one is no {kind.__name__}"
            elif isinstance(task, (Callback, type)) or callable(task):
                hint += ", or call what makes it"
            raise TypeError(
                f"{argument} must be a {kind.__name__} or a list of them, got "
                f"{task!r:.200}; {hint}."
            )
    return found

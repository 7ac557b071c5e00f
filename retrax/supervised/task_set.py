"""`TaskSet`: the training tasks of a Loop, each with its step trainer and its data.

Under `training`. Here is what there is once for each task: names, batches, counts of
steps, losses since the last report, and all that goes into a checkpoint of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from retrax.data.checks import checked
from retrax.errors import CheckpointError, ConfigError
from retrax.layers.base import Layer
from retrax.layers.combinators import Serial
from retrax.optimizers.base import Optimizer
from retrax.shapes import signature
from retrax.supervised.loop_setup import labels, metric_labels
from retrax.supervised.tasks import TrainTask
from retrax.trainer import state as run_state
from retrax.trainer.arguments import check_arity
from retrax.trainer.init_model import init_model
from retrax.trainer.resume import next_batch, restore_stream

__all__ = ["LossMean", "TaskSet"]


class LossMean:
    """The mean of losses, which are read from the device long after they were made.

    The sum is made in the order of the steps, in float64, so that a mean that goes on
    after a restart has the same bits.
    """

    _MOST_WAITING = 512

    def __init__(self, total: float = 0.0, n: int = 0) -> None:
        self._total, self._n = total, n
        self._waiting: list[Any] = []

    def add(self, loss: Any) -> None:
        """Takes a loss, a scalar that may still be computed."""
        self._waiting.append(loss)
        if len(self._waiting) >= self._MOST_WAITING:
            self._read(self._MOST_WAITING // 2)

    def state(self) -> tuple[float, int]:
        """Returns (sum, number) of the losses so far."""
        self._read(len(self._waiting))
        return self._total, self._n

    def _read(self, n: int) -> None:
        for loss in jax.device_get(self._waiting[:n]):
            self._total += float(loss)
        self._n += n
        del self._waiting[:n]


class TaskSet:
    """Several training tasks on one model; one of them is current.

    Attributes:
      tasks: the tasks.
      index: number of the current task.
      modes: for each task, where its log goes.
      trainers: for each task, what makes its steps.
      streams: for each task, its batches.
      n_done: for each task, its number of steps.
    """

    def __init__(self, tasks: Sequence[TrainTask], which_task: Any) -> None:
        """Makes a set.

        Args:
          tasks: at least one.
          which_task: number of the task to train in a step, a function of the step; by
            default step % number of tasks.
        """
        if which_task is not None and not callable(which_task):
            raise TypeError(
                f"which_task must be a function of the step, got {which_task!r}."
            )
        n = len(tasks)
        self.tasks, self.index = list(tasks), 0
        self._which_task: Callable[[int], Any] = which_task or (lambda step: step % n)
        self._labels = labels(tasks)
        self.modes = [os.path.join(name, "train") for name in self._labels]
        names = metric_labels(tasks, [[task.loss_name] for task in tasks])
        self._loss_names = [name for (name,) in names]
        self.trainers: list[Any] = []
        self.streams = [checked(t.labeled_data, same_shapes=False) for t in tasks]
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forgets steps and losses."""
        self.n_done = [0] * len(self.tasks)
        self.forget_losses()

    def forget_losses(self) -> None:
        """Begins new means of the losses."""
        self._losses = [LossMean() for _ in self.tasks]

    def init(self, model: Layer, rng: Any, init_checkpoint: Any = None) -> None:
        """Initialises model and losses; a model that has weights keeps them."""
        self._with_losses = [Serial(model, task.loss_layer) for task in self.tasks]
        for whole, task in zip(self._with_losses, self.tasks, strict=True):
            batch = tuple(task.sample_batch)
            check_arity(whole, len(batch))
            parts = tuple(map(signature, batch))
            init_model(whole, parts, rng, init_checkpoint, keep=True)
            init_checkpoint = None

    def make_trainers(self, make: Callable[[Layer, Optimizer], Any]) -> None:
        """Makes what makes the steps of each task."""
        self.trainers = [
            make(whole, task.optimizer)
            for whole, task in zip(self._with_losses, self.tasks, strict=True)
        ]

    @property
    def trainer(self) -> Any:
        """What makes the steps of the current task."""
        return self.trainers[self.index]

    @property
    def mode(self) -> str:
        """Where the log of the current task goes."""
        return self.modes[self.index]

    @property
    def data_name(self) -> str:
        """How messages call the data of the current task."""
        return self._data_name(self.index)

    def _data_name(self, i: int) -> str:
        of_task = f" of task {self._labels[i]!r}" if self._labels[i] else ""
        return f"the training data{of_task}"

    def choose(self, step: int) -> None:
        """Makes the task of a step the current one.

        Raises:
          ConfigError: which_task returned no task's number.
        """
        n = len(self.tasks)
        i: Any = self._which_task(step)
        if not hasattr(i, "__index__") or isinstance(i, bool) or not 0 <= i < n:
            raise ConfigError(
                f"which_task({step}) returned {i!r}; it must be the number of one of "
                f"the {n} tasks, 0 to {n - 1}."
            )
        self.index = int(i)

    def next_batch(self, step: int) -> tuple[Any, ...] | None:
        """Returns the current task's batch for a step; None if its data has ended."""
        return next_batch(self.streams[self.index], step, self.data_name)

    def one_step(
        self, batch: tuple[Any, ...], rng: Any, rate: float | None
    ) -> dict[str, Any]:
        """Makes a step of the current task; returns its values on the device."""
        i = self.index
        rng = rng if i == 0 else jax.random.fold_in(rng, i)
        loss, stats = self.trainer.one_step(batch, rng, self.n_done[i] + 1, rate)
        self.n_done[i] += 1
        self._losses[i].add(loss)
        return stats

    def mean_losses(self) -> list[tuple[str, str, str, float]]:
        """Returns (mode, name, name in the history, mean loss) of tasks with steps."""
        found = []
        for i, (task, mean) in enumerate(zip(self.tasks, self._losses, strict=True)):
            total, n = mean.state()
            if n:
                name = self._loss_names[i]
                found.append((self.modes[i], task.loss_name, name, total / n))
        return found

    def payload(self) -> dict[str, Any]:
        """The part of a checkpoint that belongs to the tasks, the model's included."""
        parts = []
        for i, trainer in enumerate(self.trainers):
            part = run_state.step_trainer_payload(trainer, on_host=False)
            if i:  # The model is saved once, with the first task.
                part = {k: v for k, v in part.items() if k not in ("weights", "state")}
            parts.append({**part, "data": self.streams[i].state()})
        first = tuple(map(signature, self.tasks[0].sample_batch))
        return {
            **parts[0],
            "tasks": parts[1:],
            "loop": {
                "steps": list(self.n_done),
                "losses": [mean.state() for mean in self._losses],
            },
            "input_signature": run_state.pack_signature(first),
            "layers": str(self._with_losses[0]),
        }

    def restore(
        self, payload: dict[str, Any], resume_data: str, say: Callable[[str], None]
    ) -> None:
        """Puts back what `payload` returned, or a Trainer has saved.

        Raises:
          CheckpointError: it is of other tasks or of another model.
        """
        parts = [payload, *payload.get("tasks", ())]
        if len(parts) != len(self.tasks):
            raise CheckpointError(
                f"it was saved with {len(parts)} training tasks, this loop has "
                f"{len(self.tasks)}."
            )
        for trainer, part in zip(self.trainers, parts, strict=True):
            run_state.restore_step_trainer(trainer, {**payload, **part})
        for i, part in enumerate(parts):
            name = self._data_name(i)
            restore_stream(self.streams[i], part["data"], resume_data, say, name)
        own = payload.get("loop", {"steps": [payload["step"]], "losses": [(0.0, 0)]})
        self.n_done = list(own["steps"])
        self._losses = [LossMean(*pair) for pair in own["losses"]]

    def close(self) -> None:
        """Closes the data."""
        for stream in self.streams:
            stream.close()

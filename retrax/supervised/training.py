"""`Loop`: one model, one or several tasks, from the first batch to the last checkpoint.

It joins a TaskSet (step trainers and data), evaluators and a Session, as
`trainer.Trainer` does; names and meaning are those of Trax's `training.Loop`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gin
import jax

from retrax.errors import ConfigError
from retrax.layers.base import Layer
from retrax.optimizers.base import Optimizer
from retrax.supervised import loop_setup
from retrax.supervised.task_set import TaskSet
from retrax.supervised.tasks import EvalTask, TrainTask
from retrax.trainer.arguments import check_count, check_metric_name
from retrax.trainer.callback import CallbackList
from retrax.trainer.checkpoint_policy import CheckpointPolicy
from retrax.trainer.checkpointer import Checkpointer
from retrax.trainer.epochs import at_steps
from retrax.trainer.evaluator import Evaluator
from retrax.trainer.has_session import HasSession
from retrax.trainer.interrupts import Interrupts
from retrax.trainer.precision import Policy, step_options_with
from retrax.trainer.resume import check_resume_data
from retrax.trainer.reversible_trainer import ReversibleSerialTrainer
from retrax.trainer.run_log import RunLog
from retrax.trainer.session import Session
from retrax.trainer.sharding import Sharding
from retrax.trainer.state import CHECKPOINT_NAME
from retrax.trainer.step_trainer import StepTrainer

__all__ = ["EvalTask", "Loop", "TrainTask"]

_OWN_KEYS = 0x6E657772  # Folded into the run's key for `new_rng`: 'newr' in ASCII.


@gin.configurable(module="retrax.supervised.training")
class Loop(HasSession):
    """Trains a model on tasks, evaluates and saves it.

    Example:
      >>> from retrax import data, layers as tl, optimizers
      >>> inputs = data.digits(batch_size=32)
      >>> model = tl.Serial(tl.Flatten(), tl.Dense(10))
      >>> loop = Loop(
      ...     model,
      ...     TrainTask(inputs.train_stream(), tl.CategoryCrossEntropy(),
      ...               optimizers.Adam(1e-2)),
      ...     eval_tasks=EvalTask(inputs.eval_stream(), [tl.CategoryAccuracy()],
      ...                         n_eval_batches=None),
      ...     eval_at=lambda step: False, n_devices=1)
      >>> loop.run(20)
      >>> loop.step
      20

    Points to override:
      train_step(batch): one update of the task that is due.
      make_step_trainer(model_with_loss, optimizer): how updates are made.
      run_evals(): what is measured.
    """

    def __init__(
        self,
        model: Layer,
        tasks: TrainTask | list[TrainTask],
        eval_model: Layer | None = None,
        eval_tasks: EvalTask | list[EvalTask] | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        checkpoint_at: Any = None,
        checkpoint_low_metric: str | None = None,
        checkpoint_high_metric: str | None = None,
        permanent_checkpoint_at: Any = None,
        eval_at: Any = None,
        which_task: Callable[[int], int] | None = None,
        n_devices: int | None = None,
        random_seed: int | None = None,
        loss_chunk_size: int = 0,
        use_memory_efficient_trainer: bool | int = False,
        adasum: bool = False,
        callbacks: Any = None,
        *,
        eval_task: EvalTask | list[EvalTask] | None = None,
        init_checkpoint: str | os.PathLike[str] | None = None,
        resume_data: str = "replay",
        precision: str | Policy | None = None,
        sharding: str | Sharding | None = None,
        step_options: Mapping[str, Any] | None = None,
        checkpoint_policy: CheckpointPolicy | None = None,
        log_every: int = 50,
        log: RunLog | None = None,
    ) -> None:
        """Makes a loop, and goes on where a checkpoint in output_dir ends.

        `checkpoint_at`, `permanent_checkpoint_at` and `eval_at` are functions of the
        step, or a number n for step 1 and every n-th, or lists of steps.

        Args:
          model: any layer, from the first parts of a batch to the loss layers' inputs;
            one that has weights already keeps them.
          tasks: what to train on.
          eval_model: the same model in mode 'eval'; by default `model` itself, with its
            dropout. It gets the weights of `model` after every `run`.
          eval_tasks: what to evaluate on.
          output_dir: directory for checkpoints and logs; None writes nothing.
          checkpoint_at: when to save; by default every `n_steps_per_checkpoint` of the
            first task. The last step of a run is always saved.
          checkpoint_low_metric: metric whose lowest value is kept as a checkpoint.
          checkpoint_high_metric: metric whose highest value is kept as a checkpoint.
          permanent_checkpoint_at: when to keep a checkpoint for good; by default every
            `n_steps_per_permanent_checkpoint` of the first task, if it has any.
          eval_at: when to evaluate; by default as often as checkpoints are written.
          which_task: number of the task to train in a step; by default step % number of
            tasks. Tasks share weights and state of the model; each has an optimizer of
            its own that counts its own steps.
          n_devices: number of devices; None means all.
          random_seed: where all keys come from; None is 0, so that runs repeat.
          loss_chunk_size: tokens for which the loss is computed at once; 0 is all.
          use_memory_efficient_trainer: train layer by layer, see
            `ReversibleSerialTrainer`; 2 also leaves nothing on the device in between.
          adasum: combine the gradients of several devices by Adasum.
          callbacks: `Callback` objects, or functions (classes) of the loop that make
            them, as in Trax.
          eval_task: an older name of eval_tasks.
          init_checkpoint: checkpoint of another run to take the weights from.
          resume_data: what a resumed run does with data from a plain generator, which
            cannot say where it is: 'replay' reads up to its place, 'restart' begins
            anew, 'error' refuses.
          precision: 'float32', 'mixed_bfloat16', 'mixed_float16', or a `Policy`; also
            for evaluation.
          sharding: 'fsdp' or a `Sharding`: how weights, slots and gradients are cut
            over several devices; by default they are whole on each.
          step_options: more arguments for `StepTrainer`.
          checkpoint_policy: when to save beside all that, and what to keep.
          log_every: number of steps between two entries on training in the log.
          log: where to report; by default a new RunLog.

        Raises:
          ConfigError, TypeError, DataError: an argument cannot work; says which, why.
          CheckpointError: the checkpoint in output_dir belongs to another model.
        """
        self._model = loop_setup.checked_model("model", model)
        self._tasks = TaskSet(loop_setup.train_task_list(tasks), which_task)
        self._eval_tasks = loop_setup.eval_task_list(eval_tasks, eval_task)
        self._eval_model = self._model
        if eval_model is not None:
            self._eval_model = loop_setup.checked_model("eval_model", eval_model)
        first = self._tasks.tasks[0]
        every, kept = (
            first.n_steps_per_checkpoint,
            first.n_steps_per_permanent_checkpoint,
        )
        self._checkpoint_at = at_steps("checkpoint_at", checkpoint_at, every)
        self._kept_at = at_steps(
            "permanent_checkpoint_at", permanent_checkpoint_at, kept
        )
        self._eval_at = at_steps("eval_at", eval_at, every)
        self._loss_chunk_size = check_count("loss_chunk_size", loss_chunk_size)
        self._use_memory_efficient_trainer = use_memory_efficient_trainer
        self._resume_data = check_resume_data(resume_data)
        for task in self._eval_tasks:
            loop_setup.check_metrics_fit(self._eval_model, task)

        folder = None if output_dir is None else Path(output_dir).expanduser()
        self._session = session = Session(
            self, folder, random_seed, log, log_every=log_every
        )
        _, rng = jax.random.split(session.seed_rng)
        self._tasks.init(self._model, rng, init_checkpoint)
        options = {"n_devices": n_devices, "adasum": adasum}
        options |= step_options_with(
            step_options, precision=precision, sharding=sharding
        )
        self._tasks.make_trainers(
            lambda whole, optimizer: self.make_step_trainer(whole, optimizer, **options)
        )
        self._make_evaluators(options.get("precision"))
        session.callbacks = CallbackList(callbacks, session)
        names = session.callbacks.metric_names(sum(self._metric_names, []))
        check_metric_name("checkpoint_low_metric", checkpoint_low_metric, names)
        check_metric_name("checkpoint_high_metric", checkpoint_high_metric, names)
        session.checkpointer = Checkpointer(
            folder,
            highest=checkpoint_high_metric,
            lowest=checkpoint_low_metric,
            policy=checkpoint_policy,
            report=session.say,
        )
        self._n_keys = 0
        self._reported = (0, time.monotonic())  # Step and time of the last speed.
        if not session.load(None, self._restore):
            session.begin_anew()
        self._update_eval_model()

    def _make_evaluators(self, precision: str | Policy | None) -> None:
        """Makes evaluation model and evaluators, and finds names of metrics."""
        tasks = self._eval_tasks
        if self._eval_model is not self._model:
            shown = tasks[0] if tasks else self._tasks.tasks[0]
            batch = tuple(shown.sample_batch)
            loop_setup.init_eval_model(self._eval_model, self._model, batch)
        self._evaluators = [
            Evaluator(
                self._eval_model,
                dict(zip(task.metric_names, task.metrics, strict=True)),
                self.step_trainer.devices,
                precision,
            )
            for task in tasks
        ]
        names = loop_setup.labels(tasks) if tasks else []
        self._eval_modes = [os.path.join(name, "eval") for name in names]
        self._metric_names = loop_setup.metric_labels(
            tasks, [task.metric_names for task in tasks]
        )

    # --- Points to override -----------------------------------------------------------

    def make_step_trainer(
        self, model_with_loss: Layer, optimizer: Optimizer, **options: Any
    ) -> Any:
        """Makes the object whose `one_step` updates the weights for one task.

        Args:
          model_with_loss: Serial(model, loss layer of the task), initialised.
          optimizer: the task's optimizer.
          **options: arguments of `StepTrainer`, or of `ReversibleSerialTrainer` where
            layers are trained one by one: n_devices, adasum, ...
        """
        if self._use_memory_efficient_trainer:
            return ReversibleSerialTrainer.from_model(
                model_with_loss,
                optimizer,
                loss_chunk_size=self._loss_chunk_size,
                free_accelerators_on_step=self._use_memory_efficient_trainer == 2,
                **options,
            )
        if self._loss_chunk_size:
            raise ConfigError(
                f"loss_chunk_size={self._loss_chunk_size}: the loss is computed in "
                "parts by layer-by-layer training only; set "
                "use_memory_efficient_trainer=True, or leave it out."
            )
        return StepTrainer(model_with_loss, optimizer, **options)

    def train_step(self, batch: tuple[Any, ...]) -> None:
        """Updates the weights once, for the task that is due."""
        session, tasks = self._session, self._tasks
        step, schedule = session.step + 1, tasks.tasks[tasks.index].lr_schedule
        own = tasks.trainer.opt_params["learning_rate"]
        rate = None if schedule is None else schedule(step)
        if session.callbacks.changes_rate:
            rate = session.callbacks.rate(step, float(own if rate is None else rate))
        stats = tasks.one_step(batch, session.rng, rate)
        session.note(step, own if rate is None else rate, stats, tasks.mode)

    def run_evals(self) -> None:
        """Measures the metrics of all evaluation tasks, and adds them to history."""
        (weights, _), (state, _) = self.step_trainer.carry[:2]
        session = self._session
        for i, values in enumerate(self._measured(weights, state)):
            tags = {f"metrics/{name}": value for name, value in values.items()}
            session.log.scalars(self._eval_modes[i], self.step, tags)
            for name, value in zip(self._metric_names[i], values.values(), strict=True):
                self.history.append("eval", f"metrics/{name}", self.step, value)

    # --- Running ----------------------------------------------------------------------

    def run(self, n_steps: int = 1) -> None:
        """Trains for n_steps more steps; ends early when the data of a task ends.

        The last step is saved.

        Raises:
          TypeError, ConfigError: n_steps is no whole number, or negative.
          Interrupted: after SIGINT or SIGTERM; the last finished step is saved.
          NotSaved: training is done, but some checkpoints could not be written.
        """
        n_steps = check_count("n_steps", n_steps)
        session = self._session
        begin, end = session.step, session.step + n_steps
        session.log.set_total(end)
        if begin == 0 and gin.operative_config_str():
            self.save_gin()
        self._reported = (begin, time.monotonic())
        with session.running() as interrupts:
            if session.evaluation_due:
                self._measure_and_save()
            while session.step < end and session.stop_reason is None:
                if not self._next_step(interrupts):
                    break
            self._report_speed()
            checkpointer = session.checkpointer
            if session.step > begin and checkpointer.enabled:
                if checkpointer.saved_step != session.step:
                    session.save_all()
        self._update_eval_model()
        session.finish()

    def _next_step(self, interrupts: Interrupts) -> bool:
        """Makes a step and what is due after it; False if there is no batch."""
        session = self._session
        self._tasks.choose(session.step + 1)
        batch = self._tasks.next_batch(session.step + 1)
        if batch is None:
            session.tell_data_ended(self._tasks.data_name)
            return False
        session.begin_step(batch)
        self.train_step(batch)
        session.evaluation_due = self._eval_at(session.step)
        session.end_step()
        session.look_at(interrupts)
        if session.evaluation_due:
            self._measure_and_save()
        else:
            self._save_if_due()
        return True

    def _measure_and_save(self) -> None:
        session = self._session
        session.evaluate(self._measure)
        self._tasks.forget_losses()
        if not self._save_if_due():
            for prefix in session.checkpointer.best_prefixes(self.history, self.step):
                self.save_state(keep=False, prefix=prefix)
        session.draw()

    def _save_if_due(self) -> bool:
        checkpointer, step = self._session.checkpointer, self.step
        if not checkpointer.enabled:
            return False
        keep = self._kept_at(step) or checkpointer.is_kept(step)
        if keep or self._checkpoint_at(step) or checkpointer.is_due(step):
            self.save_state(keep)
            return True
        return False

    def _measure(self) -> None:
        self._report_speed()
        session = self._session
        for mode, name, name_in_history, mean in self._tasks.mean_losses():
            session.log.scalars(mode, self.step, {f"metrics/{name}": mean})
            self.history.append("train", f"metrics/{name_in_history}", self.step, mean)
        self.history.append(
            "train", "training/learning_rate", self.step, session.learning_rate
        )
        self.run_evals()

    def _report_speed(self) -> None:
        step, start = self._reported
        now = time.monotonic()
        self._session.report_speed(self.step - step, now - start, self._tasks.mode)
        self._reported = (self.step, now)

    def _measured(self, weights: Any, state: Any) -> list[dict[str, float]]:
        """Returns the metrics of each evaluation task, in its order."""
        return [
            evaluator.evaluate(
                task.batches(), weights, state, self._session.eval_key(2 * i)
            )
            for i, (task, evaluator) in enumerate(
                zip(self._eval_tasks, self._evaluators, strict=True)
            )
        ]

    def measure(self, weights: Any, state: Any) -> dict[str, float]:
        """Returns the evaluation metrics of other weights and state of the model."""
        values = [v for task in self._measured(weights, state) for v in task.values()]
        return dict(zip(sum(self._metric_names, []), values, strict=True))

    # --- State ------------------------------------------------------------------------

    def save_checkpoint(self, name: str | None = None) -> None:
        """Saves a checkpoint of the current step as {name}.pkl; by default model.pkl.

        Raises:
          ConfigError: there is no output_dir.
          CheckpointError: it cannot be written; earlier files are as they were.
        """
        self.save_state(keep=False, prefix=name or "model")

    def save_state(self, keep: bool, prefix: str = "model") -> None:
        """Saves a checkpoint as {prefix}.pkl, and for good as {prefix}_{step}.pkl."""
        payload = {
            **self._session.payload(),
            **self._tasks.payload(),
            "n_keys": self._n_keys,
        }
        self._session.save(payload, keep, prefix)

    def load_checkpoint(
        self,
        directory: str | os.PathLike[str] | None = None,
        filename: str | None = None,
    ) -> None:
        """Goes to the step of a checkpoint, with all that belongs to it.

        Args:
          directory: where the file is; by default output_dir.
          filename: its name; by default the newest whole checkpoint.

        Raises:
          FileNotFoundError: it is not there.
          CheckpointError: it is damaged, or of another model or other tasks.
        """
        session = self._session
        folder = session.output_dir if directory is None else Path(directory)
        if folder is None:
            raise ConfigError("there is no output_dir: say which directory to load.")
        path = None
        if filename is not None or folder != session.output_dir:
            path = folder / (filename or CHECKPOINT_NAME)
        if not session.load(path, self._restore):
            raise FileNotFoundError(f"there is no checkpoint in {folder}.")
        self._update_eval_model()

    def _restore(self, payload: dict[str, Any]) -> None:
        self._tasks.restore(payload, self._resume_data, self._session.say)
        self._n_keys = payload.get("n_keys", 0)

    def update_weights_and_state(self, weights: Any = None, state: Any = None) -> None:
        """Sets the weights and the state of the model, where given."""
        if weights is not None:
            self._model.weights = weights
        if state is not None:
            self._model.state = state
        self._update_eval_model()

    def _update_eval_model(self) -> None:
        if self._eval_model is not self._model:
            self._eval_model.weights = self.step_trainer.weights[0]
            self._eval_model.state = self.step_trainer.state[0]

    @property
    def model(self) -> Layer:
        """The model that is trained."""
        return self._model

    @property
    def eval_model(self) -> Layer:
        """The model that is evaluated."""
        return self._eval_model

    @property
    def tasks(self) -> list[TrainTask]:
        """The training tasks."""
        return self._tasks.tasks

    @property
    def eval_tasks(self) -> list[EvalTask]:
        """The evaluation tasks."""
        return self._eval_tasks

    @property
    def output_dir(self) -> str | None:
        """The directory for checkpoints and logs."""
        folder = self._session.output_dir
        return None if folder is None else str(folder)

    @property
    def step_trainer(self) -> Any:
        """What made the last step."""
        return self._tasks.trainer

    @property
    def step_trainers(self) -> list[Any]:
        """What makes steps, for each training task."""
        return self._tasks.trainers

    @property
    def is_chief(self) -> bool:
        """Whether this is the first process of the run."""
        return jax.process_index() == 0

    def new_rng(self) -> Any:
        """Returns a random key that nothing else uses, another one at each call."""
        self._n_keys += 1
        branch = jax.random.fold_in(self._session.rng, _OWN_KEYS)
        return jax.random.fold_in(branch, self._n_keys)

    # --- Reporting --------------------------------------------------------------------

    def log_summary(
        self,
        values: Mapping[str, float],
        summary_writer: Any = None,
        value_prefix: str = "metrics/",
        log_prefix: str = "eval",
    ) -> None:
        """Adds measurements of this step to history and log.

        Args:
          values: name -> value.
          summary_writer: has `scalar(tag, value, step)`; None is the loop's log.
          value_prefix: put before each name.
          log_prefix: 'train' or 'eval'.
        """
        tags = {value_prefix + name: float(value) for name, value in values.items()}
        if summary_writer is None:
            self._session.record(tags, log_prefix)
            return
        for tag, value in tags.items():
            self.history.append(log_prefix, tag, self.step, value)
            summary_writer.scalar(tag, value, self.step)

    def save_computation_graphs(self) -> None:
        """Saves the forward computation as text, forward.txt (StableHLO)."""
        self._save_graph(self.tasks[0].sample_batch)

    def close(self) -> None:
        """Waits for the last checkpoint, ends logging and closes the data."""
        self._session.close()
        self._tasks.close()

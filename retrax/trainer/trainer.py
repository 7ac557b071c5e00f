"""`Trainer`: one model, one task, from the first batch to the last checkpoint.

It joins a StepTrainer, an Evaluator and a Session (log, checkpoints, callbacks), and
holds no maths and no file format itself. Names and meaning are Trax's; experiments
subclass it and override `train_step`, `gradients`, `evaluate` or `log_metrics`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from retrax.data.checks import checked
from retrax.data.inputs import Inputs
from retrax.layers.base import Layer
from retrax.layers.combinators import Serial
from retrax.optimizers.base import Optimizer
from retrax.shapes import ShapeDtype
from retrax.trainer import state as run_state
from retrax.trainer.arguments import (
    check_arity,
    check_metric_name,
    check_schedule,
    made_inputs,
    made_model,
    made_optimizer,
    stream_of,
)
from retrax.trainer.callback import CallbackList
from retrax.trainer.checkpoint_policy import CheckpointPolicy
from retrax.trainer.checkpointer import Checkpointer
from retrax.trainer.default_metrics import default_metrics, target_rank
from retrax.trainer.epochs import epoch_lengths, epochs
from retrax.trainer.evaluator import Evaluator
from retrax.trainer.has_session import HasSession
from retrax.trainer.init_model import init_model
from retrax.trainer.interrupts import Interrupts
from retrax.trainer.precision import Policy, step_options_with
from retrax.trainer.reporting import SummaryWriter
from retrax.trainer.resume import (
    check_one_task,
    check_resume_data,
    next_batch,
    restore_stream,
)
from retrax.trainer.run_log import RunLog
from retrax.trainer.session import Session
from retrax.trainer.sharding import Sharding
from retrax.trainer.state import OptState, TrainerState
from retrax.trainer.step_trainer import StepTrainer

__all__ = ["Trainer"]


class Trainer(HasSession):
    """Trains a model on one stream and evaluates it on another.

    Example:
      >>> from retrax import data, layers as tl, optimizers
      >>> def model(mode='train'):
      ...     return tl.Serial(tl.Flatten(), tl.Dense(10))
      >>> trainer = Trainer(model, tl.CategoryCrossEntropy(), optimizers.Adam,
      ...                   lambda step: 1e-2, data.digits(), n_devices=1)
      >>> for _ in range(20):
      ...     trainer.train_step(next(trainer.train_stream))
      >>> trainer.step
      20

    Points to override:
      train_step(batch): one update and what goes with it.
      gradients(weights, state, rng, batch) -> (grads, Aux): pure, traced.
      evaluate(n_eval_steps): what is measured.
      log_metrics(metrics, summ_writer, log_prefix): where measurements go.
      make_step_trainer(model_with_loss, optimizer): how updates are made.
    """

    def __init__(
        self,
        model: Callable[..., Layer],
        loss_fn: Layer,
        optimizer: Callable[..., Optimizer] | Optimizer,
        lr_schedule: Callable[[int], float],
        inputs: Inputs | Callable[[], Inputs],
        output_dir: str | os.PathLike[str] | None = None,
        random_seed: int | None = None,
        n_devices: int | None = None,
        checkpoints_at: Iterable[int] | None = None,
        should_save_checkpoints: bool = True,
        should_write_summaries: bool = True,
        metrics: Mapping[str, Layer] | None = None,
        checkpoint_highest: str | None = None,
        checkpoint_lowest: str | None = None,
        init_checkpoint: str | os.PathLike[str] | None = None,
        *,
        precision: str | Policy | None = None,
        sharding: str | Sharding | None = None,
        step_options: Mapping[str, Any] | None = None,
        log_every: int = 50,
        log: RunLog | None = None,
        checkpoint_policy: CheckpointPolicy | None = None,
        callbacks: Any = None,
        resume_data: str = "replay",
    ) -> None:
        """Makes a trainer, and goes on where a checkpoint in output_dir ends.

        Args:
          model: function of `mode` ('train', 'eval') that makes the model.
          loss_fn: loss layer, from model outputs and the rest of a batch to a number.
          optimizer: an optimizer, or a function (class) that makes one.
          lr_schedule: learning rate per step as a function of the step, from 1.
          inputs: training and evaluation streams, or a function that returns them.
          output_dir: directory for checkpoints and logs; None writes nothing.
          random_seed: where all keys come from; None is 0, so that runs repeat.
          n_devices: number of devices; None means all.
          checkpoints_at: steps whose checkpoint is kept as model_{step}.pkl.
          should_save_checkpoints: False saves none.
          should_write_summaries: False writes no TensorBoard and JSONL files.
          metrics: name -> metric layer; the usual ones for the loss by default.
          checkpoint_highest: metric whose highest value is kept as a checkpoint.
          checkpoint_lowest: metric whose lowest value is kept as a checkpoint.
          init_checkpoint: checkpoint of another run to take the weights from.
          precision: 'float32', 'mixed_bfloat16', 'mixed_float16', or a `Policy`; also
            for evaluation.
          sharding: 'fsdp' or a `Sharding`: how weights, slots and gradients are cut
            over several devices; by default they are whole on each.
          step_options: more arguments for `StepTrainer`: reduce, accumulate, backend,
            skip_nonfinite, adasum, memory, loss_scale.
          log_every: number of steps between two entries on training in the log.
          log: where to report; by default a new RunLog.
          checkpoint_policy: when to save beside evaluations, and what to keep; what gin
            says of `CheckpointPolicy` by default.
          callbacks: `Callback` objects, or functions of the trainer that make them.
          resume_data: what a resumed run does with data from a plain generator, which
            cannot say where it is: 'replay' reads up to its place, 'restart' begins
            anew, 'error' refuses.

        Raises:
          ConfigError, TypeError: an argument cannot work; says which and why. Or
            another run uses output_dir.
          CheckpointError: the checkpoint in output_dir belongs to another model.
        """
        folder = None if output_dir is None else Path(output_dir)
        self._session = Session(
            self, folder, random_seed, log, should_write_summaries, log_every
        )
        self._resume_data = check_resume_data(resume_data)
        self._inputs = made_inputs(inputs)
        if not isinstance(loss_fn, Layer):
            raise TypeError(f"loss_fn must be a loss layer, got {loss_fn!r}.")
        self._loss_fn = loss_fn
        self._lr_schedule = check_schedule("lr_schedule", lr_schedule)
        self._n_eval_steps: int | None = None

        shapes, dtypes = self._inputs.example_shape_dtype
        self._input_signature = tuple(map(ShapeDtype, shapes, dtypes))
        self._model_train = made_model(model, "train")
        self._model_with_loss = Serial(self._model_train, loss_fn)
        check_arity(self._model_with_loss, len(self._input_signature))
        self._init_checkpoint = init_checkpoint
        self._init_model()
        self._optimizer = made_optimizer(optimizer)
        options = step_options_with(
            step_options, precision=precision, sharding=sharding
        )
        self.step_trainer = self.make_step_trainer(
            self._model_with_loss,
            self._optimizer,
            n_devices=n_devices,
            hooks=self,
            **options,
        )
        if metrics is None:
            metrics = default_metrics(loss_fn, target_rank(self._input_signature))
        self._metrics = dict(metrics)
        self._evaluator = Evaluator(
            made_model(model, "eval"),
            self._metrics,
            self.step_trainer.devices,
            options.get("precision"),
        )
        session = self._session
        session.callbacks = CallbackList(callbacks, session)
        names = session.callbacks.metric_names(list(self._metrics))
        check_metric_name("checkpoint_highest", checkpoint_highest, names)
        check_metric_name("checkpoint_lowest", checkpoint_lowest, names)
        session.checkpointer = Checkpointer(
            folder,
            should_save_checkpoints,
            frozenset(checkpoints_at or ()),
            checkpoint_highest,
            checkpoint_lowest,
            policy=checkpoint_policy,
            report=session.say,
        )
        self.reset(folder)

    def _init_model(self) -> None:
        """Gives the model its initial weights: random, or those of init_checkpoint."""
        _, rng = jax.random.split(self._session.seed_rng)
        init_model(
            self._model_with_loss, self._input_signature, rng, self._init_checkpoint
        )
        self._is_initial = True

    # --- Points to override -----------------------------------------------------------

    def make_step_trainer(
        self, model_with_loss: Layer, optimizer: Optimizer, **options: Any
    ) -> Any:
        """Makes the object whose `one_step` updates the weights."""
        return StepTrainer(model_with_loss, optimizer, **options)

    def gradients(self, weights: Any, state: Any, rng: Any, batch: Any) -> Any:
        """Computes (gradients, Aux) of a batch; a pure function, traced once."""
        return self.step_trainer.gradients(weights, state, rng, batch)

    def train_step(self, batch: tuple[Any, ...]) -> None:
        """Updates the weights once and notes what the log will show."""
        session = self._session
        step = session.step + 1
        rate = session.callbacks.rate(step, self._lr_schedule(step))
        _, stats = self.step_trainer.one_step(batch, session.rng, step, rate)
        session.note(step, rate, stats)

    def evaluate(self, n_eval_steps: int | None) -> None:
        """Measures all metrics on training and on evaluation data, and logs them.

        Args:
          n_eval_steps: at most so many batches of each; None means all, or of endless
            training data as many as there are in the evaluation data.
        """
        self._n_eval_steps = n_eval_steps
        eval_stream = self._stream_of("eval_stream")
        train_stream = self._stream_of("train_eval_stream")
        n_train = n_eval_steps
        if n_train is None and train_stream.n_batches is None:
            n_train = eval_stream.n_batches
        train = self.evaluation_round(train_stream, n_train, "train")
        self.log_metrics(train, SummaryWriter(self._session.log, "train"), "train")
        evaluated = self.evaluation_round(eval_stream, n_eval_steps, "eval")
        self.log_metrics(evaluated, SummaryWriter(self._session.log, "eval"), "eval")
        self.history.append(
            "train", "training/learning_rate", self.step, self.learning_rate
        )

    def log_metrics(
        self, metrics: Mapping[str, float], summ_writer: Any, log_prefix: str
    ) -> None:
        """Adds measurements to history and log.

        Args:
          metrics: name -> value.
          summ_writer: has `scalars(values, step)` and `scalar(tag, value, step)`.
          log_prefix: 'train' or 'eval'.
        """
        named = {f"metrics/{name}": value for name, value in metrics.items()}
        for name, value in named.items():
            self.history.append(log_prefix, name, self.step, value)
        summ_writer.scalars(named, self.step)

    # --- Running ----------------------------------------------------------------------

    def run(
        self,
        steps: int,
        eval_frequency: int | None = 100,
        eval_steps: int | None = 10,
    ) -> TrainerState:
        """Trains until `steps` steps are done in all, counting those before a resume.

        Evaluates after step 1, then every `eval_frequency` steps and at the end. Ends
        early, with a saved state, when the training data ends.

        Raises:
          Interrupted: after SIGINT or SIGTERM; the last finished step is saved.
          NotSaved: training is done, but some checkpoints could not be written.
        """
        session = self._session
        session.log.set_total(steps)
        with session.running() as interrupts:
            if session.evaluation_due:
                self._measure_and_save(eval_steps)
            for n_steps in epochs(
                steps, self.step, epoch_lengths(eval_frequency, steps)
            ):
                if session.stop_reason is not None or not self.train_epoch(
                    n_steps, eval_steps, interrupts
                ):
                    break
        return session.finish(self.state)

    def train_epoch(
        self,
        n_steps: int,
        n_eval_steps: int | None,
        interrupts: Interrupts | None = None,
    ) -> bool:
        """Trains for n_steps, then evaluates and saves.

        Args:
          n_steps: number of steps.
          n_eval_steps: at most so many batches to evaluate on; None means all, 0 no
            evaluation.
          interrupts: looked at after every step.

        Returns:
          False if the training data ended before, or a callback stopped the run.
        """
        session = self._session
        start, start_step = time.monotonic(), self.step
        ended = False
        for i in range(1, n_steps + 1):
            batch = next_batch(self.train_stream, self.step + 1)
            if batch is None:
                ended = True
                break
            session.begin_step(batch)
            self.train_step(batch)
            session.evaluation_due = i == n_steps and n_eval_steps != 0
            session.end_step()
            # A step that is evaluated is saved with its metrics, so afterwards.
            if not session.evaluation_due:
                session.save_if_due()
            session.look_at(interrupts)
            if session.stop_reason is not None:
                break
        jax.block_until_ready(self.step_trainer.carry)
        n_done = self.step - start_step
        session.report_speed(n_done, time.monotonic() - start)
        if ended:
            session.tell_data_ended()
            session.evaluation_due = n_eval_steps != 0 and n_done > 0
        self._measure_and_save(n_eval_steps)
        return not ended and session.stop_reason is None

    def _measure_and_save(self, n_eval_steps: int | None) -> None:
        session = self._session
        if session.evaluation_due:
            session.evaluate(lambda: self.evaluate(n_eval_steps))
        session.save_all()
        session.draw()

    def evaluation_round(
        self,
        inputs_stream: Iterable[tuple[Any, ...]],
        n_batches: int | None = None,
        branch: str = "eval",
    ) -> dict[str, float]:
        """Returns the metrics over a stream, without changing anything."""
        (weights, _), (state, _) = self.step_trainer.carry[:2]
        rng = self._session.eval_key(("eval", "train").index(branch))
        batches = checked(inputs_stream, same_shapes=False)
        return self._evaluator.evaluate(batches, weights, state, rng, n_batches)

    def measure(self, weights: Any, state: Any) -> dict[str, float]:
        """Returns the evaluation metrics of other weights and state of the model."""
        stream = checked(self._stream_of("eval_stream"), same_shapes=False)
        rng = self._session.eval_key(0)
        return self._evaluator.evaluate(stream, weights, state, rng, self._n_eval_steps)

    # --- State ------------------------------------------------------------------------

    def reset(
        self,
        output_dir: str | os.PathLike[str] | None,
        init_checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        """Goes back to the checkpoint in output_dir, or to the initial weights.

        Args:
          output_dir: directory of the run.
          init_checkpoint: checkpoint file to use instead of output_dir/model.pkl.
        """
        session = self._session
        session.move_to(None if output_dir is None else Path(output_dir))
        self._close_stream()
        self.train_stream: Any = checked(
            self._stream_of("train_stream"), same_shapes=False
        )
        path = None if init_checkpoint is None else Path(init_checkpoint)
        if session.load(path, self._restore):
            return
        session.begin_anew()
        if not self._is_initial:
            self._init_model()
            self.step_trainer.reset_optimizer()
        self._is_initial = False  # From here on anybody may change the weights.

    def _restore(self, payload: dict[str, Any]) -> None:
        self._is_initial = False
        check_one_task(payload)
        run_state.restore_step_trainer(self.step_trainer, payload)
        restore_stream(
            self.train_stream, payload["data"], self._resume_data, self._session.say
        )

    def save_state(self, keep: bool, prefix: str = "model") -> None:
        """Saves a checkpoint of the current step.

        While `run` runs it is written in the background, and a failure is told in the
        log and at the end of the run; at other times this waits, and raises.

        Args:
          keep: also keep it as {prefix}_{step}.pkl.
          prefix: first part of the file name.

        Raises:
          CheckpointError: it cannot be written; earlier files are as they were.
        """
        payload = {
            **self._session.payload(),
            **run_state.step_trainer_payload(self.step_trainer, on_host=False),
            "data": self.train_stream.state(),
            "input_signature": run_state.pack_signature(self._input_signature),
            "layers": str(self._model_with_loss),
        }
        self._session.save(payload, keep, prefix)

    @property
    def state(self) -> TrainerState:
        """The run as it is now."""
        step_trainer = self.step_trainer
        return TrainerState(
            step=self.step,
            opt_state=OptState(
                step_trainer.weights[0], step_trainer.slots, step_trainer.opt_params
            ),
            history=self.history,
            model_state=step_trainer.state[0],
        )

    @property
    def model(self) -> Layer:
        """The model that is trained, without its loss."""
        return self._model_train

    @property
    def step_trainers(self) -> list[Any]:
        """What makes the steps: `step_trainer` alone."""
        return [self.step_trainer]

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last step done (of the first one before that)."""
        step = max(self.step, 1)
        return self._session.callbacks.rate(step, self._lr_schedule(step))

    @property
    def model_weights(self) -> Any:
        """A copy of the model's weights, without those of the loss."""
        return self.step_trainer.weights[0]

    @model_weights.setter
    def model_weights(self, weights: Any) -> None:
        self._model_train.weights = weights

    @property
    def model_state(self) -> Any:
        """A copy of the model's state."""
        return self.step_trainer.state[0]

    @model_state.setter
    def model_state(self, state: Any) -> None:
        self._model_train.state = state

    # --- Reporting --------------------------------------------------------------------

    def save_computation_graphs(self) -> None:
        """Saves the forward computation as text, forward.txt (StableHLO)."""
        batch = self._stream_of("eval_stream").peek()
        self._save_graph(batch)

    def close(self) -> None:
        """Waits for the last checkpoint, ends logging, closes the training stream."""
        self._session.close()
        self._close_stream()

    def _stream_of(self, kind: str) -> Any:
        return stream_of(self._inputs, kind, self.n_devices)

    def _close_stream(self) -> None:
        stream: Any = getattr(self, "train_stream", None)
        if stream is not None:
            stream.close()

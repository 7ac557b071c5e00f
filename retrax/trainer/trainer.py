"""`Trainer`: one model, one task, from the first batch to the last checkpoint.

It joins a StepTrainer, an Evaluator, checkpoints and a RunLog, and holds no maths and
no file format itself. Names and meaning are Trax's; experiments subclass it and
override `train_step`, `gradients`, `evaluate` or `log_metrics`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from retrax import trees
from retrax.data.checks import checked
from retrax.data.inputs import Inputs
from retrax.errors import CheckpointError
from retrax.layers import tree as layer_tree
from retrax.layers.base import Layer
from retrax.layers.combinators import Serial
from retrax.optimizers.base import Optimizer
from retrax.shapes import ShapeDtype
from retrax.trainer import state as run_state
from retrax.trainer.arguments import (
    check_arity,
    check_metric_name,
    made_inputs,
    made_model,
    made_optimizer,
)
from retrax.trainer.checkpointer import Checkpointer
from retrax.trainer.default_metrics import default_metrics, target_rank
from retrax.trainer.epochs import epoch_lengths, epochs
from retrax.trainer.evaluator import Evaluator
from retrax.trainer.history import History
from retrax.trainer.interrupts import Interrupted, Interrupts
from retrax.trainer.reporting import StepReporter, SummaryWriter
from retrax.trainer.run_dir import check_output_dir, gin_text
from retrax.trainer.run_log import RunLog
from retrax.trainer.state import OptState, TrainerState
from retrax.trainer.step_trainer import StepTrainer

__all__ = ["Trainer"]

_EVAL_BRANCH = 0x6576616C  # Folded into the run's key: 'eval' in ASCII.


class Trainer:
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
        step_options: Mapping[str, Any] | None = None,
        log_every: int = 50,
        log: RunLog | None = None,
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
          step_options: more arguments for `StepTrainer`: reduce, accumulate, backend,
            skip_nonfinite, adasum.
          log_every: number of steps between two entries on training in the log.
          log: where to report; by default a new RunLog.

        Raises:
          ConfigError, TypeError: an argument cannot work; says which and why.
          CheckpointError: the checkpoint in output_dir belongs to another model.
        """
        self._output_dir = None if output_dir is None else Path(output_dir)
        if self._output_dir is not None:
            check_output_dir(self._output_dir)
        self._inputs = made_inputs(inputs)
        if not isinstance(loss_fn, Layer):
            raise TypeError(f"loss_fn must be a loss layer, got {loss_fn!r}.")
        self._loss_fn = loss_fn
        if not callable(lr_schedule):
            raise TypeError(
                f"lr_schedule must be a function of the step, got {lr_schedule!r}; for "
                "a constant rate: lambda step: 0.01."
            )
        self._lr_schedule = lr_schedule
        self._writes_summaries, self._log_every = should_write_summaries, log_every
        self._given_log = log
        self._open_log()
        self._history = History()
        self._step = 0
        self._evaluation_due = False
        self._seed_rng = jax.random.key(0 if random_seed is None else random_seed)
        self._rng = self._seed_rng

        shapes, dtypes = self._inputs.example_shape_dtype
        self._input_signature = tuple(map(ShapeDtype, shapes, dtypes))
        self._model_train = made_model(model, "train")
        self._model_with_loss = Serial(self._model_train, loss_fn)
        check_arity(self._model_with_loss, len(self._input_signature))
        self._init_checkpoint = init_checkpoint
        self._init_model()
        self._optimizer = made_optimizer(optimizer)
        self.step_trainer = self.make_step_trainer(
            self._model_with_loss,
            self._optimizer,
            n_devices=n_devices,
            hooks=self,
            **dict(step_options or {}),
        )
        if metrics is None:
            metrics = default_metrics(loss_fn, target_rank(self._input_signature))
        self._metrics = dict(metrics)
        check_metric_name("checkpoint_highest", checkpoint_highest, self._metrics)
        check_metric_name("checkpoint_lowest", checkpoint_lowest, self._metrics)
        self._checkpointer = Checkpointer(
            self._output_dir,
            should_save_checkpoints,
            frozenset(checkpoints_at or ()),
            checkpoint_highest,
            checkpoint_lowest,
        )
        self._evaluator = Evaluator(
            made_model(model, "eval"), self._metrics, self.step_trainer.devices
        )
        self.reset(self._output_dir)

    def _open_log(self) -> None:
        self._log = self._given_log or RunLog(
            self._output_dir if self._writes_summaries else None,
            tensorboard=self._writes_summaries,
        )
        self._reporter = StepReporter(self._log, self._log_every)

    def _init_model(self) -> None:
        """Gives the model its initial weights: random, or those of init_checkpoint."""
        signature = self._input_signature
        _, init_rng = jax.random.split(self._seed_rng)
        self._model_with_loss.init(
            signature[0] if len(signature) == 1 else signature, rng=init_rng
        )
        if self._init_checkpoint is not None:
            file_name = os.fspath(self._init_checkpoint)
            self._model_train.init_from_file(file_name, weights_only=True)
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
        step = self._step + 1
        rate = self._lr_schedule(step)
        _, stats = self.step_trainer.one_step(batch, self._rng, step, rate)
        self._step = step
        self._reporter.note(step, rate, stats)

    def evaluate(self, n_eval_steps: int | None) -> None:
        """Measures all metrics on training and on evaluation data, and logs them.

        Args:
          n_eval_steps: at most so many batches of each; None means all, or of endless
            training data as many as there are in the evaluation data.
        """
        eval_stream = self._inputs.eval_stream(self.n_devices)
        train_stream = self._inputs.train_eval_stream(self.n_devices)
        n_train = n_eval_steps
        if n_train is None and train_stream.n_batches is None:
            n_train = eval_stream.n_batches
        train = self.evaluation_round(train_stream, n_train, "train")
        self.log_metrics(train, SummaryWriter(self._log, "train"), "train")
        evaluated = self.evaluation_round(eval_stream, n_eval_steps, "eval")
        self.log_metrics(evaluated, SummaryWriter(self._log, "eval"), "eval")
        self._history.append(
            "train", "training/learning_rate", self._step, self.learning_rate
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
            self._history.append(log_prefix, name, self._step, value)
        summ_writer.scalars(named, self._step)

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
        """
        self._log.set_total(steps)
        lengths = epoch_lengths(eval_frequency, steps)
        with Interrupts() as interrupts:
            try:
                if self._evaluation_due:
                    self._measure_and_save(eval_steps)
                for n_steps in epochs(steps, self._step, lengths):
                    if not self.train_epoch(n_steps, eval_steps, interrupts):
                        break
            except Interrupted:
                raise
            except Exception:
                self._rescue()
                raise
        return self.state

    def _rescue(self) -> None:
        """Saves the last finished step when something else has gone wrong."""
        done = self._checkpointer.saved_step
        if not self._checkpointer.enabled or self._step in (0, done):
            return
        try:
            self.save_state(keep=False)
            self.log_step(
                f"Stopped by an error; this step is saved in {self._output_dir}."
            )
        except Exception as e:  # The error that brought us here is the one to see.
            self.log_step(f"Stopped by an error, and saving failed as well: {e}")

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
          False if the training data ended before.
        """
        start, start_step = time.monotonic(), self._step
        ended = False
        for i in range(1, n_steps + 1):
            batch = next(self.train_stream, None)
            if batch is None:
                ended = True
                break
            self.train_step(batch)
            self._evaluation_due = i == n_steps and n_eval_steps != 0
            # A step that is evaluated is kept with its metrics, so afterwards.
            if self._checkpointer.is_kept(self._step) and not self._evaluation_due:
                self.save_state(keep=True)
            if interrupts is not None and interrupts.signum is not None:
                self._stop(interrupts)
        n_done = self._step - start_step
        self._finish_epoch(n_done, time.monotonic() - start)
        if ended:
            self.log_step(
                f"The training data ended after step {self._step}: stopping here."
            )
            self._evaluation_due = n_eval_steps != 0 and n_done > 0
        self._measure_and_save(n_eval_steps)
        return not ended

    def _measure_and_save(self, n_eval_steps: int | None) -> None:
        if self._evaluation_due:
            before = self._history.to_dict()
            try:
                self.evaluate(n_eval_steps)
            except BaseException:  # What is done again must not be there twice.
                self._history = History.from_dict(before)
                raise
            self._evaluation_due = False
        if self._checkpointer.enabled:
            self.save_state(keep=self._checkpointer.is_kept(self._step))
            for prefix in self._checkpointer.best_prefixes(self._history, self._step):
                self.save_state(keep=False, prefix=prefix)
        self._log.curves(self._history)

    def _finish_epoch(self, n_done: int, seconds: float) -> None:
        self._reporter.flush()
        jax.block_until_ready(self.step_trainer.carry)
        if n_done > 1 and seconds > 0:
            values = {"training/steps per second": n_done / seconds}
            self._log.scalars("train", self._step, values)

    def _stop(self, interrupts: Interrupts) -> None:
        self._reporter.flush()
        where = "nothing was saved (no output_dir)"
        if self._checkpointer.enabled:
            self.save_state(keep=False)
            where = f"saved in {self._output_dir}"
        assert interrupts.signum is not None
        raise Interrupted(
            f"Interrupted by {interrupts.name} after step {self._step}, {where}. "
            "Run the same command again to continue.",
            interrupts.signum,
        )

    def evaluation_round(
        self,
        inputs_stream: Iterable[tuple[Any, ...]],
        n_batches: int | None = None,
        branch: str = "eval",
    ) -> dict[str, float]:
        """Returns the metrics over a stream, without changing anything."""
        (weights, _), (state, _) = self.step_trainer.carry[:2]
        rng = jax.random.fold_in(self._rng, _EVAL_BRANCH)
        rng = jax.random.fold_in(rng, ("eval", "train").index(branch))
        return self._evaluator.evaluate(
            checked(inputs_stream), weights, state, rng, n_batches
        )

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
        self._move_to(None if output_dir is None else Path(output_dir))
        self._close_stream()
        self.train_stream: Iterator[Any] = checked(
            self._inputs.train_stream(self.n_devices)
        )
        self._reporter.drop()
        path = None if init_checkpoint is None else Path(init_checkpoint)
        found = self._checkpointer.load(path)
        if found is not None:
            self._is_initial = False
            self._restore(*found)
            if init_checkpoint is None and found[1].name != run_state.CHECKPOINT_NAME:
                self.log_step(f"The newest checkpoint is damaged: using {found[1]}.")
            self.log_step(f"Continuing from {found[1]} at step {self._step}.")
            return
        self._step, self._history, self._rng = 0, History(), self._seed_rng
        self._evaluation_due = False
        if not self._is_initial:
            self._init_model()
            self.step_trainer.reset_optimizer()
        self._is_initial = False  # From here on anybody may change the weights.

    def _move_to(self, output_dir: Path | None) -> None:
        if output_dir == self._output_dir:
            return
        if output_dir is not None:
            check_output_dir(output_dir)
        self._output_dir = self._checkpointer.output_dir = output_dir
        self._checkpointer.saved_step = None
        if self._given_log is None:
            self._log.close()
            self._open_log()

    def _restore(self, payload: dict[str, Any], path: Path) -> None:
        try:
            run_state.restore_step_trainer(self.step_trainer, payload)
        except CheckpointError as e:
            raise CheckpointError(
                f"cannot continue from {path}: {e}\nChoose another output_dir to start "
                "a new run."
            ) from None
        self._step = payload["step"]
        self._history = History.from_dict(payload["history"])
        self._rng = run_state.unpack_key(payload["run_key"])
        stream: Any = self.train_stream
        stream.restore(payload["data"])
        self._evaluation_due = payload.get("evaluation_due", False)
        self._log.truncate_after(self._step)

    def save_state(self, keep: bool, prefix: str = "model") -> None:
        """Saves a checkpoint of the current step.

        Args:
          keep: keep a second copy as {prefix}_{step}.pkl.
          prefix: first part of the file name.

        Raises:
          CheckpointError: it cannot be written; earlier files are as they were.
        """
        self._checkpointer.save(self._payload(), keep, prefix)

    def _payload(self) -> dict[str, Any]:
        stream: Any = self.train_stream
        return {
            "kind": "run",
            "step": self._step,
            **run_state.step_trainer_payload(self.step_trainer),
            "run_key": run_state.pack_key(self._rng),
            "data": stream.state(),
            "history": self._history.to_dict(),
            "evaluation_due": self._evaluation_due,
            "input_signature": run_state.pack_signature(self._input_signature),
            "layers": str(self._model_with_loss),
            "gin": gin_text(),
        }

    @property
    def state(self) -> TrainerState:
        """The run as it is now."""
        step_trainer = self.step_trainer
        return TrainerState(
            step=self._step,
            opt_state=OptState(
                step_trainer.weights[0], step_trainer.slots, step_trainer.opt_params
            ),
            history=self._history,
            model_state=step_trainer.state[0],
        )

    @property
    def step(self) -> int:
        """Number of training steps done."""
        return self._step

    @property
    def history(self) -> History:
        """Metrics of all evaluations so far."""
        return self._history

    @property
    def evaluation_due(self) -> bool:
        """Whether the last step was saved before its evaluation; `run` makes it up."""
        return self._evaluation_due

    @property
    def n_devices(self) -> int:
        """Number of devices."""
        return self.step_trainer.n_devices

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last step done (of the first one before that)."""
        return self._lr_schedule(max(self._step, 1))

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

    def log_step(self, step_message: str) -> None:
        """Writes a line with the step number for a person to read."""
        self._log.line(f"Step {self._step:6d}: {step_message}")

    def print_n_weights(self) -> None:
        """Writes how many trainable weights the model has."""
        weights = self.step_trainer.carry.weights
        trainable = layer_tree.trainable_list(self._model_with_loss, weights)
        trained, _ = trees.partition(weights, trainable)
        n = trees.n_bytes(trained, lambda x: int(np.prod(x.shape)))
        self.log_step(f"Total number of trainable weights: {n}")

    def save_gin(self) -> None:
        """Saves the operative gin configuration as config.gin."""
        if self._output_dir is None:
            return
        text = gin_text()
        (self._output_dir / "config.gin").write_text(text)
        self._log.text("gin_config", text)

    def save_computation_graphs(self) -> None:
        """Saves the forward computation as text, forward.txt (StableHLO)."""
        if self._output_dir is None:
            return
        batch = self._inputs.eval_stream(self.n_devices).peek()
        model = self._model_train
        x = batch[0] if model.n_in == 1 else batch[: model.n_in]
        lowered = jax.jit(model.pure_fn).lower(
            x, self.model_weights, self.model_state, self._rng
        )
        (self._output_dir / "forward.txt").write_text(lowered.as_text())

    def close(self) -> None:
        """Ends logging and closes the training stream."""
        self._reporter.flush()
        self._log.close()
        self._close_stream()

    def _close_stream(self) -> None:
        stream: Any = getattr(self, "train_stream", None)
        if stream is not None:
            stream.close()

"""`Session`: what every run has, whatever it trains.

Step number, history, run key, log, checkpoints, callbacks; how it ends early, and how
it goes on. `Trainer` and `Loop` hold one each and add what is trained; neither has a
second copy of any of this. To callbacks it is the run.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax

from retrax.errors import CheckpointError, HostError
from retrax.layers.base import Layer
from retrax.trainer import hosts
from retrax.trainer import state as run_state
from retrax.trainer.agreement import Agreement, Silence
from retrax.trainer.callback import CallbackList, StepValues
from retrax.trainer.checkpointer import Checkpointer
from retrax.trainer.history import History
from retrax.trainer.interrupts import Interrupted, Interrupts
from retrax.trainer.reporting import StepReporter
from retrax.trainer.run_dir import check_output_dir, gin_text
from retrax.trainer.run_log import RunLog

__all__ = ["Owner", "Session"]

_EVAL_BRANCH = 0x6576616C  # Folded into the run's key: 'eval' in ASCII.


class Owner(Protocol):
    """What a session asks of the Trainer or Loop that holds it."""

    @property
    def model(self) -> Layer: ...

    @property
    def step_trainer(self) -> Any: ...

    @property
    def step_trainers(self) -> list[Any]: ...

    def save_state(self, keep: bool, prefix: str = "model") -> None: ...

    def measure(self, weights: Any, state: Any) -> dict[str, float]: ...


class Session:
    """A run at one step, with all that it is written to.

    Attributes:
      owner: the Trainer or Loop.
      output_dir: directory of the run, or None.
      step: number of training steps done.
      history: metrics of all evaluations so far.
      rng: the run's random key.
      values: `StepValues` of the last step; empty before the first.
      batch: the batch of the step that runs or ran last; None before the first.
      learning_rate: that of the last step; None before the first.
      evaluation_due: whether the last step has still to be evaluated.
      stop_reason: why the run ends after this step; None if it goes on.
      writes: whether this process writes files and text: of several the first alone.
      log, checkpointer, callbacks: the parts.
    """

    checkpointer: Checkpointer

    def __init__(
        self,
        owner: Owner,
        output_dir: Path | None,
        random_seed: int | None = None,
        log: RunLog | None = None,
        writes_summaries: bool = True,
        log_every: int = 50,
    ) -> None:
        """Makes a session at step 0; `checkpointer` and `callbacks` are set later.

        Args:
          owner: whose run it is.
          output_dir: where files go; None writes none.
          random_seed: where all keys come from; None is 0.
          log: where to report; by default a new RunLog.
          writes_summaries: False writes no TensorBoard and JSONL files.
          log_every: steps between two entries on training in the log.

        Raises:
          ConfigError: output_dir cannot be used, or another process of this run has
            another configuration.
        """
        self.writes = hosts.is_first()
        self._agreement = Agreement()
        if not self.writes:
            log = RunLog(None, stream=Silence(), tensorboard=False, progress="off")
        check_output_dir(output_dir)
        self.owner, self.output_dir = owner, output_dir
        self._given_log, self._writes_summaries = log, writes_summaries
        self._log_every = log_every
        self._open_log()
        self.seed_rng = jax.random.key(0 if random_seed is None else random_seed)
        self.callbacks = CallbackList((), self)
        self._is_running = False
        self._next_drawing, self._undrawn = 0.0, False
        self.begin_anew()

    def begin_anew(self) -> None:
        """Goes back to step 0."""
        self.step, self.history, self.rng = 0, History(), self.seed_rng
        self.values, self.batch = StepValues(0, {}), None
        self.learning_rate: Any = None
        self.evaluation_due = False
        self.stop_reason: str | None = None
        self._wish: str | None = None  # To stop, if other processes do not mind.
        self.callbacks.before_restore(0)

    def _open_log(self) -> None:
        self.log = self._given_log or RunLog(
            self.output_dir if self._writes_summaries else None,
            tensorboard=self._writes_summaries,
        )
        self.reporter = StepReporter(self.log, self._log_every)

    # --- What callbacks use -----------------------------------------------------------

    @property
    def model(self) -> Layer:
        """The model that is trained, without its loss."""
        return self.owner.model

    @property
    def step_trainer(self) -> Any:
        """What made the last step; `carry` has the current weights and state."""
        return self.owner.step_trainer

    def stop(self, reason: str, everywhere: bool = True) -> None:
        """Ends the run after this step, which is saved; `reason` is told and logged.

        Args:
          reason: why.
          everywhere: all processes of the run decide so at this step. False: they do
            not, such as by the clock; of several they first agree on the step.
        """
        if everywhere or hosts.count() == 1:
            self.stop_reason = self.stop_reason or reason
        else:
            self._wish = self._wish or reason

    def say(self, text: str) -> None:
        """Writes a line with the step number for a person to read."""
        self.log.line(f"Step {self.step:6d}: {text}")

    def record(self, values: Mapping[str, float], mode: str = "eval") -> None:
        """Adds measurements of this step to history and log.

        Args:
          values: tag ('metrics/loss') -> value.
          mode: 'train' or 'eval'.
        """
        for tag, value in values.items():
            self.history.append(mode, tag, self.step, value)
        self.log.scalars(mode, self.step, values)

    def measure(self, weights: Any, state: Any) -> dict[str, float]:
        """Returns the evaluation metrics of other weights and state of the model."""
        return self.owner.measure(weights, state)

    def eval_key(self, branch: int) -> Any:
        """Returns the key of one kind of evaluation; no training key depends on it."""
        return jax.random.fold_in(jax.random.fold_in(self.rng, _EVAL_BRANCH), branch)

    # --- Steps ------------------------------------------------------------------------

    def begin_step(self, batch: tuple[Any, ...]) -> None:
        """Tells callbacks that the step with this batch begins."""
        self.batch = batch
        self.callbacks.step_begin(self.step + 1)

    def note(
        self, step: int, rate: Any, stats: Mapping[str, Any], mode: str = "train"
    ) -> None:
        """Takes what a step gave: number, learning rate, and values on the device."""
        self.step, self.learning_rate = step, rate
        self.values = StepValues(step, stats)
        self.reporter.note(step, rate, stats, mode)

    def end_step(self) -> None:
        """Tells callbacks that a step is done."""
        self.callbacks.step_end(self.step)

    def evaluate(self, evaluate: Callable[[], None]) -> None:
        """Runs an evaluation; one that fails leaves nothing in the history."""
        before = self.history.to_dict()
        try:
            evaluate()
            self.callbacks.eval_end(self.step)
        except BaseException:  # What is done again must not be there twice.
            self.history = History.from_dict(before)
            raise
        self.evaluation_due = False

    def save_if_due(self) -> None:
        """Saves if the checkpoint policy wants this step."""
        checkpointer = self.checkpointer
        if checkpointer.is_due(self.step):
            self.owner.save_state(keep=checkpointer.is_kept(self.step))

    def save_all(self) -> None:
        """Saves this step, and for good if it is to be kept."""
        if self.checkpointer.enabled:
            self.owner.save_state(keep=self.checkpointer.is_kept(self.step))

    def tell_data_ended(self, name: str = "the training data") -> None:
        """Says that the run ends because its data does."""
        name = name[0].upper() + name[1:]
        self.say(f"{name} ended after step {self.step}: stopping here.")

    def draw(self) -> None:
        """Draws the learning curves, at the end of the run if there is no time now."""
        start = time.monotonic()
        self._undrawn = self._is_running and start < self._next_drawing
        if not self._undrawn:
            self.log.curves(self.history)
            self._next_drawing = start + 50 * (time.monotonic() - start)

    def report_speed(self, n_steps: int, seconds: float, mode: str = "train") -> None:
        """Logs how fast the last steps were, and the entry that waits."""
        self.reporter.flush()
        if n_steps > 1 and seconds > 0:
            values = {"training/steps per second": n_steps / seconds}
            self.log.scalars(mode, self.step, values)

    # --- Beginning and ending ---------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[Interrupts]:
        """Runs the block as a run: signals are noted, an error saves the last step."""
        self.stop_reason = self._wish = None
        self._agreement.begin(self.step, self.owner.step_trainers)
        self.checkpointer.note("running", self.step)
        self._is_running = True
        with Interrupts() as interrupts:
            try:
                self.callbacks.run_begin()
                yield interrupts
                if self.stop_reason is not None:
                    self.say(f"Stopped by {self.stop_reason}")
            except Interrupted as e:
                self.checkpointer.note("interrupted", self.step, str(e))
                raise
            except Exception as e:
                self._rescue(quietly=isinstance(e, HostError))
                self.checkpointer.note("failed", self.step, str(e))
                raise
            finally:
                self._is_running = False
                self.callbacks.run_end()
                if self._undrawn:
                    self.draw()

    def finish(self, result: Any = None) -> Any:
        """Waits for the last checkpoint of a run that went well; returns `result`.

        Raises:
          NotSaved: training is done, but some checkpoints could not be written.
        """
        try:
            self.checkpointer.finish(self.step, result)
        finally:  # Nobody leaves before the first process has written.
            hosts.barrier("the end of a run")
        return result

    def look_at(self, interrupts: Interrupts | None) -> None:
        """Saves and raises Interrupted if a signal came, to any process of the run."""
        signum = None if interrupts is None else interrupts.signum
        signum, wish = self._agreement.look(
            self.step, signum, self._wish is not None, self.owner.step_trainers
        )
        if wish:
            self.stop_reason = self.stop_reason or self._wish or "another process"
        if signum is None:
            return
        self.reporter.flush()
        where = "nothing was saved (no output_dir)"
        if self.checkpointer.enabled:
            self.owner.save_state(keep=False)
            wrong = self.checkpointer.settle()
            where = f"NOT saved: {wrong}" if wrong else f"saved in {self.output_dir}"
        hosts.barrier("an interrupt")
        raise Interrupted(
            f"Interrupted by {signal.Signals(signum).name} after step {self.step}, "
            f"{where}. Run the same command again to continue.",
            signum,
        )

    def _rescue(self, quietly: bool) -> None:
        """Saves the last finished step when something else has gone wrong."""
        done = self.checkpointer.saved_step
        if not self.checkpointer.enabled or self.step in (0, done):
            return
        try:
            self.owner.save_state(keep=False)
            wrong = self.checkpointer.settle()
        except Exception as e:  # The error that brought us here is the one to see.
            wrong = str(e)
        if wrong:
            # When another process died in the middle of a step, the step is lost.
            if not quietly:
                self.say(f"Stopped by an error, and saving failed as well: {wrong}")
        else:
            self.say(f"Stopped by an error; this step is saved in {self.output_dir}.")

    def close(self) -> None:
        """Waits for the last checkpoint, and ends logging."""
        self.reporter.flush()
        self.checkpointer.close()
        self.log.close()

    # --- Files ------------------------------------------------------------------------

    def payload(self) -> dict[str, Any]:
        """The part of a checkpoint that does not depend on what is trained."""
        rate = self.learning_rate
        return {
            "kind": "run",
            "step": self.step,
            "run_key": run_state.pack_key(self.rng),
            "history": self.history.to_dict(),
            "evaluation_due": self.evaluation_due,
            "learning_rate": None if rate is None else float(rate),
            "callbacks": self.callbacks.state(),
            "gin": gin_text(),
        }

    def save(self, payload: dict[str, Any], keep: bool, prefix: str) -> None:
        """Hands a whole payload to the checkpointer.

        While a run runs it is written in the background, and a failure is told in the
        log and at the end; at other times this waits, and raises CheckpointError.
        """
        self.checkpointer.save(payload, keep, prefix, wait=not self._is_running)
        self.callbacks.checkpoint(self.step, prefix)

    def load(
        self, path: Path | None, restore: Callable[[dict[str, Any]], None]
    ) -> bool:
        """Goes on where a checkpoint ends; False if there is none.

        Args:
          path: the file; None is the newest in the output directory.
          restore: puts back the owner's part of a payload.

        Raises:
          FileNotFoundError: `path` is given and not there.
          CheckpointError: no file is whole, or it is of another run.
          ConfigError: another run uses the output directory.
        """
        self.checkpointer.acquire()
        found = self.checkpointer.load(path)
        if found is None:
            return False
        payload, used = found
        self.callbacks.before_restore(payload["step"])
        try:
            restore(payload)
        except CheckpointError as e:
            raise CheckpointError(
                f"cannot continue from {used}: {e}\nChoose another output_dir to start "
                "a new run."
            ) from None
        self.reporter.drop()
        self.step = payload["step"]
        self.history = History.from_dict(payload["history"])
        self.rng = run_state.unpack_key(payload["run_key"])
        self.evaluation_due = payload.get("evaluation_due", False)
        self.learning_rate = payload.get("learning_rate")
        self.log.truncate_after(self.step)
        lost = self.callbacks.restore(payload.get("callbacks", {}))
        if path is None and used.name != run_state.CHECKPOINT_NAME:
            self.say(f"The newest checkpoint is damaged: using {used}.")
        self.say(f"Continuing from {used} at step {self.step}.")
        if lost:
            self.say(f"No callback takes what the file holds of {', '.join(lost)}.")
        return True

    def move_to(self, output_dir: Path | None) -> None:
        """Writes to another directory from here on."""
        if output_dir == self.output_dir:
            return
        check_output_dir(output_dir)
        self.output_dir = output_dir
        self.checkpointer.move_to(output_dir)
        if self._given_log is None:
            self.log.close()
            self._open_log()

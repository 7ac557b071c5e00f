"""`Checkpointer`: which files of a run are written when, and which one is read.

Trainers hold one each; the format is `retrax.storage`, the content `state`. It joins a
`CheckpointPolicy`, a `Writer` thread with its `HostCopy`, and a `RunLock`.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from absl import logging

from retrax import storage
from retrax.errors import CheckpointError, ConfigError
from retrax.storage import atomic, plain
from retrax.trainer import hosts, retention
from retrax.trainer.checkpoint_policy import CheckpointPolicy
from retrax.trainer.history import History
from retrax.trainer.host_copy import HostCopy
from retrax.trainer.run_lock import RunLock
from retrax.trainer.run_record import Status, write_record
from retrax.trainer.state import CHECKPOINT_NAME, check_kind
from retrax.trainer.writer import Writer

__all__ = ["Checkpointer", "NotSaved"]


class NotSaved(CheckpointError):
    """A run has trained to its end, but not all its checkpoints could be written.

    Attributes:
      result: what the run would have returned.
    """

    def __init__(self, text: str, result: Any = None) -> None:
        super().__init__(text)
        self.result = result


class Checkpointer:
    """Saves and finds the checkpoints in one output directory.

    model.pkl is the newest and model.previous.pkl the one before; model_{step}.pkl are
    those kept for good, recent_{step}.pkl the last few, and highest_{metric}.pkl and
    lowest_{metric}.pkl those of the best evaluations. Where two are the same checkpoint
    they share their bytes on the disk.

    In the background a save costs training one copy of the state. What then cannot be
    written does not end training: `report` tells it at once, `finish` at the end.
    """

    def __init__(
        self,
        output_dir: Path | None,
        enabled: bool = True,
        kept_steps: Iterable[int] = (),
        highest: str | None = None,
        lowest: str | None = None,
        *,
        policy: CheckpointPolicy | None = None,
        report: Callable[[str], Any] | None = None,
    ) -> None:
        """Makes a checkpointer.

        Args:
          output_dir: where files go; None saves nothing.
          enabled: False saves nothing.
          kept_steps: steps that are saved and kept for good, beside the policy's.
          highest: metric whose highest evaluation is kept.
          lowest: metric whose lowest evaluation is kept.
          policy: when to save and what to keep; what gin says by default.
          report: writes a line for a person to read; by default an error of the log.
        """
        self.output_dir = output_dir
        self.policy = CheckpointPolicy() if policy is None else policy
        self._writes = hosts.is_first()
        if self.policy.every_minutes is not None and hosts.count() > 1:
            raise ConfigError(
                "CheckpointPolicy: every_minutes is by each process's own clock, and "
                "several processes must save at the same step: use every_steps."
            )
        self._wanted = enabled
        self._kept_steps = frozenset(kept_steps)
        self._best_of = {"highest": highest, "lowest": lowest}
        self._report = report or logging.error
        self._saved_step: int | None = None
        self._saved_at = time.monotonic()
        self._writer, self._copy = Writer(), HostCopy()
        self._missing: dict[str, str] = {}  # File -> why it could not be written.
        self._news: list[str] = []
        self._lock: RunLock | None = None
        self._newest_is_damaged = False

    @property
    def enabled(self) -> bool:
        """Whether checkpoints are wanted and there is a directory for them."""
        return self._wanted and self.output_dir is not None

    @property
    def saved_step(self) -> int | None:
        """Step of the newest checkpoint written so far; waits for one being written."""
        self.wait()
        return self._saved_step

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._writer.is_busy

    @property
    def failures(self) -> list[str]:
        """Files that could not be written, and were not since, with the reasons."""
        return [f"{name}: {why}" for name, why in list(self._missing.items())]

    # --- When ---------------------------------------------------------------------

    def is_kept(self, step: int) -> bool:
        """Whether the checkpoint of this step is to be kept for good."""
        return self.enabled and (step in self._kept_steps or self.policy.is_kept(step))

    def is_due(self, step: int) -> bool:
        """Whether to save after this step; call it after every one."""
        if not self.enabled:
            return False
        if self._news:
            self._tell()
        minutes = (time.monotonic() - self._saved_at) / 60
        return step in self._kept_steps or self.policy.is_due(step, minutes)

    def best_prefixes(self, history: History, step: int) -> list[str]:
        """Prefixes of the best-so-far files that this step's evaluation has earned."""
        prefixes = []
        for which, metric in self._best_of.items():
            if metric is None or not self.enabled:
                continue
            side = "high" if which == "highest" else "low"
            best = history.best("eval", f"metrics/{metric}", side)
            if best is not None and best[0] == step:
                prefixes.append(f"{which}_{metric}")
        return prefixes

    # --- Writing ------------------------------------------------------------------

    def save(
        self,
        payload: dict[str, Any],
        keep: bool,
        prefix: str = "model",
        wait: bool = True,
    ) -> None:
        """Writes a checkpoint, and with 'model' the best-so-far files it has earned.

        Args:
          payload: a run's state, with 'step' and 'history'. Its arrays may be on
            devices, and may be used up as soon as this returns.
          keep: also keep it as {prefix}_{step}.pkl.
          prefix: first part of the file name.
          wait: False writes in the background, if the policy wants that, and leaves
            failures to `report` and `finish`.

        Raises:
          ConfigError: there is no output directory.
          TypeError: the payload holds something that no checkpoint can.
          CheckpointError: it cannot be written (with `wait`); earlier files are as they
            were.
        """
        if self.output_dir is None:
            raise ConfigError("there is no output_dir to save a checkpoint in.")
        self.wait()
        self._saved_at = time.monotonic()
        if not self._writes:
            if prefix == "model":
                self._saved_step = payload["step"]
            return
        names = self._further_names(payload, keep, prefix)
        write = functools.partial(self._write, self.output_dir, prefix, names)
        if wait:
            write(payload)
            if f"{prefix}.pkl" in self._missing:
                self._news.clear()
                raise CheckpointError(self._missing[f"{prefix}.pkl"])
        else:
            copied = self._copied(payload)
            if copied is None:
                write(payload)
            else:
                plain.check(copied)
                self._writer.start(lambda: write(copied))
        self._tell()

    def wait(self) -> None:
        """Returns when nothing is being written, and tells what failed."""
        self._writer.wait()
        self._tell()

    def finish(self, step: int, result: Any = None) -> None:
        """Waits for the last checkpoint at the end of a run that went well.

        Raises:
          NotSaved: some checkpoints could not be written; names them.
        """
        self.wait()
        self.note("done", step)
        if self._missing:
            raise NotSaved(
                f"training is done, at step {step}, but not all of its checkpoints "
                "could be written:\n  " + "\n  ".join(self.failures),
                result,
            )

    def settle(self) -> str | None:
        """Waits; returns why the newest checkpoint is not on the disk, or None."""
        self.wait()
        return self._missing.get(CHECKPOINT_NAME)

    def _copied(self, payload: dict[str, Any]) -> dict[str, Any] | None:
        """A copy to write in the background; None to write the payload itself, now."""
        if not self.policy.background:
            return None
        try:
            return self._copy(payload)
        except (MemoryError, RuntimeError):  # No room, or no more threads at exit:
            # slower is better than not at all.
            return None

    def _further_names(
        self, payload: dict[str, Any], keep: bool, prefix: str
    ) -> list[str]:
        """Other names for the file of a payload."""
        step = payload["step"]
        names = [f"{prefix}_{step}.pkl"] if keep else []
        if prefix == "model":
            if any(self._best_of.values()) and not payload.get("evaluation_due"):
                history = History.from_dict(payload["history"])
                best = self.best_prefixes(history, step)
                names += [f"{name}.pkl" for name in best]
            if self.policy.keep_last > 2:
                names.append(f"recent_{step}.pkl")
        return names

    def _write(
        self, folder: Path, prefix: str, names: list[str], payload: dict[str, Any]
    ) -> None:
        """Writes a file and its further names; notes what fails. Runs in any thread."""
        path = folder / f"{prefix}.pkl"
        is_newest = path.name == CHECKPOINT_NAME
        # What is replaced must not push out a better one before it.
        worthless = self._newest_is_damaged or self._saved_step == payload["step"]
        keep_previous = not (is_newest and worthless)
        try:
            storage.save(path, payload, keep_previous)
        except CheckpointError as error:
            for name in (path.name, *names):
                self._note_failure(name, error)
            return
        self._missing.pop(path.name, None)
        for name in names:
            try:
                atomic.link(path, folder / name, keep=name.startswith(("high", "low")))
                self._missing.pop(name, None)
            except OSError as error:
                self._note_failure(name, error)
        if is_newest:
            self._saved_step, self._newest_is_damaged = payload["step"], False
            self._tidy(folder, payload["step"])

    def _tidy(self, folder: Path, step: int) -> None:
        try:
            n_kept = self.policy.keep_last if self.policy.keep_last > 2 else 0
            if n_kept:
                retention.prune_recent(folder, n_kept, step)
        except OSError as error:  # Too many files are no loss.
            logging.warning("cannot remove old checkpoints: %s", error)
        retention.write_index(folder, {"file": CHECKPOINT_NAME, "step": step})

    def _note_failure(self, name: str, error: Exception) -> None:
        self._missing[name] = str(error)
        self._news.append(f"{name} is not saved: {error}")

    def _tell(self) -> None:
        while self._news:
            self._report(self._news.pop(0))

    # --- Reading ------------------------------------------------------------------

    def load(self, path: Path | None = None) -> tuple[dict[str, Any], Path] | None:
        """Reads `path`, or the newest whole checkpoint; None if there is none yet.

        A damaged one is passed over, loudly, for the one before it: model.pkl, then
        model.previous.pkl, then those with a step in their name, highest first.

        Raises:
          FileNotFoundError: `path` was given and is not there.
          CheckpointError: what is there is damaged or no run's state.
        """
        self.wait()
        if hosts.count() == 1:
            return self._load(path)
        found: list[Any] = []

        def read() -> bytes:
            found.append(self._load(path))
            if found[0] is None:
                return b""
            used = found[0][1]
            return str(used).encode() + b"\0" + used.read_bytes()

        data = hosts.from_first(read)
        if self._writes:
            return found[0]
        if not data:
            return None
        name, _, body = data.partition(b"\0")
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / CHECKPOINT_NAME
            copy.write_bytes(body)
            return storage.load(copy), Path(name.decode())

    def _load(self, path: Path | None) -> tuple[dict[str, Any], Path] | None:
        if path is not None:
            payload, used = storage.load_newest(path)
            check_kind(payload, used)
            return payload, used
        if self.output_dir is None:
            return None
        paths = retention.candidates(self.output_dir, CHECKPOINT_NAME)
        if not paths:
            return None
        payload, used = _first_whole(paths)
        self._newest_is_damaged = used != paths[0]
        return payload, used

    # --- One run at a time --------------------------------------------------------

    def acquire(self) -> None:
        """Takes the output directory for this run, until `close` or exit.

        Raises:
          ConfigError: another run has it; names its process and host.
        """
        hosts.from_first(self._acquire)

    def _acquire(self) -> bytes:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self.enabled and self.output_dir is not None:
            self._lock = RunLock(self.output_dir)
            self._lock.acquire()
        return b""

    def move_to(self, output_dir: Path | None) -> None:
        """Saves in another directory from now on."""
        self.close()
        self.output_dir, self._saved_step = output_dir, None
        self._missing.clear()
        self._newest_is_damaged = False

    def note(self, status: Status, step: int, reason: str = "") -> None:
        """Notes in run.json how the run stands: at its start, and at its end."""
        if self.enabled and self._writes and self.output_dir is not None:
            write_record(self.output_dir, status, step, reason)

    def close(self) -> None:
        """Waits for what is being written and gives the output directory back."""
        self.wait()
        self._copy = HostCopy()  # Gives its memory back, too.
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _first_whole(paths: list[Path]) -> tuple[dict[str, Any], Path]:
    reasons = []
    for path in paths:
        try:
            payload = storage.load(path)
            check_kind(payload, path)
            return payload, path
        except (storage.CheckpointDamaged, FileNotFoundError) as error:
            reasons.append(str(error))
            logging.error("%s", error)
    raise storage.CheckpointDamaged(
        f"no usable checkpoint in {paths[0].parent}: {'; '.join(reasons)}"
    )

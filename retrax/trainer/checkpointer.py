"""`Checkpointer`: which files of a run are written when, and which one is read.

Trainers hold one each; the format is `retrax.storage`, the content `state`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retrax import storage
from retrax.errors import ConfigError
from retrax.trainer.history import History
from retrax.trainer.state import CHECKPOINT_NAME, check_kind

__all__ = ["Checkpointer"]


class Checkpointer:
    """Saves and finds the checkpoints in one output directory.

    model.pkl is the newest, model_{step}.pkl those kept for good, and
    highest_{metric}.pkl and lowest_{metric}.pkl those of the best evaluations.
    """

    def __init__(
        self,
        output_dir: Path | None,
        enabled: bool = True,
        kept_steps: frozenset[int] = frozenset(),
        highest: str | None = None,
        lowest: str | None = None,
    ) -> None:
        """Makes a checkpointer.

        Args:
          output_dir: where files go; None saves nothing.
          enabled: False saves nothing.
          kept_steps: steps whose checkpoint is kept for good.
          highest: metric whose highest evaluation is kept.
          lowest: metric whose lowest evaluation is kept.
        """
        self.output_dir = output_dir
        self._wanted = enabled
        self._kept_steps = kept_steps
        self._best_of = {"highest": highest, "lowest": lowest}
        self.saved_step: int | None = None

    @property
    def enabled(self) -> bool:
        """Whether checkpoints are wanted and there is a directory for them."""
        return self._wanted and self.output_dir is not None

    def save(self, payload: dict[str, Any], keep: bool, prefix: str = "model") -> None:
        """Writes a checkpoint.

        Args:
          payload: a run's state, with 'step'.
          keep: write a second file {prefix}_{step}.pkl.
          prefix: first part of the file name.

        Raises:
          ConfigError: there is no output directory.
          CheckpointError: it cannot be written; earlier files are as they were.
        """
        if self.output_dir is None:
            raise ConfigError("there is no output_dir to save a checkpoint in.")
        storage.save(self.output_dir / f"{prefix}.pkl", payload)
        if keep:
            path = self.output_dir / f"{prefix}_{payload['step']}.pkl"
            storage.save(path, payload, keep_previous=False)
        if prefix == "model":
            self.saved_step = payload["step"]

    def is_kept(self, step: int) -> bool:
        """Whether the checkpoint of this step is to be kept for good."""
        return self.enabled and step in self._kept_steps

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

    def load(self, path: Path | None = None) -> tuple[dict[str, Any], Path] | None:
        """Reads `path`, or the newest whole checkpoint; None if there is none yet.

        Raises:
          FileNotFoundError: `path` was given and is not there.
          CheckpointError: what is there is damaged or no run's state.
        """
        wanted = path
        if wanted is None:
            if self.output_dir is None:
                return None
            wanted = self.output_dir / CHECKPOINT_NAME
            if not storage.exists(wanted):
                return None
        payload, used = storage.load_newest(wanted)
        check_kind(payload, used)
        return payload, used

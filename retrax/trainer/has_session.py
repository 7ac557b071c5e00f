"""`HasSession`: what `Trainer` and `Loop` show of the `Session` they hold."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from retrax import trees
from retrax.layers import tree as layer_tree
from retrax.trainer.history import History
from retrax.trainer.run_dir import gin_text
from retrax.trainer.session import Session

__all__ = ["HasSession"]


class HasSession:
    """Base of what runs; a subclass sets `_session` and has a `step_trainer`."""

    _session: Session
    step_trainer: Any

    @property
    def step(self) -> int:
        """Number of training steps done."""
        return self._session.step

    @property
    def history(self) -> History:
        """Metrics of all evaluations so far."""
        return self._session.history

    @property
    def evaluation_due(self) -> bool:
        """Whether the last step was saved before its evaluation; `run` makes it up."""
        return self._session.evaluation_due

    @property
    def n_devices(self) -> int:
        """Number of devices."""
        return self.step_trainer.n_devices

    def log_step(self, step_message: str) -> None:
        """Writes a line with the step number for a person to read."""
        self._session.say(step_message)

    def print_n_weights(self) -> None:
        """Writes how many trainable weights the model has."""
        step_trainer = self.step_trainer
        layer, weights = step_trainer.model_with_loss, step_trainer.carry.weights
        trainable = layer_tree.trainable_list(layer, weights)
        trained, _ = trees.partition(weights, trainable)
        n = trees.n_bytes(trained, lambda x: int(np.prod(x.shape)))
        self.log_step(f"Total number of trainable weights: {n}")

    def save_gin(self) -> None:
        """Saves the operative gin configuration as config.gin."""
        session = self._session
        if session.output_dir is None or not session.writes:
            return
        text = gin_text()
        (session.output_dir / "config.gin").write_text(text)
        session.log.text("gin_config", text)

    def _save_graph(self, batch: tuple[Any, ...]) -> None:
        """Saves the forward computation of a batch as forward.txt (StableHLO)."""
        session = self._session
        if session.output_dir is None or not session.writes:
            return
        model = session.model
        x = batch[0] if model.n_in == 1 else batch[: model.n_in]
        (weights, _), (state, _) = self.step_trainer.carry[:2]
        lowered = jax.jit(model.pure_fn).lower(x, weights, state, session.rng)
        (session.output_dir / "forward.txt").write_text(lowered.as_text())

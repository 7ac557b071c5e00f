"""`HasSession`: what `Trainer` and `Loop` show of the `Session` they hold."""

from __future__ import annotations

from typing import Any

from retrax.trainer.history import History
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
        self._session.print_n_weights()

    def save_gin(self) -> None:
        """Saves the operative gin configuration as config.gin."""
        self._session.save_gin()

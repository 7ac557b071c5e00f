"""Parts of a curriculum: where a run is in it, its task, and what it is given.

Above `latent_layers`, under `curriculum`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gin
import numpy as np

from retrax.errors import ConfigError, DataError
from retrax.layers.base import Layer
from retrax.optimizers.base import Optimizer
from retrax.supervised.latent_config import LatentConfig
from retrax.supervised.latent_layers import LatentThoughtLoss, LatentThoughts
from retrax.supervised.tasks import TrainTask
from retrax.trainer.callback import Callback

__all__ = [
    "Curriculum",
    "LatentTrainTask",
    "check_model",
    "check_prefix",
    "checked_loss",
    "checked_shares",
]


class Curriculum(Callback):
    """Where a run is in its curriculum; saved with every checkpoint.

    Attributes:
      stage: number of the stage, from 0.
      begun_at: training steps that were done when it began.
      n_passed: evaluations in a row that passed the gate.
    """

    def __init__(self, stage: int = 0, decodes: bool = True) -> None:
        self._decodes = decodes
        self.stage, self.begun_at, self.n_passed = stage, 0, 0

    def begin(self, stage: int, step: int) -> None:
        """Begins a stage after `step` training steps."""
        self.stage, self.begun_at, self.n_passed = stage, step, 0

    def added_metrics(self, names: Sequence[str]) -> list[str]:
        """Names what `CurriculumTrainer` measures beside the metrics of layers."""
        more = ["value_accuracy", "excess", "stage"]
        more += ["solved", "cell_accuracy"] if self._decodes else []
        return [name for name in more if name not in names]

    def state(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "begun_at": self.begun_at,
            "n_passed": self.n_passed,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.stage, self.begun_at = state["stage"], state["begun_at"]
        self.n_passed = state["n_passed"]


@gin.configurable(module="retrax.supervised.curriculum")
class LatentTrainTask(TrainTask):
    """A training task whose loss is that of latent thoughts.

    Its model is `LatentThoughts`, of the same settings.
    """

    def __init__(
        self,
        labeled_data: Any,
        optimizer: Optimizer | Callable[..., Optimizer],
        lr_schedule: Callable[[int], float] | None = None,
        config: LatentConfig | None = None,
        **options: Any,
    ) -> None:
        """Makes a task.

        Args:
          labeled_data: batches of `data.SudokuDataset`.
          optimizer: as of `TrainTask`.
          lr_schedule: as of `TrainTask`.
          config: settings of thoughts and their loss.
          **options: further arguments of `TrainTask`.
        """
        loss = LatentThoughtLoss(config)
        super().__init__(labeled_data, loss, optimizer, lr_schedule, **options)


# --- Checks -------------------------------------------------------------------------


def checked_loss(loss_fn: Any) -> LatentConfig:
    """Returns the settings of a loss of latent thoughts; TypeError for another loss."""
    if not isinstance(loss_fn, LatentThoughtLoss):
        raise TypeError(
            "CurriculumTrainer needs loss_fn to be a LatentThoughtLoss (in gin "
            f"train.loss_fn = @LatentThoughtLoss()), got {loss_fn!r}."
        )
    return loss_fn.config


def checked_shares(
    replay: float, mix: float, config: LatentConfig
) -> tuple[float, float]:
    """Returns both shares; ConfigError if a step cannot be shared out so."""
    if not (0 <= replay and 0 <= mix and replay + mix <= 1):
        raise ConfigError(
            "replay_share and mix_share are shares of all steps: at least 0, and at "
            f"most 1 together; got {replay} and {mix}."
        )
    if replay and config.aux_weight == 0:
        raise ConfigError(
            f"replay_share={replay} trains the candidate head on earlier stages, but "
            "aux_weight=0 leaves that head out; set LatentConfig.aux_weight."
        )
    return replay, mix


def check_model(model: Layer, config: LatentConfig) -> None:
    """Raises unless the model thinks by the settings of the loss."""
    if not isinstance(model, LatentThoughts):
        raise TypeError(
            "CurriculumTrainer needs a model that is a LatentThoughts (in gin "
            f"train.model = @latent_model), got {model!r}."
        )
    if model.config != config:
        raise ConfigError(
            f"the model thinks by {model.config}, but its loss goes by {config}; give "
            "both the same settings."
        )


def check_prefix(batch: tuple[Any, ...], config: LatentConfig) -> None:
    """Raises DataError if a puzzle has too many or too few clues for the settings."""
    counts, n_latents = np.asarray(batch[2]), batch[4].shape[1]
    least, most = int(counts.min()), int(counts.max())
    needed = 3 * most + n_latents
    if config.prefix_length is not None and needed > config.prefix_length:
        raise DataError(
            f"a puzzle has {most} clues, so its thoughts need the first {needed} "
            f"tokens, but LatentConfig.prefix_length is {config.prefix_length}."
        )
    if n_latents and 3 * least < (config.shared_prefix or 0):
        raise DataError(
            f"a puzzle has {least} clues, {3 * least} tokens, but by "
            f"LatentConfig.shared_prefix the first {config.shared_prefix} are clues in "
            "every puzzle."
        )

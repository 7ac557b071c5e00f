"""The step of a curriculum: `LatentStepTrainer` and the plan of one step.

Above `latent_layers`, under `curriculum`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from retrax.supervised.latent_layers import thinking
from retrax.trainer.step import Aux, from_loss
from retrax.trainer.step_trainer import StepTrainer

__all__ = ["LatentStepTrainer", "StepPlan"]

_AVERAGED = ("ce_loss", "aux_loss", "leak_loss", "latent_sigma")


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What one step trains.

    Attributes:
      stages: stages of elimination, from 0, that values are drawn at; with several the
        step averages their gradients. The number of slots stands for the solution, and
        () for a model without slots.
      backtrack: train the candidate head at each row's last slot alone.
    """

    stages: tuple[int, ...]
    backtrack: bool = False

    def program(self, n_latents: int) -> StepPlan:
        """Returns the plan whose program does this one, too.

        Solutions go through the same program as the last stage of instances: there are
        as many thoughts, and the tokens are an argument.
        """
        last = max(n_latents - 1, 0)
        return dataclasses.replace(
            self, stages=tuple(min(stage, last) for stage in self.stages)
        )

    def settings(self, stage: int, n_latents: int) -> dict[str, Any]:
        """Returns settings of `LatentConfig` for a stage: its passes, and its slot."""
        passes = min(stage + 1, n_latents)
        return {
            "num_passes": passes,
            "inst_slot": passes - 1,
            "backtrack": self.backtrack,
        }


class LatentStepTrainer(StepTrainer):
    """Updates the weights once from one or several stages, see `StepPlan`.

    Batches are those of `data.SudokuDataset`; with several stages in the plan, tokens
    are (batch, stages, length + 1). All stages see the same weights, state and key. A
    program is compiled for each plan, and kept.
    """

    _plan: StepPlan | None = None

    @property
    def plan(self) -> StepPlan | None:
        """What the next step trains; None leaves the model's settings as they are."""
        return self._plan

    @plan.setter
    def plan(self, plan: StepPlan | None) -> None:
        self._plan = plan
        self.variant = plan

    def loss(self, weights: Any, state: Any, rng: Any, batch: Any) -> tuple[Any, Aux]:
        """Computes the loss, the mean over the stages of the plan."""
        n = self._n_parts()
        parts = [self._of_part(i, weights, state, rng, batch) for i in range(n)]
        loss = sum(loss for loss, _ in parts) / n
        return loss, _averaged([aux for _, aux in parts])

    def gradients(self, weights: Any, state: Any, rng: Any, batch: Any) -> Any:
        """Computes gradients stage by stage, so that one at a time needs memory."""
        found = []
        for i in range(self._n_parts()):
            of_part = from_loss(functools.partial(self._of_part, i), self.reduce)
            found.append(of_part(weights, state, rng, batch))
        if len(found) == 1:
            return found[0]
        grads = jax.tree.map(
            lambda *parts: sum(parts) / len(parts), *(grads for grads, _ in found)
        )
        aux = _averaged([aux for _, aux in found])
        return grads, aux._replace(loss=sum(aux.loss for _, aux in found) / len(found))

    def _n_parts(self) -> int:
        return max(len(self._plan.stages), 1) if self._plan is not None else 1

    def _of_part(
        self, i: int, weights: Any, state: Any, rng: Any, batch: Any
    ) -> tuple[Any, Aux]:
        plan = self._plan
        if plan is None or not plan.stages:
            return super().loss(weights, state, rng, batch)
        tokens, *rest = batch
        if tokens.ndim == 3:
            tokens = tokens[:, i]
        with thinking(**plan.settings(plan.stages[i], rest[-1].shape[1])):
            return super().loss(weights, state, rng, (tokens, *rest))


def _averaged(parts: list[Aux]) -> Aux:
    """The last part's values, with the mean of those that belong to the loss."""
    metrics = dict(parts[-1].metrics)
    for name in _AVERAGED:
        if name in metrics:
            values = [part.metrics[name][0] for part in parts]
            metrics[name] = (sum(values) / len(values), metrics[name][1])
    return parts[-1]._replace(metrics=metrics)

"""`CurriculumTrainer`: a model that learns to think stage by stage.

Above `latent_step` and `latent_evaluation`. Stage t trains t + 1 thoughts on values
drawn from what is possible after t waves of elimination; the stage after the last slot
trains on the solutions themselves. A gate says when to go on: at a model that predicts
uniformly on the candidates, cross-entropy less log |S| is 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin
import numpy as np

from retrax.data.inputs import Inputs
from retrax.data.sudoku import instance_tokens
from retrax.data.sudoku_draws import Draws
from retrax.errors import ConfigError, DataError
from retrax.layers.base import Layer
from retrax.optimizers.base import Optimizer
from retrax.supervised.curriculum_parts import (
    Curriculum,
    LatentTrainTask,
    check_model,
    check_prefix,
    checked_loss,
    checked_shares,
)
from retrax.supervised.latent_evaluation import LatentEvaluation
from retrax.supervised.latent_picture import draw_thoughts
from retrax.supervised.latent_step import LatentStepTrainer, StepPlan
from retrax.trainer.arguments import check_count, made_model
from retrax.trainer.reporting import SummaryWriter
from retrax.trainer.trainer import Trainer

__all__ = ["Curriculum", "CurriculumTrainer", "LatentTrainTask"]


@gin.configurable(module="retrax.supervised.curriculum", denylist=["output_dir"])
class CurriculumTrainer(Trainer):
    """Trains a model on more and more thoughts.

    The model is a `LatentThoughts` and the loss a `LatentThoughtLoss` of the same
    settings; their numbers of passes are those of the stage. With K slots there are
    stages 0 to K - 1, and with `train_solution` stage K. A model without slots has one
    stage, the solution.

    Evaluation decodes the held-out puzzles, greedily and by beam search, and writes
    what it finds to the log: 'solved', 'cell_accuracy', 'value_accuracy', 'excess' and
    'stage' as metrics, all else of `latent_evaluation.Report` under 'training/'.
    `thoughts.png` in the output directory shows a puzzle being solved.

    Points to override, beside those of `Trainer`:
      plan(step): what a step trains.
      instances(batch, step, plan): the batch it trains on.
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
        *,
        first_stage: int = 0,
        slack: float = 0.05,
        patience: int = 2,
        gate_frequency: int | None = None,
        min_steps: int = 0,
        max_steps: int | None = None,
        replay_share: float = 0.0,
        mix_share: float = 0.0,
        train_solution: bool = True,
        beams: Sequence[int] = (1,),
        ablate: bool = True,
        draws_thoughts: bool = True,
        callbacks: Any = None,
        step_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Makes a trainer, and goes on where a checkpoint in output_dir ends.

        Args:
          model: function of `mode` that makes a `LatentThoughts`, such as
            `latent_model`; called with 'train', 'eval' and 'predict'.
          loss_fn: a `LatentThoughtLoss`.
          optimizer: as of `Trainer`.
          lr_schedule: as of `Trainer`.
          inputs: streams of `data.SudokuDataset`.
          output_dir: as of `Trainer`.
          random_seed: as of `Trainer`; it also fixes the instances of a stage.
          first_stage: the stage to begin at.
          slack: the gate: a stage is learned when CE - log |S| is at most this, in
            nats, on average.
          patience: measurements in a row that must pass the gate.
          gate_frequency: steps from one measurement of the gate to the next, each on
            the first batch of held-out puzzles and written to the log under
            'training/gate/'; None measures it with each evaluation, which decodes and
            takes longer.
          min_steps: steps that a stage takes at least.
          max_steps: steps that a stage takes at most; None for any number. It goes on
            then whether or not it passes the gate.
          replay_share: share of steps that train the candidate head on an earlier
            stage instead.
          mix_share: share of steps that train all stages up to this one at once, by the
            mean of their gradients.
          train_solution: whether a last stage trains on solutions.
          beams: widths of beam search to evaluate with; 1 is greedy, () nothing.
          ablate: also decode with thoughts set to 0, and with those of another puzzle.
          draws_thoughts: whether to draw `thoughts.png`, where beams hold 1.
          callbacks: as of `Trainer`.
          step_options: as of `Trainer`.
          **options: further arguments of `Trainer`.

        Raises:
          ConfigError, TypeError: an argument cannot work; says which and why.
        """
        self._loss_config = config = checked_loss(loss_fn)
        self._gate = (slack, check_count("patience", patience, least=1))
        if gate_frequency is not None:
            check_count("gate_frequency", gate_frequency, least=1)
        self._gate_frequency = gate_frequency
        self._min_steps = check_count("min_steps", min_steps)
        if max_steps is not None:
            check_count("max_steps", max_steps, least=max(min_steps, 1))
        self._max_steps = max_steps
        self._shares = checked_shares(replay_share, mix_share, config)
        self._train_solution = train_solution
        self._beams, self._ablate = tuple(beams), ablate
        self._draws_thoughts = draws_thoughts
        self._instance_seed = 0 if random_seed is None else random_seed
        first_stage = check_count("first_stage", first_stage)
        self.curriculum = Curriculum(first_stage, decodes=1 in self._beams)
        given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        given = [callback for callback in given if callback is not None]
        thoughts: Any = made_model(model, "eval")
        check_model(thoughts, config)
        self._evaluation = LatentEvaluation(thoughts, made_model(model, "predict"))
        super().__init__(
            model,
            loss_fn,
            optimizer,
            lr_schedule,
            inputs,
            output_dir,
            random_seed,
            step_options=step_options,
            callbacks=[self.curriculum, *given],
            **options,
        )
        config.passes(self.n_latents)
        self._check_stage(self.curriculum.stage)

    def make_step_trainer(
        self, model_with_loss: Layer, optimizer: Optimizer, **options: Any
    ) -> Any:
        """Makes a `LatentStepTrainer`."""
        return LatentStepTrainer(model_with_loss, optimizer, **options)

    # --- Stages -----------------------------------------------------------------------

    @property
    def n_latents(self) -> int:
        """K, number of slots."""
        return self._input_signature[-1].shape[1]

    @property
    def n_stages(self) -> int:
        """Number of stages, the one that trains on solutions included."""
        return max(self.n_latents + int(self._train_solution), 1)

    @property
    def stage(self) -> int:
        """The stage of the next step; setting it begins another one."""
        return self.curriculum.stage

    @stage.setter
    def stage(self, stage: int) -> None:
        self._check_stage(stage)
        self.curriculum.begin(stage, self.step)

    @property
    def num_passes(self) -> int:
        """Thoughts that a model makes at this stage."""
        return min(self.stage + 1, self.n_latents)

    def plan(self, step: int) -> StepPlan:
        """Returns what a step trains; it depends on seed, step and stage alone."""
        if not self.n_latents:
            return StepPlan(())
        replay, mix = self._shares
        chance, which = Draws(self._instance_seed, step, 0).random((2,))
        if self.stage and chance < replay:
            n_earlier = min(self.stage, self.n_latents)
            return StepPlan((int(which * n_earlier),), backtrack=True)
        if self.stage and chance >= 1 - mix:
            return StepPlan(tuple(range(self.stage + 1)))
        return StepPlan((self.stage,))

    def instances(self, batch: tuple[Any, ...], step: int, plan: StepPlan) -> Any:
        """Returns a batch with values drawn from what the plan's stages allow.

        Raises:
          DataError: the clues of a puzzle are longer than `LatentConfig.prefix_length`.
        """
        check_prefix(batch, self._loss_config)
        drawn = []
        for stage in plan.stages:
            if stage < self.n_latents:
                draws = Draws(self._instance_seed, step, 1 + stage)
                drawn.append(instance_tokens(batch, stage, draws))
            else:
                drawn.append(np.asarray(batch[0]))
        if not drawn:
            return batch
        tokens = drawn[0] if len(drawn) == 1 else np.stack(drawn, axis=1)
        return (tokens, *batch[1:])

    def train_step(self, batch: tuple[Any, ...]) -> None:
        """Updates the weights once, by the plan of the step."""
        step, curriculum = self.step + 1, self.curriculum
        n_done = self.step - curriculum.begun_at
        if self._max_steps is not None and n_done >= self._max_steps:
            self._go_on(f"after {n_done} steps")
        plan = self.plan(step)
        self.step_trainer.plan = plan.program(self.n_latents)
        super().train_step(self.instances(batch, step, plan))
        if self._gate_frequency is not None and step % self._gate_frequency == 0:
            self._measure_gate()

    def _go_on(self, why: str) -> None:
        """Begins the next stage, if there is one."""
        if self.stage + 1 < self.n_stages:
            self.stage += 1
            self.log_step(f"Stage {self.stage} of 0 to {self.n_stages - 1} {why}.")

    def _check_stage(self, stage: int) -> None:
        if not 0 <= stage < self.n_stages:
            solution = ", then the solution" if self._train_solution else ""
            raise ConfigError(
                f"stage {stage} is beyond the last: with {self.n_latents} slots for "
                f"latent thoughts{solution} there are stages 0 to {self.n_stages - 1}."
            )

    # --- Evaluation -------------------------------------------------------------------

    def evaluate(self, n_eval_steps: int | None) -> None:
        """Measures how far the model has come, and goes on if it passes the gate.

        Args:
          n_eval_steps: at most so many batches of held-out puzzles; None means all.

        Raises:
          DataError: all were asked for of a stream that never ends, or the clues of a
            puzzle do not fit the settings.
        """
        stream = self._inputs.eval_stream(self.n_devices)
        if n_eval_steps is None and stream.is_endless:
            raise DataError(
                "the evaluation data never ends: say how many batches to take "
                "(train.eval_steps), or make it a finite pass (repeat=False)."
            )
        batches = self._held_out(n_eval_steps)
        weights, state = self.model_weights, self.model_state
        gates = range(min(self.stage + 1, self.n_latents))
        report = self._evaluation.evaluate(
            batches, weights, state, self.num_passes, gates, self._beams, self._ablate
        )
        metrics, log = dict(report.metrics), self._session.log
        excess = report.details.get(f"excess/stage_{self.stage}")
        if excess is not None:
            metrics["excess"] = excess
        metrics["stage"] = float(self.stage)
        train_stream = self._inputs.train_eval_stream(self.n_devices)
        train = self._evaluation.evaluate(
            train_stream.take(len(batches)), weights, state, self.num_passes, beams=()
        )
        writer = SummaryWriter(log, "train")
        self.log_metrics(train.metrics, writer, "train")
        self.log_metrics(metrics, SummaryWriter(log, "eval"), "eval")
        details = {f"training/{name}": x for name, x in report.details.items()}
        log.scalars("eval", self.step, details)
        self.history.append(
            "train", "training/learning_rate", self.step, self.learning_rate
        )
        folder = self._session.output_dir if self._session.writes else None
        if self._draws_thoughts and report.example and folder is not None:
            self._draw(batches[0], report.example, folder)
        if excess is not None and self._gate_frequency is None:
            self._judge(excess)

    def _held_out(self, n: int | None) -> list[Any]:
        stream = self._inputs.eval_stream(self.n_devices)
        batches = list(stream if n is None else stream.take(n))
        for batch in batches:
            check_prefix(batch, self._loss_config)
        return batches

    def _measure_gate(self) -> None:
        if self.stage >= self.n_latents:
            return  # Solutions are the last stage.
        found = self._evaluation.gate(
            self._held_out(1), self.model_weights, self.model_state, self.stage
        )
        found = {f"training/gate/{name}": value for name, value in found.items()}
        found["training/gate/stage"] = float(self.stage)
        self._session.log.scalars("eval", self.step, found)
        self._judge(found["training/gate/excess"])

    def _judge(self, excess: float) -> None:
        slack, patience = self._gate
        curriculum = self.curriculum
        curriculum.n_passed = curriculum.n_passed + 1 if excess <= slack else 0
        long_enough = self.step - curriculum.begun_at >= self._min_steps
        if curriculum.n_passed >= patience and long_enough:
            self._go_on(f"after an excess of {excess:.4f} nats")

    def _draw(self, batch: Any, example: tuple[Any, Any], folder: Path) -> None:
        title = f"step {self.step}, {self.num_passes} thoughts"
        try:
            draw_thoughts(batch, *example, folder / "thoughts.png", title)
        except OSError as e:  # A picture is no reason to end a run.
            self.log_step(f"cannot draw thoughts.png: {e}")

"""`train()`: from a gin configuration to a trained model.

It makes a Trainer of its arguments and runs it; the command line only parses a
configuration and calls it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import gin

from retrax import layers as tl
from retrax import optimizers
from retrax.data.inputs import Inputs
from retrax.errors import ConfigError
from retrax.supervised import lr_schedules
from retrax.trainer import (
    OptState,
    Trainer,
    TrainerState,
    epochs,
    load_trainer_state,
)

__all__ = [
    "OptState",
    "Trainer",
    "TrainerState",
    "epochs",
    "load_trainer_state",
    "num_devices",
    "train",
]


@gin.configurable(module="retrax.supervised.trainer_lib")
def num_devices(value: int | None = None) -> int | None:
    """Returns how many devices to train on, for gin to set; None is all of them."""
    return value


@gin.configurable(module="retrax.supervised.trainer_lib", denylist=["output_dir"])
def train(
    output_dir: str | os.PathLike[str] | None,
    model: Callable[..., tl.Layer] = gin.REQUIRED,  # type: ignore[assignment]
    loss_fn: tl.Layer | None = None,
    inputs: Inputs | Callable[[], Inputs] = gin.REQUIRED,  # type: ignore[assignment]
    optimizer: Callable[..., Any] = optimizers.Adafactor,
    lr_schedule_fn: Callable[[], Callable[[int], float]] = lr_schedules.multifactor,
    trainer_class: Callable[..., Trainer] = Trainer,
    steps: int = 1000,
    checkpoints_at: Iterable[int] | None = None,
    permanent_checkpoints_at: Iterable[int] | None = None,
    eval_steps: int | None = 10,
    eval_frequency: int | None = 100,
    permanent_checkpoint_frequency: int | None = None,
    random_seed: int | None = None,
    save_graphs: bool = False,
    metrics: Mapping[str, tl.Layer] | None = None,
    checkpoint_highest: str | None = None,
    checkpoint_lowest: str | None = None,
    adasum: bool = False,
    init_checkpoint: str | None = None,
) -> TrainerState:
    """Trains a model; goes on where a checkpoint in output_dir ends.

    Args:
      output_dir: directory for checkpoints and logs; None writes nothing.
      model: function of `mode` that makes the model.
      loss_fn: loss layer; WeightedCategoryCrossEntropy() by default.
      inputs: data streams, or a function that makes them.
      optimizer: an optimizer or a function (class) that makes one.
      lr_schedule_fn: function that makes the learning-rate schedule.
      trainer_class: makes the trainer; takes the arguments of `Trainer`.
      steps: number of training steps in all, those before a resume included.
      checkpoints_at: steps whose checkpoint is kept for good.
      permanent_checkpoints_at: the same, under Trax's other name.
      eval_steps: batches in one evaluation; None evaluates a finite set wholly.
      eval_frequency: steps between evaluations; None or 0 evaluates at the end only.
      permanent_checkpoint_frequency: steps between checkpoints that are kept for good.
      random_seed: where all random keys come from; None is 0.
      save_graphs: also write the forward computation to forward.txt.
      metrics: name -> metric layer; the usual ones for the loss by default.
      checkpoint_highest: metric whose highest value is kept as a checkpoint.
      checkpoint_lowest: metric whose lowest value is kept as a checkpoint.
      adasum: combine the gradients of several devices by Adasum.
      init_checkpoint: checkpoint of another run to take the weights from.

    Returns:
      The state after the last step.

    Raises:
      ConfigError: arguments that cannot work, before anything is written.
      Interrupted: after SIGINT or SIGTERM; the last finished step is saved.
    """
    _check_count("steps", steps, least=1)
    _check_count("eval_steps", eval_steps, least=0, optional=True)
    _check_count("eval_frequency", eval_frequency, least=0, optional=True)
    _check_count(
        "permanent_checkpoint_frequency",
        permanent_checkpoint_frequency,
        least=1,
        optional=True,
    )
    if permanent_checkpoint_frequency and permanent_checkpoints_at is not None:
        raise ConfigError(
            "set only one of permanent_checkpoint_frequency and "
            "permanent_checkpoints_at."
        )
    kept = {*(checkpoints_at or ()), *(permanent_checkpoints_at or ())}
    if permanent_checkpoint_frequency:
        kept |= set(range(0, steps + 1, permanent_checkpoint_frequency))
    trainer = trainer_class(
        model,
        tl.WeightedCategoryCrossEntropy() if loss_fn is None else loss_fn,
        optimizer,
        lr_schedule_fn(),
        inputs,
        output_dir,
        random_seed=random_seed,
        n_devices=num_devices(),
        checkpoints_at=kept,
        metrics=metrics,
        checkpoint_highest=checkpoint_highest,
        checkpoint_lowest=checkpoint_lowest,
        init_checkpoint=init_checkpoint,
        **({"step_options": {"adasum": True}} if adasum else {}),
    )
    try:
        return _run(trainer, steps, eval_frequency, eval_steps, save_graphs)
    finally:
        trainer.close()


def _run(
    trainer: Trainer,
    steps: int,
    eval_frequency: int | None,
    eval_steps: int | None,
    save_graphs: bool,
) -> TrainerState:
    if trainer.step >= steps and not trainer.evaluation_due:
        trainer.log_step(
            f"This run is done: it has {trainer.step} of {steps} steps. To train "
            "longer raise train.steps, for example "
            f"--config='train.steps = {2 * steps}'."
        )
        return trainer.state
    trainer.log_step(f"Starting training on {_devices_text(trainer.n_devices)}.")
    trainer.print_n_weights()
    if save_graphs:
        trainer.save_computation_graphs()
    trainer.save_gin()
    state = trainer.run(steps, eval_frequency, eval_steps)
    trainer.save_gin()  # Now with what evaluation used, too.
    if trainer.step >= steps:
        trainer.log_step("Training done.")
    return state


def _devices_text(n: int) -> str:
    return "1 device" if n == 1 else f"{n} devices"


def _check_count(name: str, value: Any, least: int, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, got {value!r}.")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}.")

"""Supervised training: `train()`, schedules, decoding, and what goes with them."""

from retrax.supervised import (
    callbacks,
    curriculum,
    decoding,
    latent,
    latent_layers,
    latent_losses,
    lr_schedules,
    trainer_lib,
    training,
)
from retrax.supervised.trainer_lib import train
from retrax.supervised.training import EvalTask, Loop, TrainTask

__all__ = [
    "EvalTask",
    "Loop",
    "TrainTask",
    "callbacks",
    "curriculum",
    "decoding",
    "latent",
    "latent_layers",
    "latent_losses",
    "lr_schedules",
    "train",
    "trainer_lib",
    "training",
]

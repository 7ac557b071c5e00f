"""Supervised training: `train()`, schedules, decoding, and what goes with them."""

from retrax.supervised import decoding, lr_schedules, trainer_lib
from retrax.supervised.trainer_lib import train

__all__ = ["decoding", "lr_schedules", "train", "trainer_lib"]

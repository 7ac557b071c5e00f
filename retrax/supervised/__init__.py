"""Supervised training: `train()`, schedules, and what goes with them."""

from retrax.supervised import lr_schedules, trainer_lib
from retrax.supervised.trainer_lib import train

__all__ = ["lr_schedules", "train", "trainer_lib"]

"""How one step, and one run, is made: compile, update, save, restore."""

from retrax.trainer.devices import Devices
from retrax.trainer.epochs import epochs
from retrax.trainer.evaluator import Evaluator
from retrax.trainer.history import History
from retrax.trainer.interrupts import Interrupted
from retrax.trainer.run_log import RunLog
from retrax.trainer.state import OptState, TrainerState, load_trainer_state
from retrax.trainer.step import (
    Aux,
    Reduce,
    build_update,
    from_loss,
    from_reverse,
    from_vjp,
    step_rngs,
)
from retrax.trainer.step_trainer import StepTrainer
from retrax.trainer.trainer import Trainer

__all__ = [
    "Aux",
    "Devices",
    "Evaluator",
    "History",
    "Interrupted",
    "OptState",
    "Reduce",
    "RunLog",
    "StepTrainer",
    "Trainer",
    "TrainerState",
    "build_update",
    "epochs",
    "from_loss",
    "from_reverse",
    "from_vjp",
    "load_trainer_state",
    "step_rngs",
]

"""How one step, and one run, is made: compile, update, save, restore."""

from retrax.trainer.blocks import (
    ReversibleBlocks,
    extract_reversible_blocks,
    init_reversible_blocks,
)
from retrax.trainer.callback import Callback, StepValues
from retrax.trainer.checkpoint_policy import CheckpointPolicy
from retrax.trainer.checkpointer import NotSaved
from retrax.trainer.devices import Devices
from retrax.trainer.epochs import epochs
from retrax.trainer.evaluator import Evaluator
from retrax.trainer.history import History
from retrax.trainer.interrupts import Interrupted
from retrax.trainer.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoLossScale,
    StaticLossScale,
)
from retrax.trainer.precision import Policy
from retrax.trainer.reduce import Reduce
from retrax.trainer.reversible_trainer import ReversibleSerialTrainer
from retrax.trainer.run_log import RunLog
from retrax.trainer.session import Session
from retrax.trainer.sharding import Sharding
from retrax.trainer.state import OptState, TrainerState, load_trainer_state
from retrax.trainer.step import (
    Aux,
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
    "Callback",
    "CheckpointPolicy",
    "Devices",
    "DynamicLossScale",
    "Evaluator",
    "History",
    "Interrupted",
    "LossScale",
    "NoLossScale",
    "NotSaved",
    "OptState",
    "Policy",
    "Reduce",
    "ReversibleBlocks",
    "ReversibleSerialTrainer",
    "RunLog",
    "Session",
    "Sharding",
    "StaticLossScale",
    "StepTrainer",
    "StepValues",
    "Trainer",
    "TrainerState",
    "build_update",
    "epochs",
    "extract_reversible_blocks",
    "from_loss",
    "from_reverse",
    "from_vjp",
    "init_reversible_blocks",
    "load_trainer_state",
    "step_rngs",
]

"""Optimizers: what turns gradients into new weights.

One rule per module. An `Optimizer` is written for one array (`init`, `update`) and
lifted to any JAX pytree of weights by `tree_init` and `tree_update`. `FromOptax` puts
any Optax transformation behind the same interface. Nothing here knows about layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gin

from retrax.optimizers.adafactor import Adafactor
from retrax.optimizers.adam import Adam, AdamW
from retrax.optimizers.base import Optimizer
from retrax.optimizers.lion import Lion
from retrax.optimizers.momentum import Momentum
from retrax.optimizers.norms import clip_grads, l2_norm
from retrax.optimizers.optax_wrapper import FromOptax
from retrax.optimizers.rms_prop import RMSProp
from retrax.optimizers.sgd import SGD
from retrax.optimizers.sm3 import SM3, MomentumType

__all__ = [
    "SGD",
    "SM3",
    "Adafactor",
    "Adam",
    "AdamW",
    "FromOptax",
    "Lion",
    "Momentum",
    "MomentumType",
    "Optimizer",
    "RMSProp",
    "clip_grads",
    "l2_norm",
    "opt_configure",
]


def opt_configure(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Registers an optimizer with gin under the module name 'retrax.optimizers'.

    Takes what `gin.configurable` takes; use it on rules of your own.
    """
    kwargs.setdefault("module", "retrax.optimizers")
    return gin.configurable(*args, **kwargs)

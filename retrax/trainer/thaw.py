"""Changing which layers are trained while a run goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from retrax import trees
from retrax.layers import tree as layer_tree

__all__ = ["change_trainable"]


def change_trainable(step_trainers: Sequence[Any], change: Callable[[], None]) -> None:
    """Calls `change`, which sets what is trainable; StepTrainers then compile anew.

    Weights that were trained before keep their slots, those that are new begin with
    slots of their own. Hyper-parameters and the count of skipped steps stay.
    """
    before = [
        (_named_slots(trainer), trainer.opt_params, trainer.n_skipped)
        for trainer in step_trainers
    ]
    change()
    for trainer, (old, opt_params, n_skipped) in zip(
        step_trainers, before, strict=True
    ):
        trainer.reset_optimizer(reread_trainable=True)
        slots = [
            old[name] if name in old and not trees.difference(x, old[name]) else x
            for name, x in _named_slots(trainer).items()
        ]
        structure = jax.tree.structure(trainer.slots)
        trainer.slots = jax.tree.unflatten(structure, slots)
        trainer.opt_params = opt_params
        trainer.n_skipped = n_skipped


def _named_slots(step_trainer: Any) -> dict[str, Any]:
    """All arrays of the slots by the weight they belong to, in flattening order."""
    model, weights = step_trainer.model_with_loss, step_trainer.weights
    optimizer, slots = step_trainer.optimizer, step_trainer.slots
    mask = layer_tree.trainable_list(model, weights)
    if hasattr(optimizer, "optax_state"):  # Trees like the weights, and other things.
        trained, _ = trees.partition(weights, mask)
        return dict(trees.leaves_with_path(optimizer.optax_state(trained, slots)))
    paths = step_trainer.trainable_paths()
    return {
        f"{path} {place}": leaf
        for path, own in zip(paths, slots, strict=True)
        for place, leaf in trees.leaves_with_path(own)
    }

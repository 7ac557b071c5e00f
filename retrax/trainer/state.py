"""What a run is at one step: `TrainerState`, and its form in a checkpoint.

Weights and state are saved by path, not in order, so that they are found again by
name. The file format is `retrax.storage`; this module decides what goes in.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from retrax import storage, trees
from retrax.errors import CheckpointError
from retrax.layers import tree as layer_tree
from retrax.layers.base import Layer
from retrax.layers.files import load_tree, load_trees
from retrax.shapes import ShapeDtype
from retrax.trainer.history import History

__all__ = [
    "CHECKPOINT_NAME",
    "OptState",
    "TrainerState",
    "load_trainer_state",
    "pack_key",
    "pack_signature",
    "restore_step_trainer",
    "step_trainer_payload",
    "unpack_key",
    "unpack_signature",
]

CHECKPOINT_NAME = "model.pkl"


class OptState(NamedTuple):
    """The part of a run that the optimizer changes.

    Attributes:
      weights: the model's weights.
      slots: what the optimizer remembers.
      opt_params: the optimizer's hyper-parameters, by name.
    """

    weights: Any
    slots: Any
    opt_params: dict[str, Any]


class TrainerState(NamedTuple):
    """A run at one step.

    Attributes:
      step: number of training steps done.
      opt_state: weights, slots and hyper-parameters.
      history: metrics of all evaluations so far.
      model_state: the model's non-trainable state.
    """

    step: int
    opt_state: OptState
    history: History
    model_state: Any


def load_trainer_state(
    output_dir: str | os.PathLike[str],
    model: Layer,
    weights_file: str | os.PathLike[str] | None = None,
    strict: bool = True,
    rename: Any = None,
) -> TrainerState:
    """Reads a run from its checkpoint, for evaluation or for more training.

    Args:
      output_dir: the run's directory.
      model: the model that was trained, without its loss, in any mode; it need not be
        initialised. It is not changed.
      weights_file: a checkpoint other than `output_dir`/model.pkl.
      strict: False takes the weights that match and initial values for the rest.
      rename: dict of path prefixes, or function, from the file's paths to the model's.

    Raises:
      FileNotFoundError: there is no checkpoint.
      CheckpointError: it is damaged, or of another model; says what differs.

    Example: after `state = load_trainer_state('runs/digits', model)` set
    `model.weights = state.opt_state.weights` and `model.state = state.model_state`.
    """
    path = Path(weights_file or Path(output_dir) / CHECKPOINT_NAME)
    payload, _ = storage.load_newest(path)
    check_kind(payload, path)
    sig = unpack_signature(payload["input_signature"])
    saved = payload["weights"], payload["state"]
    weights, state = load_trees(model, initial_trees(model, sig), saved, strict, rename)
    return TrainerState(
        step=payload["step"],
        opt_state=OptState(weights, payload["slots"], payload["opt_params"]),
        history=History.from_dict(payload["history"]),
        model_state=state,
    )


def check_kind(payload: dict[str, Any], path: Any) -> None:
    """Raises CheckpointError unless the payload is that of a run."""
    if payload.get("kind") != "run":
        raise CheckpointError(
            f"{path} holds a {payload.get('kind', 'file')!r}, not the state of a run; "
            "a file of save_to_file is read by init_from_file."
        )


def initial_trees(model: Layer, input_signature: Any) -> tuple[Any, Any]:
    """Weights and state of a model as they are, or as init would make them."""
    n_in = max(model.n_in, 1)
    sig = tuple(input_signature)[:n_in]
    if jax.tree.leaves((model.weights, model.state)):
        return model.weights, model.state
    return jax.jit(lambda k: model.init(sig[0] if n_in == 1 else sig, rng=k))(
        jax.random.key(0)
    )


def step_trainer_payload(step_trainer: Any, on_host: bool = True) -> dict[str, Any]:
    """The part of a checkpoint that a StepTrainer for Serial(model, loss) holds.

    Args:
      step_trainer: the trainer.
      on_host: copy values to the host, so that the next step may use up the originals.
        False gives the originals, for `Checkpointer.save`, which copies in its own way.
    """
    carry = step_trainer.devices.whole(step_trainer.carry)
    if on_host:
        carry = trees.to_numpy(carry)
    weights, state = carry.weights, carry.state
    model, loss = step_trainer.model_with_loss.sublayers
    return {
        "weights": dict(layer_tree.named_leaves(model, weights[0])),
        "state": dict(layer_tree.named_leaves(model, state[0])),
        "loss_weights": dict(layer_tree.named_leaves(loss, weights[1])),
        "loss_state": dict(layer_tree.named_leaves(loss, state[1])),
        "slots": carry.slots,
        "slot_paths": step_trainer.trainable_paths(),
        "opt_params": trees.to_numpy(step_trainer.opt_params),
        "optimizer": type(step_trainer.optimizer).__name__,
        "n_skipped": int(carry.n_skipped),
        "loss_scale": trees.to_numpy(carry.loss_scale).payload(),
    }


def restore_step_trainer(step_trainer: Any, payload: dict[str, Any]) -> None:
    """Puts a payload back into a StepTrainer of the same model and optimizer.

    Raises:
      CheckpointError: model or optimizer are others; nothing is changed then.
    """
    model_with_loss = step_trainer.model_with_loss
    model, loss = model_with_loss.sublayers
    weights, state, slots, *_ = step_trainer.carry
    new_weights = tuple(
        load_tree(layer, tree, payload[key], strict=True)
        for layer, tree, key in zip(
            (model, loss), weights, ("weights", "loss_weights"), strict=True
        )
    )
    new_state = tuple(
        load_tree(layer, tree, payload[key], strict=True)
        for layer, tree, key in zip(
            (model, loss), state, ("state", "loss_state"), strict=True
        )
    )
    new_slots = _fitted_slots(step_trainer, slots, payload)
    model_with_loss.weights = new_weights
    model_with_loss.state = new_state
    step_trainer.slots = new_slots
    step_trainer.opt_params = payload["opt_params"]
    step_trainer.n_skipped = payload["n_skipped"]
    # Runs of float32, and of earlier versions, have none.
    saved = payload.get("loss_scale", {})
    step_trainer.loss_scale = step_trainer.loss_scale.restored(saved)


def _fitted_slots(step_trainer: Any, slots: Any, payload: dict[str, Any]) -> Any:
    """The saved slots in the structure that the optimizer expects."""
    name = type(step_trainer.optimizer).__name__
    saved = payload["slots"]
    wrong = trees.difference(slots, saved)
    paths = step_trainer.trainable_paths()
    if payload["optimizer"] != name:
        wrong = f"saved by {payload['optimizer']}, this run uses {name}"
    elif not wrong and paths != payload["slot_paths"]:
        other = set(paths) ^ set(payload["slot_paths"])
        wrong = f"other weights are trainable now: {sorted(other)[:8] or 'order'}"
    if wrong:
        raise CheckpointError(
            f"the optimizer's slots do not fit: {wrong}. Train with the optimizer and "
            "frozen layers of the saved run, or start anew from its weights with "
            "init_checkpoint."
        )
    return jax.tree.unflatten(
        jax.tree.structure(slots), [jnp.asarray(x) for x in jax.tree.leaves(saved)]
    )


def pack_key(rng: Any) -> dict[str, Any]:
    """Writes a random key, typed or raw, as plain containers and arrays."""
    if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        impl = str(jax.random.key_impl(rng))
        return {"impl": impl, "data": np.asarray(jax.random.key_data(rng))}
    return {"impl": None, "data": np.asarray(rng)}


def unpack_key(packed: dict[str, Any]) -> Any:
    """Undoes `pack_key`."""
    data = jnp.asarray(packed["data"])
    if packed["impl"] is None:
        return data
    return jax.random.wrap_key_data(data, impl=packed["impl"])


def pack_signature(sig: Any) -> list[tuple[tuple[int, ...], str]]:
    """Writes the signature of a batch as [(shape, dtype name), ...]."""
    return [(tuple(s.shape), str(s.dtype)) for s in sig]


def unpack_signature(packed: Any) -> tuple[ShapeDtype, ...]:
    """Undoes `pack_signature`."""
    return tuple(ShapeDtype(shape, np.dtype(dtype)) for shape, dtype in packed)

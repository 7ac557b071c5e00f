"""Saving a layer's weights to a file, and initialising a layer from one.

The file is a checkpoint (`retrax.storage`), so a trainer's checkpoint serves too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from retrax import storage, trees
from retrax.errors import CheckpointError
from retrax.layers import tree as layer_tree
from retrax.layers.base import Layer
from retrax.shapes import ShapeDtype, signature

__all__ = ["init_from_file", "load_tree", "load_trees", "save_to_file"]


def save_to_file(
    layer: Layer,
    file_name: str,
    weights_only: bool = False,
    input_signature: Any = None,
) -> None:
    """Saves weights, and state unless `weights_only`, by path.

    Args:
      layer: an initialised layer.
      file_name: where to.
      weights_only: leave the state out.
      input_signature: kept in the file, so that `init_from_file` needs none; by
        default what the layer was initialised for.
    """
    if input_signature is None:
        input_signature = layer._init_signature
    payload: dict[str, Any] = {
        "kind": "layer",
        "weights": trees.to_numpy(dict(layer_tree.named_leaves(layer, layer.weights))),
        "layers": str(layer),
    }
    if not weights_only:
        state = dict(layer_tree.named_leaves(layer, layer.state))
        payload["state"] = trees.to_numpy(state)
    if input_signature is not None:
        sigs = signature(input_signature)
        sigs = sigs if isinstance(sigs, (tuple, list)) else (sigs,)
        payload["input_signature"] = [(s.shape, str(s.dtype)) for s in sigs]
    storage.save(file_name, payload, keep_previous=False)


def init_from_file(
    layer: Layer,
    file_name: str,
    weights_only: bool,
    input_signature: Any,
    strict: bool,
    rename: Any,
) -> tuple[Any, Any]:
    """Does the work of `Layer.init_from_file`, where it is described."""
    payload, _ = storage.load_newest(file_name)
    if "weights" not in payload:
        raise CheckpointError(
            f"{file_name} holds no weights (it is a {payload.get('kind')!r})."
        )
    if input_signature is None:
        input_signature = _signature_for(layer, payload)
    if input_signature is not None:
        weights, state = _initial(layer, input_signature)
    elif jax.tree.leaves((layer.weights, layer.state)):
        weights, state = layer.weights, layer.state
    else:
        raise CheckpointError(
            f"{file_name} does not say for which inputs the weights are; pass "
            "input_signature=."
        )
    if not weights_only and "state" not in payload:
        raise CheckpointError(
            f"{file_name} was saved with weights_only=True; load it so too."
        )
    saved_state = None if weights_only else payload["state"]
    weights, state = load_trees(
        layer, (weights, state), (payload["weights"], saved_state), strict, rename
    )
    if input_signature is not None:
        layer.init(input_signature)  # For the signatures errors tell; values follow.
    layer.weights, layer.state = weights, state
    return layer.weights, layer.state


def load_trees(
    layer: Layer,
    like: tuple[Any, Any],
    saved: tuple[dict[str, Any], dict[str, Any] | None],
    strict: bool,
    rename: Any = None,
) -> tuple[Any, Any]:
    """Returns (weights, state) structured as `like`, with the saved values by path.

    Args:
      layer: the layer they are of.
      like: its weights and state.
      saved: weights and state by path; state None keeps that of `like`.
      strict: everything must match; else what does not keeps the values of `like`.
      rename: from saved paths to the layer's, for both: a dict need not fit in both.
    """
    for_weights = for_state = rename
    if isinstance(rename, Mapping) and saved[1] is not None:
        for_state = {k: v for k, v in rename.items() if _occurs(k, saved[1])}
        for_weights = {
            k: v
            for k, v in rename.items()
            if _occurs(k, saved[0]) or k not in for_state
        }
    weights = load_tree(layer, like[0], saved[0], strict, for_weights)
    if saved[1] is None:
        return weights, like[1]
    return weights, load_tree(layer, like[1], saved[1], strict, for_state)


def load_tree(
    layer: Layer, tree: Any, saved: dict[str, Any], strict: bool, rename: Any = None
) -> Any:
    """Returns `tree` with its leaves replaced by the saved ones of the same path.

    Raises:
      CheckpointError: they do not match, and `strict`; all differences are listed.
    """
    named = dict(layer_tree.named_leaves(layer, tree))
    found = storage.match(named, saved, strict=strict, rename=rename)
    arrays = {path: jnp.asarray(found.get(path, leaf)) for path, leaf in named.items()}
    return layer_tree.rebuild(layer, tree, arrays)


def _occurs(prefix: str, saved: dict[str, Any]) -> bool:
    return any(p == prefix or p.startswith(prefix + "/") or not prefix for p in saved)


def _signature_for(layer: Layer, payload: dict[str, Any]) -> Any:
    """The input signature in the file; that of a whole batch is cut to the layer's."""
    packed = payload.get("input_signature")
    if packed is None:
        return None
    sigs = tuple(ShapeDtype(shape, np.dtype(dtype)) for shape, dtype in packed)
    return sigs[0] if layer.n_in == 1 else sigs[: layer.n_in]


def _initial(layer: Layer, input_signature: Any) -> tuple[Any, Any]:
    # Traced, so that the layer itself does not change before the file has matched.
    return jax.jit(lambda key: layer.init(input_signature, rng=key))(layer.rng)

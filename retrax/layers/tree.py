"""The layer tree seen as a list of weights: paths, trainable masks, state sync.

The path of a weight is what checkpoints, errors and rules go by: the position and
label of each layer on the way, then the place inside the layer's own weights, as in
'1.Serial/0.Dense/0'. A label is the class name, or the name the user gave, so it
does not change with sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from retrax import trees
from retrax.errors import CheckpointError
from retrax.layers.base import Layer

__all__ = [
    "label",
    "named_leaves",
    "rebuild",
    "state_sync_list",
    "trainable_list",
    "walk",
]


def label(layer: Layer) -> str:
    """Returns the layer's given name, or its class name if it was not given one."""
    kind = type(layer).__name__
    if layer.name.startswith(kind + "_") or not layer.name:
        return kind
    return layer.name.replace("/", "|")


def walk(
    layer: Layer, tree: Any, prefix: str = "", trainable: bool = True
) -> Iterator[tuple[str, Layer, Any, bool]]:
    """Yields (path, layer, subtree, trainable) for each layer that holds own values.

    `tree` is a weights or state tree of `layer`; places of shared layers after the
    first hold no values and are yielded without any. A layer that stacks the values of
    many (`Repeat`) is walked as its block, under 'block.<label>/'.
    """
    trainable = trainable and layer.trainable
    template = layer._template
    if template is not None:
        yield from walk(template, tree, f"{prefix}block.{label(template)}/", trainable)
        return
    children = layer.sublayers
    if not children:
        yield prefix, layer, tree, trainable
        return
    if not isinstance(tree, (tuple, list)):  # A shared combinator's later place.
        return
    for i, child in enumerate(children):
        yield from walk(child, tree[i], f"{prefix}{i}.{label(child)}/", trainable)
    for own in tree[len(children) :]:
        yield f"{prefix}own/", layer, own, trainable


def named_leaves(layer: Layer, tree: Any) -> list[tuple[str, Any]]:
    """Returns [(path, array), ...] of a weights or state tree, in flattening order.

    Example:
      >>> from retrax import layers as tl
      >>> from retrax.shapes import ShapeDtype
      >>> m = tl.Serial(tl.Dense(3), tl.Relu())
      >>> w, _ = m.init(ShapeDtype((1, 2)))
      >>> [(path, a.shape) for path, a in named_leaves(m, w)]
      [('0.Dense/0', (2, 3)), ('0.Dense/1', (3,))]
    """
    named = []
    for prefix, _, subtree, _ in walk(layer, tree):
        for path, leaf in trees.leaves_with_path(subtree):
            named.append(((prefix + path).rstrip("/"), leaf))
    return named


def rebuild(layer: Layer, like: Any, arrays: dict[str, Any]) -> Any:
    """Returns a tree structured as `like` with leaves taken from `arrays` by path.

    Raises:
      CheckpointError: a path is missing.
    """
    leaves = []
    for path, _ in named_leaves(layer, like):
        if path not in arrays:
            raise CheckpointError(f"no value for {path}.")
        leaves.append(arrays[path])
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def trainable_list(layer: Layer, weights: Any) -> list[bool]:
    """Says for each leaf of the weights, in flattening order, whether it is trained."""
    return [
        trainable
        for _, _, subtree, trainable in walk(layer, weights)
        for _ in jax.tree.leaves(subtree)
    ]


def state_sync_list(layer: Layer, state: Any) -> list[tuple[str, str | None]]:
    """Returns (path, state_sync) for each leaf of the state, in flattening order."""
    return [
        ((prefix + path).rstrip("/"), owner.state_sync)
        for prefix, owner, subtree, _ in walk(layer, state)
        for path, _ in trees.leaves_with_path(subtree)
    ]

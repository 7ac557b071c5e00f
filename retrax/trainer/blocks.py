"""What layer-by-layer training goes through: a model cut into units.

`extract_reversible_blocks` finds the reversible runs of a model, through nested Serials
and Repeats. A `Unit` is a chain of layers that visits the device as one, a `Place` is
a layer with its way from the root: where its values lie in the model's trees, and
which key a Serial would give it. Knows layers only; `reversible_trainer` drives it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from retrax.errors import ConfigError
from retrax.layers import tree as layer_tree
from retrax.layers.base import Layer
from retrax.layers.combinators import Serial
from retrax.layers.repeat import Repeat
from retrax.layers.reversing import computes, is_chain, is_reversible
from retrax.layers.stack import arities, ensure_layers

__all__ = [
    "Place",
    "ReversibleBlocks",
    "Unit",
    "assembled",
    "extract_reversible_blocks",
    "init_reversible_blocks",
    "places",
]


@dataclasses.dataclass(frozen=True)
class Place:
    """A layer in a model.

    Attributes:
      layer: the layer; for a block of a `Repeat` the layer all blocks are like.
      path: where it is, as in the names of weights.
      steps: on the way from the root, (number of sublayers, which of them).
      trainable: whether it and all around it are trained.
      in_repeat: whether the last step is a block of a `Repeat`.
    """

    layer: Layer
    path: str
    steps: tuple[tuple[int, int], ...]
    trainable: bool
    in_repeat: bool = False

    def take(self, tree: Any) -> Any:
        """Returns the part of the model's weights or state that is of this place."""
        steps = self.steps[:-1] if self.in_repeat else self.steps
        for _, i in steps:
            tree = tree[i]
        if self.in_repeat:
            tree = jax.tree.map(lambda x: x[self.steps[-1][1]], tree)
        return tree


@dataclasses.dataclass(frozen=True)
class Unit:
    """Layers in a row that visit the device together.

    Attributes:
      kind: 'standard', 'reversible' or 'loss'.
      places: the layers.
      chunk: for a loss, number of tokens to compute at once; 0 means all.
    """

    kind: str
    places: tuple[Place, ...]
    chunk: int = 0

    @property
    def layers(self) -> list[Layer]:
        """The layers."""
        return [place.layer for place in self.places]

    @property
    def n_in(self) -> int:
        """Number of items it takes from the data stack."""
        return arities(self.layers)[0]

    @property
    def n_out(self) -> int:
        """Number of items it leaves in their place."""
        return arities(self.layers)[1]

    @property
    def path(self) -> str:
        """Where it begins."""
        return self.places[0].path

    def take(self, tree: Any) -> tuple[Any, ...]:
        """Returns its part of the model's weights or state."""
        return tuple(place.take(tree) for place in self.places)

    def trainable_list(self, weights: Any) -> list[bool]:
        """Says for each leaf of its weights whether it is trained."""
        return [
            place.trainable and on
            for place, w in zip(self.places, weights, strict=True)
            for on in layer_tree.trainable_list(place.layer, w)
        ]

    def named_leaves(self, weights: Any) -> list[tuple[str, Any]]:
        """Returns [(path, array), ...] of its weights."""
        return [
            (f"{place.path}/{path}".rstrip("/"), leaf)
            for place, w in zip(self.places, weights, strict=True)
            for path, leaf in layer_tree.named_leaves(place.layer, w)
        ]


class ReversibleBlocks(list):
    """A list of (standard layers, reversible layers), and where they come from.

    Attributes:
      model: the model with its loss, a Serial of two layers or of all of them.
      units: what is trained one after the other; the last one is the loss.
      unused: what could not be reversed, and why: [(path, reason), ...].
    """

    def __init__(
        self, blocks: list[Any], model: Layer, units: list[Unit], unused: list[Any]
    ) -> None:
        super().__init__(blocks)
        self.model, self.units, self.unused = model, units, unused


def extract_reversible_blocks(
    layers: Any, loss_chunk_size: int = 0
) -> tuple[ReversibleBlocks, Layer]:
    """Cuts a model with its loss into blocks for `ReversibleSerialTrainer`.

    Serials are looked into at any depth, and a Repeat is taken as its single blocks.
    Weights are not changed; the layers stay those of the model.

    Args:
      layers: [model, loss], or a model that ends with its loss.
      loss_chunk_size: number of tokens (rows, where there are no sequences) for which
        the loss and the layers before it that treat each token alone are computed at
        once; 0 means all.

    Returns:
      (blocks, loss layer): blocks is a list of (standard layers, reversible layers);
      the loss layer is the last layer with weights and all that comes after.

    Raises:
      ValueError: the last layer is reversible, so that there is no loss.
      ConfigError: a layer is used in two places; says which.
    """
    if loss_chunk_size < 0 or loss_chunk_size != int(loss_chunk_size):
        raise ValueError(f"loss_chunk_size must be 0 or more, got {loss_chunk_size}.")
    flat = ensure_layers([layers], "extract_reversible_blocks")
    model = flat[0] if len(flat) == 1 else Serial(flat)
    found, unused = _places(model, "", (), True)
    _refuse_shared(found)
    groups = _grouped(found)
    if not groups or groups[-1][0]:
        raise ValueError(
            "The final layer must be a standard loss, not reversible: got "
            f"{found[-1].layer.name if found else 'no layer'}. Pass [model, loss]."
        )
    blocks: list[tuple[list[Layer], list[Layer]]] = []
    units: list[Unit] = []
    *body, (_, tail) = groups
    for reverses, group in body:
        units.append(Unit("reversible" if reverses else "standard", tuple(group)))
        if not blocks or (not reverses and blocks[-1][1]):
            blocks.append(([], []))
        blocks[-1][reverses].extend(place.layer for place in group)
    units.append(Unit("loss", tuple(tail), int(loss_chunk_size)))
    loss = tail[0].layer if len(tail) == 1 else Serial([p.layer for p in tail])
    return ReversibleBlocks(blocks, model, units, unused), loss


def places(model: Layer) -> list[Place]:
    """Returns the layers that a model runs one after another, in order.

    Serials are looked into at any depth, and a Repeat is taken as its single blocks.
    """
    return _places(model, "", (), True)[0]


def _grouped(places: Sequence[Place]) -> list[tuple[bool, list[Place]]]:
    """Cuts a chain in [(reversible or not, places)], each with one layer that matters.

    That is one with weights, or a reversible one that computes, or a block of a Repeat;
    layers without weights go along with the one before.
    """
    groups: list[tuple[bool, list[Place]]] = []
    for place in places:
        reverses = is_reversible(place.layer)
        if not groups or groups[-1][0] != reverses or place.in_repeat:
            groups.append((reverses, []))
        elif _matters(place) and any(map(_matters, groups[-1][1])):
            groups.append((reverses, []))
        groups[-1][1].append(place)
    return groups


def _matters(place: Place) -> bool:
    if is_reversible(place.layer):
        return computes(place.layer)
    return place.layer.has_weights


def _places(
    layer: Layer, path: str, steps: tuple[tuple[int, int], ...], trainable: bool
) -> tuple[list[Place], list[tuple[str, str]]]:
    """Lists the layers that a chain runs, and what is reversible but hidden in them."""
    trainable = trainable and layer.trainable
    n = layer.n if isinstance(layer, Repeat) else len(layer.sublayers)
    if isinstance(layer, Repeat):
        places = [
            Place(layer.block, f"{path}/block {i}", (*steps, (n, i)), trainable, True)
            for i in range(n)
        ]
        return places, [] if is_reversible(layer.block) else _hidden(layer.block, path)
    if not is_chain(layer):
        place = Place(layer, path, steps, trainable)
        return [place], [] if is_reversible(layer) else _hidden(layer, path)
    found: list[Place] = []
    unused: list[tuple[str, str]] = []
    for i, child in enumerate(layer.sublayers):
        name = f"{path}/{i}.{layer_tree.label(child)}".lstrip("/")
        more, hidden = _places(child, name, (*steps, (n, i)), trainable)
        found += more
        unused += hidden
    return found, unused


def _hidden(layer: Layer, path: str) -> list[tuple[str, str]]:
    """Reversible layers below a layer that does not run them in a chain."""
    found = []
    for child in layer.sublayers:
        if is_reversible(child) and computes(child):
            found.append((path, f"{child.name} is inside of {layer.name}"))
        else:
            found += _hidden(child, path)
    return found


def _refuse_shared(places: Sequence[Place]) -> None:
    seen: dict[int, str] = {}
    for place in places:
        if place.in_repeat and place.steps[-1][1]:
            continue
        for layer in {id(x): x for x in _below(place.layer)}.values():
            if not layer.has_weights:
                continue  # What has no values may be anywhere.
            other = seen.setdefault(id(layer), place.path)
            if other != place.path:
                raise ConfigError(
                    f"the layer {layer.name} is used at {other} and at {place.path}: "
                    "layer-by-layer training updates a layer as soon as it has its "
                    "gradient, so each needs weights of its own. Use a second layer, "
                    "or StepTrainer, which reverses as well."
                )


def _below(layer: Layer) -> list[Layer]:
    return [layer, *(x for child in layer.sublayers for x in _below(child))]


def assembled(model: Layer, units: Sequence[Unit], values: Sequence[Any]) -> Any:
    """Returns the model's weights (or state) made of those of all units."""
    table = {
        place.steps: value
        for unit, own in zip(units, values, strict=True)
        for place, value in zip(unit.places, own, strict=True)
    }

    def build(layer: Layer, steps: tuple[tuple[int, int], ...]) -> Any:
        if steps in table:
            return table[steps]
        if isinstance(layer, Repeat):
            blocks = [table[*steps, (layer.n, i)] for i in range(layer.n)]
            return jax.tree.map(lambda *xs: np.stack(xs), *blocks)
        n = len(layer.sublayers)
        return tuple(build(x, (*steps, (n, i))) for i, x in enumerate(layer.sublayers))

    return build(model, ())


def init_reversible_blocks(
    blocks: Any, loss_layer: Layer, input_signature: Any, rng: Any
) -> None:
    """Initialises the layers of blocks as the whole model would be, on the host.

    Args:
      blocks: from `extract_reversible_blocks`, or a list of (standard layers,
        reversible layers).
      loss_layer: what comes after the blocks.
      input_signature: signature of a batch.
      rng: random key.
    """
    model = model_of(blocks, loss_layer)[0]
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX was started without it.
        device = jax.local_devices()[0]
    with jax.default_device(device):
        model.init(input_signature, rng=jax.device_put(rng, device))


def model_of(blocks: Any, loss_layer: Layer) -> tuple[Layer, list[Unit]]:
    """Returns (model with loss, units) of blocks in either form.

    Raises:
      TypeError: blocks is no list of (standard layers, reversible layers).
      ValueError: a layer of the second part is not reversible, or the loss is.
    """
    if isinstance(blocks, ReversibleBlocks):
        return blocks.model, blocks.units
    flat: list[Layer] = []
    for i, block in enumerate(blocks):
        if not isinstance(block, (tuple, list)) or len(block) != 2:
            raise TypeError(
                f"block {i} must be (standard layers, reversible layers), got {block!r}"
                "; extract_reversible_blocks(model) makes such blocks."
            )
        standard, reverses = (ensure_layers([part], "blocks") for part in block)
        for layer in reverses:
            if not is_reversible(layer):
                raise ValueError(
                    f"block {i}: {layer.name} is among the reversible layers but "
                    "cannot be reversed."
                )
        flat += [*standard, *reverses]
    if is_reversible(loss_layer):
        raise ValueError(
            "The final layer must be a standard loss, not reversible: got "
            f"{loss_layer.name}."
        )
    extracted, _ = extract_reversible_blocks([Serial(flat), loss_layer])
    return extracted.model, extracted.units

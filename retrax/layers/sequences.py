"""State that belongs to one sequence: caches, positions, carries of decoding loops.

Above `base`, which knows the hooks `start_state`, `check_own_state` and `own_limit`;
this module runs them over a tree of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from retrax import trees
from retrax.layers.base import Layer, State, is_marker

__all__ = [
    "advance",
    "check_state",
    "initial_state",
    "longest_sequence",
    "refuse_overrun",
]


def initial_state(layer: Layer, state: State) -> State:
    """Returns `state` as it is before the first token of a sequence.

    Caches are empty and positions 0 again; what was learned, like BatchNorm's running
    averages, stays. Pure, so it can be part of a compiled sampler; `Layer.reset_state`
    does it to the layer's own state.
    """
    return _map_own(layer, state, lambda owner, own: owner.start_state(own))


def check_state(layer: Layer, state: State) -> None:
    """Finds out whether a sequence outgrew a buffer of the model.

    Compiled code cannot raise: there, outputs past the end of a cache are NaN. Call
    this after a compiled decoding loop to get an error that names the limit instead.
    Traced values are not looked at.

    Raises:
      ValueError: a cache or a table of positions is too short; names its limit.
    """

    def check(owner: Layer, own: State) -> State:
        if jax.tree.leaves(own) and trees.is_concrete(own):
            owner.check_own_state(own)
        return own

    _map_own(layer, state, check)


def longest_sequence(layer: Layer) -> int | None:
    """Returns how many positions a model of mode 'predict' can keep; None for any."""
    limits = [layer.own_limit()]
    limits += [longest_sequence(child) for child in layer.sublayers]
    template = layer._template
    if template is not None:
        limits.append(longest_sequence(template))
    return min((n for n in limits if n is not None), default=None)


def advance(index: Any, n: int) -> tuple[Any, Any]:
    """Returns (index, index + n): where a call's n tokens start, and the next ones."""
    return index, index + jnp.asarray(n, index.dtype)


def refuse_overrun(layer: Layer, index: Any, limit: int, argument: str) -> None:
    """Raises ValueError if a concrete `index` (of any shape) is past `limit`."""
    if not trees.is_concrete(index):
        return
    position = int(np.max(np.asarray(index)))
    if position > limit:
        raise ValueError(
            f"{layer.name} holds {limit} positions ({argument}={limit}), but the "
            f"sequence has reached {position}; make the model with a larger "
            f"{argument}, or begin a new sequence with model.reset_state()."
        )


def _map_own(layer: Layer, state: State, f: Callable[[Layer, State], State]) -> State:
    """Applies f(layer, own state) to each layer that holds state."""
    template = layer._template
    if isinstance(template, Layer):  # All its blocks at once, on a further first axis.
        return _map_own(template, state, f)
    if is_marker(state):
        return state
    children = layer.sublayers
    if not children:
        return f(layer, state)
    if not isinstance(state, (tuple, list)) or len(state) < len(children):
        raise ValueError(
            f"{layer.name} has {len(children)} sublayers but its state has "
            f"{len(state) if isinstance(state, (tuple, list)) else 1} elements; call "
            "init(signature) first."
        )
    n = len(children)
    inner = [_map_own(c, s, f) for c, s in zip(children, state, strict=False)]
    return (*inner, *(f(layer, own) for own in state[n:]))

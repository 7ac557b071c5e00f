"""Layers that move or join items of the data stack, without weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from retrax.layers.base import Fn, Layer, PureLayer, to_list
from retrax.layers.stack import packed

__all__ = [
    "Add",
    "Concatenate",
    "Drop",
    "Dup",
    "FlattenList",
    "Gate",
    "Multiply",
    "Select",
    "Split",
    "SubtractTop",
    "Swap",
]


def Select(
    indices: Sequence[int], n_in: int | None = None, name: str | None = None
) -> Layer:
    """Replaces the top n_in stack items by those at `indices`, in that order.

    Args:
      indices: positions in the stack, 0 being the top; an item may be taken repeatedly.
      n_in: number of items taken off; by default just enough for the indices.
      name: name of the layer.

    Example: `Select([0], n_in=2)` drops the second item.
    """
    indices = [int(i) for i in indices]
    needed = max(indices, default=-1) + 1
    n_in = needed if n_in is None else n_in
    if n_in < needed or min(indices, default=0) < 0:
        raise ValueError(
            f"Select({indices}, n_in={n_in}) reaches outside of its {n_in} inputs; "
            f"indices go from 0 to {n_in - 1}."
        )

    def select(xs: Any) -> Any:
        xs = xs if isinstance(xs, (tuple, list)) else (xs,)
        return packed([xs[i] for i in indices])

    name = name or f"Select{indices}".replace(" ", "")
    return PureLayer(select, n_in=n_in, n_out=len(indices), name=name)


def Drop() -> Layer:
    """Drops the top item of the stack."""
    return Fn("Drop", lambda x: (), n_out=0)


def Dup() -> Layer:
    """Duplicates the top item of the stack."""
    return Fn("Dup", lambda x: (x, x), n_out=2)


def Swap() -> Layer:
    """Swaps the top two items of the stack."""
    return Fn("Swap", lambda x0, x1: (x1, x0), n_out=2)


def Add() -> Layer:
    """Adds two tensors."""
    return Fn("Add", lambda x0, x1: x0 + x1)


def SubtractTop() -> Layer:
    """Subtracts the top tensor from the second one."""
    return Fn("SubtractTop", lambda x0, x1: x1 - x0)


def Multiply() -> Layer:
    """Multiplies two tensors, element by element."""
    return Fn("Multiply", lambda x0, x1: x0 * x1)


def Gate() -> Layer:
    """Mixes (memory, gate, candidate) to gate * memory + (1 - gate) * candidate."""
    return Fn("Gate", lambda m, g, c: g * m + (1.0 - g) * c)


def FlattenList() -> Layer:
    """Flattens nested tuples and lists of tensors into one tuple."""

    def flatten(xs: Any) -> list[Any]:
        if isinstance(xs, (tuple, list)):
            return [x for item in xs for x in flatten(item)]
        return [xs]

    return Fn("FlattenList", lambda xs: tuple(flatten(xs)))


class Concatenate(Layer):
    """Concatenates n_items tensors along one axis."""

    def __init__(self, n_items: int = 2, axis: int = -1) -> None:
        name = "Concatenate" if axis == -1 else f"Concatenate_axis{axis}"
        super().__init__(n_in=n_items, name=name)
        self._axis = axis

    def forward(self, xs: Any) -> Any:
        """Concatenates the tensors."""
        return jnp.concatenate(to_list(xs), self._axis)


class Split(Layer):
    """Splits a tensor into n_items equal parts along one axis."""

    def __init__(self, n_items: int = 2, axis: int = -1) -> None:
        super().__init__(n_out=n_items)
        self._axis = axis

    def forward(self, x: Any) -> Any:
        """Splits the tensor.

        Raises:
          ValueError: the axis does not divide by n_items.
        """
        size = x.shape[self._axis]
        if size % self.n_out:
            raise ValueError(
                f"Split cannot cut axis {self._axis} of size {size} into "
                f"{self.n_out} equal parts."
            )
        return packed(jnp.split(x, self.n_out, self._axis))

"""Reversible layers: those whose inputs can be computed from their outputs.

What is reversible need not keep its inputs for the backward pass, so that memory does
not grow with depth. This module has the base and the layers that only move or reshape
data; couplings are in `reversible_residual`, and `reversible_run` differentiates runs
of such layers. Above `base` and `stack`; under the combinators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from retrax.layers.base import Layer, State, Weights, to_list
from retrax.layers.stack import packed
from retrax.shapes import signature

__all__ = [
    "ReversibleConcatenatePair",
    "ReversibleLayer",
    "ReversiblePrintShape",
    "ReversibleReshape",
    "ReversibleSelect",
    "ReversibleSwap",
]


class ReversibleLayer(Layer):
    """Base of layers that can compute their inputs from their outputs.

    Subclasses write `forward` and `reverse`, and may write a faster
    `reverse_and_grad`. In a model such layers are differentiated by reversing, unless
    the trainer is asked for memory='plain'. Reversing has to find the inputs again as
    they were up to rounding: the gradients are taken there.

    Example:
      >>> class AddOne(ReversibleLayer):
      ...     def forward(self, x):
      ...         return x + 1
      ...     def reverse(self, output, weights=(), state=(), new_state=(), rng=None):
      ...         return output - 1
      >>> x, (grad, _) = AddOne().reverse_and_grad(jnp.ones(2), jnp.array([3., 4.]))
      >>> x.tolist(), grad.tolist()
      ([0.0, 0.0], [3.0, 4.0])
    """

    # True for layers that compute nothing worth forgetting.
    _only_moves = False

    def reverse(
        self,
        output: Any,
        weights: Weights = (),
        state: State = (),
        new_state: State = (),
        rng: Any = None,
    ) -> Any:
        """Computes the inputs from the outputs; to be written by subclasses.

        Args:
          output: what `forward` returned.
          weights: weights used there.
          state: state before it.
          new_state: state after it.
          rng: key used there.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define reverse(): a reversible layer "
            "computes its inputs from its outputs there."
        )

    def reverse_and_grad(
        self,
        output: Any,
        grad: Any,
        weights: Weights = (),
        state: State = (),
        new_state: State = (),
        rng: Any = None,
    ) -> tuple[Any, tuple[Any, Any]]:
        """Computes the inputs, and the gradients there.

        By default the inputs come from `reverse`, and the gradients from a forward pass
        with the old state and the same key.

        Args:
          output: what `forward` returned.
          grad: cotangent of the outputs.
          weights: weights used there.
          state: state before it.
          new_state: state after it.
          rng: key used there.

        Returns:
          (inputs, (cotangent of the inputs, gradients of the weights)).
        """
        inputs = self.reverse(output, weights, state, new_state, rng)

        def forward(x: Any, w: Any) -> Any:
            return self.pure_fn(x, w, state, rng)[0]

        again, vjp = jax.vjp(forward, inputs, weights)
        if signature(to_list(again)) != signature(to_list(output)):
            raise ValueError(
                f"{self.name} is not reversed by its reverse(): from outputs "
                f"{signature(output)} it gives inputs {signature(inputs)}, and those "
                f"give outputs {signature(again)}."
            )
        return inputs, vjp(list(grad) if isinstance(again, list) else grad)


class ReversibleSelect(ReversibleLayer):
    """Copies, reorders and repeats stack items, as `Select`, but drops none.

    Example:
      >>> ReversibleSelect([1, 0, 1])
      ReversibleSelect[1,0,1]_in2_out3
    """

    _only_moves = True

    def __init__(
        self, indices: Sequence[int], n_in: int | None = None, name: str | None = None
    ) -> None:
        """Makes the layer.

        Args:
          indices: for each output, the input it is a copy of.
          n_in: number of inputs; the largest index + 1 by default.
          name: name of the layer.

        Raises:
          ValueError: an input is in no output, so that it could not be found again.
        """
        indices = [int(i) for i in indices]
        largest = max(indices, default=-1)
        n_in = largest + 1 if n_in is None else n_in
        lost = sorted(set(range(n_in)) - set(indices))
        if lost or min(indices, default=-1) < 0 or largest >= n_in:
            raise ValueError(
                f"ReversibleSelect needs each of its {n_in} inputs among its outputs; "
                f"indices {indices} "
                + (f"drop {lost}." if lost else f"go outside of 0 to {n_in - 1}.")
                + " Use Select where items are to be dropped."
            )
        name = name or f"ReversibleSelect{indices}".replace(" ", "")
        super().__init__(n_in=n_in, n_out=len(indices), name=name)
        self._indices = tuple(indices)

    def forward(self, inputs: Any) -> Any:
        """Selects."""
        items = inputs if self.n_in != 1 else (inputs,)
        return packed([items[i] for i in self._indices])

    def reverse(
        self,
        output: Any,
        weights: Weights = (),
        state: State = (),
        new_state: State = (),
        rng: Any = None,
    ) -> Any:
        """Takes each input from its first copy."""
        items = output if self.n_out != 1 else (output,)
        return packed([items[self._indices.index(i)] for i in range(self.n_in)])


class ReversibleSwap(ReversibleSelect):
    """Swaps the two top stack items."""

    def __init__(self) -> None:
        """Makes the layer."""
        super().__init__([1, 0], name="ReversibleSwap")


class ReversibleReshape(ReversibleLayer):
    """Replaces the leading axes of each input by others of the same size."""

    _only_moves = True

    def __init__(
        self, shape1: Sequence[int], shape2: Sequence[int], n_in: int = 1
    ) -> None:
        """Makes the layer.

        Args:
          shape1: leading axes of the inputs.
          shape2: what they become.
          n_in: number of inputs (and outputs).

        Raises:
          ValueError: the two shapes have different sizes.
        """
        self._shape1, self._shape2 = tuple(shape1), tuple(shape2)
        sizes = [_size(s) for s in (self._shape1, self._shape2)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"ReversibleReshape: {self._shape1} has {sizes[0]} elements and "
                f"{self._shape2} has {sizes[1]}; they must be equal."
            )
        name = f"ReversibleReshape_{_text(shape1)}_{_text(shape2)}"
        super().__init__(n_in=n_in, n_out=n_in, name=name)

    def forward(self, inputs: Any) -> Any:
        """Reshapes from shape1 to shape2."""
        return self._reshaped(inputs, self._shape1, self._shape2)

    def reverse(
        self,
        output: Any,
        weights: Weights = (),
        state: State = (),
        new_state: State = (),
        rng: Any = None,
    ) -> Any:
        """Reshapes from shape2 to shape1."""
        return self._reshaped(output, self._shape2, self._shape1)

    def _reshaped(self, xs: Any, old: tuple[int, ...], new: tuple[int, ...]) -> Any:
        items = xs if self.n_in != 1 else (xs,)
        for x in items:
            if tuple(x.shape[: len(old)]) != old:
                raise ValueError(
                    f"{self.name} needs inputs whose leading axes are {old}, got shape "
                    f"{tuple(x.shape)}."
                )
        return packed([x.reshape(new + tuple(x.shape[len(old) :])) for x in items])


class ReversiblePrintShape(ReversibleLayer):
    """Prints its inputs' shapes whenever it is traced, and passes them on."""

    _only_moves = True

    def __init__(self, n_in: int = 1, msg: str = "") -> None:
        """Makes a layer that prints `msg` and the shapes of `n_in` items."""
        super().__init__(n_in=n_in, n_out=n_in, name=f"ReversiblePrintShape_{n_in}")
        self._msg = msg

    def forward(self, inputs: Any) -> Any:
        """Prints and passes on."""
        shapes = ", ".join(f"{x.shape} {x.dtype}" for x in to_list(inputs))
        title = f"PrintShape {self._msg}" if self._msg else "PrintShape"
        print(f"{title}: [{shapes}]")
        return inputs

    def reverse(
        self,
        output: Any,
        weights: Weights = (),
        state: State = (),
        new_state: State = (),
        rng: Any = None,
    ) -> Any:
        """Passes back."""
        return output


class ReversibleConcatenatePair(ReversibleLayer):
    """Joins two inputs along the last axis, and gives the result twice.

    It ends a stack of reversible blocks: (x, y) becomes (r, r), r = concat(x, y).
    """

    _only_moves = True

    def __init__(self) -> None:
        """Makes the layer."""
        super().__init__(n_in=2, n_out=2)

    def forward(self, inputs: Any) -> Any:
        """Joins."""
        x, y = inputs
        if x.shape != y.shape:
            raise ValueError(
                "ReversibleConcatenatePair needs two inputs of one shape, got "
                f"{tuple(x.shape)} and {tuple(y.shape)}."
            )
        joined = jnp.concatenate((x, y), axis=-1)
        return joined, joined

    def reverse(
        self,
        output: Any,
        weights: Weights = (),
        state: State = (),
        new_state: State = (),
        rng: Any = None,
    ) -> Any:
        """Splits the first output in two."""
        x, y = jnp.split(output[0], 2, axis=-1)
        return x, y


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _text(shape: Sequence[int]) -> str:
    return "x".join(str(n) for n in shape)

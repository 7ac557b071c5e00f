"""Loops over an axis: `Scan`, and `Chunk` over parts of the batch.

They build on `combinators.py`; users find them in `control.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from retrax import trees
from retrax.layers.base import Layer, PureLayer, State, to_list
from retrax.layers.combinators import Serial
from retrax.layers.running import emit_of_steps, named_values
from retrax.layers.stack import remember_output
from retrax.shapes import ShapeDtype, signature

__all__ = ["Chunk", "Scan"]


class Scan(Layer):
    """Runs a layer once for each slice along an axis, handing on a carry.

    The layer takes (slices..., carry...) and gives (outputs..., new carry...). Scan
    takes (tensors..., first carry...) and gives (outputs stacked along the axis...,
    last carry...). The layer's state goes through all steps; step i runs with the key
    `fold_in(rng, i)`.

    The state is (state of the layer, carry). The carry is () except in mode 'predict',
    where it is (started, (carry...)): the last carry of a call is then the first one of
    the next call, whose own first carry is ignored. Its structure is that from `init`
    on, so that a decoding loop can be compiled. With `keep_time` it is (state of the
    layer, (carry, number of steps done)), and keys go by that number: calls on the
    parts of a sequence, each with the state of the one before and the same key, draw
    what one call on the whole would draw. `reset_state` begins a new sequence.

    What the layer emits comes out once, with all steps (`running.emit_of_steps`).

    Example:
      >>> from retrax import layers as tl
      >>> step = tl.Fn('Sum', lambda x, total: (x + total,) * 2, n_out=2)
      >>> total, last = tl.Scan(step)((jnp.array([1., 2., 4.]), jnp.array(0.)))
      >>> [float(x) for x in total], float(last)
      ([1.0, 3.0, 7.0], 7.0)
    """

    has_own_state = True

    def __init__(
        self,
        layer: Layer,
        axis: int = 0,
        n_carry: int = 1,
        remat: bool = False,
        mode: str = "train",
        name: str | None = None,
        *,
        keep_time: bool = False,
    ) -> None:
        """Makes a loop over `layer`.

        Args:
          layer: the layer that makes one step.
          axis: the axis of inputs and outputs along which to go; may be negative.
          n_carry: how many of the layer's last inputs and outputs are the carry.
          remat: whether to compute each step again in the backward pass instead of
            keeping what it computed.
          mode: 'train', 'eval', 'viz', or 'predict', which keeps the carry.
          name: name of the layer.
          keep_time: whether the steps of a call go on counting where those of the call
            before ended.

        Raises:
          ValueError: the layer has too few inputs or outputs for that carry.
        """
        if n_carry < 0 or layer.n_in <= n_carry or layer.n_out < n_carry:
            raise ValueError(
                f"Scan(n_carry={n_carry}) needs a layer with more than {n_carry} "
                f"inputs and at least {n_carry} outputs; {layer.name} has "
                f"n_in={layer.n_in}, n_out={layer.n_out}."
            )
        super().__init__(layer.n_in, layer.n_out, name)
        self._sublayers = [layer]
        self._axis = axis
        self._n_carry = n_carry
        self._remat = remat
        self._mode = mode
        self._keep_time = keep_time

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Initialises the layer for one slice."""
        xs, carry = self._parts(input_signature)
        length = self._length(xs)
        layer = self.sublayers[0]
        slices = [ShapeDtype(_without(x.shape, self._axis), x.dtype) for x in xs]
        step_sig = packed([*slices, *carry])
        weights, state = layer.init(step_sig, use_cache=True)
        own: State = ()
        if self._mode == "predict":
            zeros = tuple(jnp.zeros(c.shape, c.dtype) for c in carry)
            own = (jnp.zeros((), bool), zeros)
        if self._keep_time:
            own = (own, jnp.int32(0))
        self.weights, self.state = (weights,), (state, own)
        outputs = to_list(layer.output_signature(step_sig))
        ys, new_carry = self._split_outputs(outputs)
        self._check_carry(carry, new_carry)
        stacked = [ShapeDtype(_with(y.shape, self._axis, length), y.dtype) for y in ys]
        remember_output(self, input_signature, packed([*stacked, *new_carry]))

    def start_state(self, state: State) -> State:
        """Forgets the carry of the calls before."""
        return jax.tree.map(jnp.zeros_like, state)

    def forward(self, inputs: Any) -> Any:
        """Runs the layer along the axis."""
        xs, carry = self._parts(jax.tree.map(jnp.asarray, inputs))
        length = self._length(xs)
        layer, rng = self.sublayers[0], self.rng
        (weights,), (state, own) = self.weights, self.state
        start = 0
        if self._keep_time:
            own, start = own
        if own:
            started, kept = own
            self._check_kept(kept, carry)
            carry = [jnp.where(started, k, c) for k, c in zip(kept, carry, strict=True)]

        def step(loop: Any, sliced: Any) -> Any:
            carry, state = loop
            i, xs = sliced
            key = None if rng is None else jax.random.fold_in(rng, i)
            outputs, new_state, emitted = layer.apply(
                packed([*xs, *carry]), weights, state, key
            )
            ys, new_carry = self._split_outputs(to_list(outputs))
            self._check_carry(carry, new_carry)
            check_state_kept(layer, state, new_state)
            return (tuple(new_carry), new_state), (tuple(ys), named_values(emitted))

        if self._remat:
            step = jax.checkpoint(step, prevent_cse=False)
        moved = tuple(jnp.moveaxis(x, self._axis, 0) for x in xs)
        (carry, state), (ys, emitted) = jax.lax.scan(
            step, (tuple(carry), state), (start + jnp.arange(length), moved)
        )
        emit_of_steps(emitted)
        kept = (jnp.ones((), bool), carry) if own else ()
        self.state = (state, (kept, start + length) if self._keep_time else kept)
        return packed([*(jnp.moveaxis(y, 0, self._axis) for y in ys), *carry])

    def _parts(self, inputs: Any) -> tuple[list[Any], list[Any]]:
        items = to_list(inputs)
        n = self.n_in - self._n_carry
        return items[:n], items[n:]

    def _split_outputs(self, outputs: list[Any]) -> tuple[list[Any], list[Any]]:
        n = self.n_out - self._n_carry
        return outputs[:n], outputs[n:]

    def _length(self, xs: list[Any]) -> int:
        axis = self._axis
        for i, x in enumerate(xs):
            if not -len(x.shape) <= axis < len(x.shape):
                raise ValueError(
                    f"Scan goes along axis {axis}, but input {i} has the shape "
                    f"{tuple(x.shape)}."
                )
        sizes = [x.shape[axis] for x in xs]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"Scan needs inputs of one size along axis {axis}, got {sizes} from "
                f"inputs of shapes {[tuple(x.shape) for x in xs]}."
            )
        return sizes[0]

    def _check_kept(self, kept: Sequence[Any], carry: Sequence[Any]) -> None:
        for old, new in zip(kept, carry, strict=True):
            if old.shape != new.shape:
                raise ValueError(
                    f"{self.name} keeps a carry of shape {old.shape} in mode "
                    f"'predict', but this call's would be {new.shape}: init and later "
                    "calls have to be of one batch size; call model.init with a "
                    "signature of the new one, and set the weights again."
                )
        self._check_carry(kept, carry)

    def _check_carry(self, carry: Sequence[Any], new: Sequence[Any]) -> None:
        for i, (c, n) in enumerate(zip(carry, new, strict=True)):
            expected, got = signature(c), signature(n)
            if expected != got:
                raise ValueError(
                    f"Scan: carry {i} (of {self._n_carry}) has to keep its shape and "
                    f"dtype over all steps: expected {expected}, got {got}."
                )


def Chunk(layer: Layer, chunk_size: int, pass_unchunkable: bool = True) -> Layer:
    """Runs a layer on chunks of the batch, one after another, to save memory.

    Each chunk is computed again in the backward pass.

    Args:
      layer: layer that treats the rows of a batch alike.
      chunk_size: rows in a chunk; below 1 the layer itself is returned.
      pass_unchunkable: take a batch that does not divide as one chunk; else that is
        a ValueError.
    """
    if chunk_size < 1:
        return layer
    if layer.n_in < 1:
        raise ValueError(f"Chunk needs a layer with inputs; {layer.name} has none.")

    def cut(x: Any) -> Any:
        n_rows, size = x.shape[0], chunk_size
        if n_rows % size:
            if not pass_unchunkable:
                raise ValueError(
                    f"Chunk cannot cut a batch of {n_rows} rows into chunks of {size}."
                )
            size = n_rows
        return jnp.reshape(x, (n_rows // size if size else 1, size, *x.shape[1:]))

    def join(x: Any) -> Any:
        return jnp.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))

    return Serial(
        for_each("ReshapeToChunks", cut, layer.n_in),
        Scan(layer, axis=0, n_carry=0, remat=True),
        for_each("ReshapeFromChunks", join, layer.n_out),
    )


# --- Helpers ------------------------------------------------------------------------


def for_each(name: str, f: Any, n: int) -> Layer:
    """Makes a layer that applies `f` to each of n inputs."""

    def apply(xs: Any) -> Any:
        return f(xs) if n == 1 else tuple(f(x) for x in xs)

    return PureLayer(apply, n_in=n, n_out=n, name=name)


def check_state_kept(layer: Layer, old: State, new: State) -> None:
    """Raises ValueError if a layer changed the shape of its state in a loop."""
    difference = trees.difference(old, new)
    if difference is not None:
        raise ValueError(
            f"{layer.name} changes the shape of its state inside a loop or a branch, "
            f"at {difference}."
        )


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    sizes = list(shape)
    del sizes[axis]
    return tuple(sizes)


def _with(shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    sizes = list(shape)
    place = axis if axis >= 0 else len(sizes) + 1 + axis
    if not 0 <= place <= len(sizes):
        raise ValueError(
            f"Scan cannot stack outputs of shape {tuple(shape)} along axis {axis}."
        )
    sizes.insert(place, size)
    return tuple(sizes)


def packed(items: Sequence[Any]) -> Any:
    """Returns a single item bare, several as a tuple."""
    return items[0] if len(items) == 1 else tuple(items)

"""`Repeat`: many equal blocks as one loop, so that depth costs no compile time.

Same place in the order as `control.py`. The block's layer, the *template*, describes
all blocks; it holds no weights itself. The weights of all blocks lie stacked in the
Repeat, which therefore is a leaf of the layer tree; `tree.walk` goes on into the
template for names, trainable marks and state declarations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from retrax import trees
from retrax.layers import sequences
from retrax.layers.base import Layer, State, Weights, to_list
from retrax.layers.combinators import Serial
from retrax.layers.reversible_run import run_blocks_reversibly
from retrax.layers.reversing import is_reversible
from retrax.layers.running import (
    current_run,
    emit_of_steps,
    memory_mode,
    named_values,
    open_run,
)
from retrax.layers.stack import ensure_layers, remember_output
from retrax.shapes import signature

__all__ = ["Repeat"]


class Repeat(Layer):
    """Applies n equal blocks one after another, each with weights of its own.

    Computes what `Serial(*[block_fn() for _ in range(n)])` computes, from the same
    initial values and with the same random keys. The blocks run in one
    `jax.lax.scan`, so the time to trace and compile does not grow with n.

    Weights and state are those of one block with a new first axis of size n.
    Values that layers emit inside blocks do not leave the loop.

    Example:
      >>> from retrax import layers as tl
      >>> from retrax.shapes import ShapeDtype
      >>> deep = tl.Repeat(lambda: tl.Residual(tl.Dense(4), tl.Relu()), n=12)
      >>> _ = deep.init(ShapeDtype((2, 4)))
      >>> [w.shape for w in jax.tree.leaves(deep.weights)]
      [(12, 4, 4), (12, 4)]
      >>> [w.shape for w in jax.tree.leaves(deep.block_weights(11))]
      [(4, 4), (4,)]
    """

    def __init__(
        self,
        block_fn: Callable[[], Any] | Layer,
        n: int,
        remat: bool = False,
        unroll: int = 1,
        name: str | None = None,
    ) -> None:
        """Makes n blocks.

        Args:
          block_fn: makes one block (a layer or a list of layers); called once. A layer
            given instead serves as a pattern: its own weights are not used.
          n: number of blocks.
          remat: whether to compute each block again in the backward pass instead of
            keeping what it computed; memory then holds one block's insides and the
            inputs of all.
          unroll: how many blocks to compile as straight code in each turn of the loop.
          name: name of the layer.

        Raises:
          TypeError: the block is no layer.
          ValueError: n < 1, or the block does not leave as many items as it takes.
        """
        block = block_fn
        if not isinstance(block, Layer) and callable(block):
            block = block()
        layers = ensure_layers(block, "Repeat")
        template = layers[0] if len(layers) == 1 else Serial(layers)
        if n < 1 or unroll < 1:
            raise ValueError(f"Repeat needs n >= 1 and unroll >= 1, got {n}, {unroll}.")
        if template.n_in != template.n_out or template.n_in < 1:
            raise ValueError(
                "Repeat needs a block that gives as many outputs as it takes inputs, "
                f"at least one; {template.name} has n_in={template.n_in}, "
                f"n_out={template.n_out}."
            )
        super().__init__(
            template.n_in,
            template.n_out,
            name or f"Repeat_{n}",
            sublayers_to_print=[template],
        )
        self._template = template
        self._n = n
        self._remat = remat
        self._unroll = unroll

    @property
    def block(self) -> Layer:
        """The layer all blocks are like; it holds no weights."""
        return self._template

    @property
    def n(self) -> int:
        """The number of blocks."""
        return self._n

    @property
    def has_weights(self) -> bool:
        """Whether the blocks define how to make weights or state."""
        return self._template.has_weights

    def block_weights(self, i: int) -> Weights:
        """Returns the weights of block i, structured as those of `block`."""
        self._check_place(i)
        return jax.tree.map(lambda w: w[i], self.weights)

    def block_state(self, i: int) -> State:
        """Returns the state of block i, structured as that of `block`."""
        self._check_place(i)
        return jax.tree.map(lambda s: s[i], self.state)

    def set_block_weights(self, i: int, weights: Weights) -> None:
        """Replaces the weights of block i.

        Raises:
          ValueError: there is no block i, or the weights do not fit; says where.
        """
        difference = trees.difference(self.block_weights(i), weights)
        if difference is not None:
            raise ValueError(f"{self.name}: weights do not fit, at {difference}.")
        self.weights = jax.tree.map(
            lambda stacked, w: jnp.asarray(stacked).at[i].set(w), self.weights, weights
        )

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Initialises each block with its own key and stacks the results."""
        _refuse_sharing(self)
        known: dict[int, tuple[Any, Any]] = {}

        def init_one(key: Any) -> tuple[Weights, State]:
            # A run of its own: what it finds must not be stored in the template.
            with open_run("init") as inner:
                inner.output_signatures = known
                result = self._template.init(input_signature, rng=key)
                outputs = self._template.output_signature(input_signature)
            _check_kept(self._template, input_signature, outputs)
            return result

        keys = jax.random.split(self.rng, self._n)
        if trees.is_concrete(keys):
            blocks = [init_one(key) for key in keys]
            self.weights, self.state = jax.tree.map(lambda *xs: jnp.stack(xs), *blocks)
        else:  # Under a trace a loop keeps the trace small.
            self.weights, self.state = jax.lax.map(init_one, keys)
        remember_output(self, input_signature, input_signature)

    def forward(self, x: Any) -> Any:
        """Runs all blocks.

        Reversible blocks are differentiated by reversing, unless `remat` or another
        memory mode is asked for.
        """
        keys = None if self.rng is None else jax.random.split(self.rng, self._n)
        mode = "remat" if self._remat else memory_mode()
        x = jax.tree.map(jnp.asarray, tuple(x) if self.n_in != 1 else x)
        values = (x, self.weights, self.state, keys)
        if mode == "reversible" and is_reversible(self._template):
            y, self.state, emitted = run_blocks_reversibly(
                self._run_all, self._template, self._n, *values
            )
        else:
            y, self.state, emitted = self._run_all(*values, remat=mode == "remat")
        emit_of_steps(emitted)
        sequences.check_state(self._template, self.state)  # Blocks see tracers only.
        return y

    def _run_all(
        self, x: Any, weights: Weights, state: State, keys: Any, remat: bool = False
    ) -> tuple[Any, State, dict[str, Any]]:
        def run_one(x: Any, block: tuple[Weights, State, Any]) -> tuple[Any, Any]:
            y, state, emitted = self._template.apply(x, *block)
            _check_kept(self._template, signature(x), signature(y))
            y = tuple(to_list(y)) if self.n_out != 1 else y
            return y, (state, named_values(emitted))

        if remat:
            run_one = jax.checkpoint(run_one, prevent_cse=False)
        y, (state, emitted) = jax.lax.scan(
            run_one,
            x,
            (weights, state, keys),
            length=self._n,
            unroll=min(self._unroll, self._n),
        )
        return y, state, emitted

    def _check_place(self, i: int) -> None:
        if not 0 <= i < self._n:
            raise ValueError(
                f"{self.name} has no block {i}: they go from 0 to {self._n - 1}."
            )


def _check_kept(block: Layer, inputs: Any, outputs: Any) -> None:
    if to_list(inputs) != to_list(outputs):
        raise ValueError(
            f"Repeat needs blocks that keep shapes and dtypes; {block.name} takes "
            f"{inputs} and gives {outputs}."
        )


def _refuse_sharing(repeat: Repeat) -> None:
    """Refuses a layer that is both in the blocks and elsewhere in the model.

    Stacked weights cannot be one with others; silently untying them would be worse.
    """
    inside = {id(layer): layer for layer in _below(repeat.block, None)}
    run = current_run()
    root = repeat if run is None else run.trace.stack[0][0]
    for layer in _below(root, repeat):
        if id(layer) in inside:
            raise ValueError(
                f"the layer {layer.name} is used both inside and outside of "
                f"{repeat.name}; blocks have weights of their own and can share none."
            )


def _below(layer: Layer, without: Layer | None) -> list[Layer]:
    """The layer and all under it, templates included, `without` one of them."""
    found: list[Layer] = []
    todo = [layer]
    while todo:
        layer = todo.pop()
        if layer is without:
            continue
        found.append(layer)
        todo.extend(layer.sublayers)
        if layer._template is not None:
            todo.append(layer._template)
    return found

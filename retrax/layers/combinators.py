"""Combinators: layers made of layers, joined by a data stack.

A layer takes its n_in inputs from the top of the stack (the front of the tuple) and
puts its n_out outputs there; what lies below passes by untouched. Combinators that
change how sublayers run (loops, branches, memory) are in `control.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrax.layers.base import Layer, to_list
from retrax.layers.reversible_run import find_runs, run_reversibly
from retrax.layers.stack import (
    arities,
    child_rngs,
    ensure_layers,
    inputs_from_stack,
    no_layer,
    outputs_onto_stack,
    packed,
    remember_output,
)
from retrax.layers.stack_layers import Add, Select

__all__ = [
    "Branch",
    "Freeze",
    "Parallel",
    "Residual",
    "Serial",
    "SerialWithSideOutputs",
]


class Serial(Layer):
    """Applies layers one after another, each to the data stack the one before left.

    Example:
      >>> from retrax import layers as tl
      >>> tl.Serial(tl.Dup(), tl.Fn('Half', lambda x: x / 2), tl.Add())
      Serial[
        Dup_out2
        Half
        Add_in2
      ]
    """

    _accepts_longer_stack = True

    def __init__(
        self,
        *sublayers: Any,
        name: str | None = None,
        sublayers_to_print: Sequence[Layer] | None = None,
    ) -> None:
        """Makes a combinator of layers; nested lists and tuples are flattened.

        `Serial()` and `Serial(None)` are the identity of one input.

        Raises:
          TypeError: an item is no layer.
        """
        layers = ensure_layers(sublayers, type(self).__name__)
        n_in, n_out = arities(layers)
        super().__init__(n_in, n_out, name, sublayers_to_print)
        self._sublayers = layers

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Initialises the sublayers along the stack of signatures."""
        weights, states = [], []
        stack = input_signature
        for layer in self.sublayers:
            inputs = inputs_from_stack(stack, layer.n_in)
            w, s = layer.init(inputs, use_cache=True)
            outputs = layer.output_signature(inputs)
            stack = outputs_onto_stack(outputs, stack, layer.n_in)
            weights.append(w)
            states.append(s)
        self.weights, self.state = tuple(weights), tuple(states)
        remember_output(self, input_signature, stack)

    def forward(self, xs: Any) -> Any:
        """Runs the sublayers along the data stack."""
        return self._run_stack(xs)

    def _run_stack(self, stack: Any) -> Any:
        states: list[Any] = []
        rngs = child_rngs(self)
        runs = find_runs(self.sublayers)
        while len(states) < len(self.sublayers):
            i = len(states)
            if i in runs:
                run = slice(i, runs.pop(i))
                done = run_reversibly(
                    self.sublayers[run],
                    stack,
                    self.weights[run],
                    self.state[run],
                    rngs[run],
                )
                if done is not None:
                    stack = done[0]
                    states += done[1]
                    continue
            layer = self.sublayers[i]
            inputs = inputs_from_stack(stack, layer.n_in)
            outputs, s = layer.pure_fn(
                inputs, self.weights[i], self.state[i], rngs[i], use_cache=True
            )
            stack = outputs_onto_stack(outputs, stack, layer.n_in)
            states.append(s)
        self.state = tuple(states)
        return stack

    # A subclass with another forward is no chain; see `reversible_run.is_chain`.
    _chain_forward = forward


class Parallel(Layer):
    """Applies layers side by side, each to its own inputs from the stack.

    The first layer takes the topmost inputs; outputs are put back in order.
    None stands for the identity, a list for a Serial of its items.
    """

    def __init__(
        self,
        *sublayers: Any,
        name: str | None = None,
        sublayers_to_print: Sequence[Layer] | None = None,
    ) -> None:
        """Makes a combinator of at least two layers.

        Raises:
          ValueError: there are fewer than two.
          TypeError: an item is no layer.
        """
        layers = [_layer_or_serial(s, i) for i, s in enumerate(sublayers)]
        if len(layers) < 2:
            raise ValueError(
                f"Parallel needs at least two layers, got {len(layers)}; for one layer "
                "use it as it is, for a chain use Serial."
            )
        super().__init__(
            sum(s.n_in for s in layers),
            sum(s.n_out for s in layers),
            name,
            sublayers_to_print,
        )
        self._sublayers = layers

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Initialises every sublayer for its own part of the inputs."""
        weights, states, outputs = [], [], []
        for layer, sig in zip(
            self.sublayers, self._parts(input_signature), strict=True
        ):
            w, s = layer.init(sig, use_cache=True)
            outputs.extend(to_list(layer.output_signature(sig)))
            weights.append(w)
            states.append(s)
        self.weights, self.state = tuple(weights), tuple(states)
        remember_output(self, input_signature, packed(outputs))

    def forward(self, inputs: Any) -> Any:
        """Runs every sublayer on its own part of the inputs."""
        outputs, states = [], []
        parts = self._parts(inputs)
        for layer, x, w, s, rng in zip(
            self.sublayers,
            parts,
            self.weights,
            self.state,
            child_rngs(self),
            strict=True,
        ):
            y, s = layer.pure_fn(x, w, s, rng, use_cache=True)
            outputs.extend(to_list(y) if layer.n_out != 1 else [y])
            states.append(s)
        self.state = tuple(states)
        return packed(outputs)

    def _parts(self, inputs: Any) -> list[Any]:
        rest = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        parts = []
        for layer in self.sublayers:
            parts.append(inputs_from_stack(rest, layer.n_in))
            rest = rest[layer.n_in :]
        return parts


def Branch(*layers: Any, name: str = "Branch") -> Layer:
    """Applies layers side by side, all to the same inputs from the top of the stack.

    Example: `Branch(Fn('X', lambda x: x), Dup())` takes x and gives (x, x, x).
    None stands for the identity; a single layer is returned as it is.
    """
    if len(layers) == 1:
        return _layer_or_serial(layers[0], 0)
    parallel = Parallel(*layers)
    indices = [i for layer in parallel.sublayers for i in range(layer.n_in)]
    n_in = max(layer.n_in for layer in parallel.sublayers)
    return Serial(
        Select(indices, n_in=n_in),
        parallel,
        name=name,
        sublayers_to_print=[*layers],  # As the user wrote them, None included.
    )


def Residual(*layers: Any, shortcut: Any = None) -> Layer:
    """Adds the output of a Serial of `layers` to its input.

    Args:
      *layers: layers that keep the shape of their first input.
      shortcut: layer for the other arm; None passes the input on unchanged. It comes
        first, so further outputs of `layers` stay below the sum.
    """
    flat = ensure_layers(layers, "Residual")
    layer = flat[0] if len(flat) == 1 else Serial(flat)
    return Serial(Branch(shortcut, layer), Add())


class SerialWithSideOutputs(Layer):
    """Serial whose layers each put their last outputs aside.

    After every layer its last `n_side_outputs` outputs leave the stack; in the end
    they lie below what the last layer left, in order.
    """

    def __init__(
        self,
        layers: Any,
        n_side_outputs: int | Sequence[int] = 1,
        name: str | None = None,
    ) -> None:
        """Makes the combinator.

        Args:
          layers: the layers, in order.
          n_side_outputs: how many outputs of each layer are put aside; one number for
            all or one for each.
          name: name of the layer.
        """
        flat = ensure_layers([layers], "SerialWithSideOutputs")
        if isinstance(n_side_outputs, int):
            n_side_outputs = [n_side_outputs] * len(flat)
        if len(n_side_outputs) != len(flat):
            raise ValueError(
                f"n_side_outputs: {len(n_side_outputs)} items for {len(flat)} layers."
            )
        running = needed = 0
        for layer, n_side in zip(flat, n_side_outputs, strict=True):
            running += layer.n_in
            needed = max(needed, running)
            running -= layer.n_out - n_side
        super().__init__(needed, needed - running + sum(n_side_outputs), name)
        self._sublayers = flat
        self._n_side_outputs = n_side_outputs

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Initialises the sublayers along the stack of signatures."""
        weights, states = [], []

        def run(layer: Layer, _: int, inputs: Any) -> Any:
            w, s = layer.init(inputs, use_cache=True)
            weights.append(w)
            states.append(s)
            return layer.output_signature(inputs)

        outputs = self._run(input_signature, run)
        self.weights, self.state = tuple(weights), tuple(states)
        remember_output(self, input_signature, outputs)

    def forward(self, xs: Any) -> Any:
        """Runs the sublayers, moving side outputs out of the way."""
        states = []
        rngs = child_rngs(self)

        def run(layer: Layer, i: int, inputs: Any) -> Any:
            y, s = layer.pure_fn(
                inputs, self.weights[i], self.state[i], rngs[i], use_cache=True
            )
            states.append(s)
            return y

        outputs = self._run(xs, run)
        self.state = tuple(states)
        return outputs

    def _run(self, stack: Any, run: Any) -> Any:
        side: list[Any] = []
        for i, (layer, n_side) in enumerate(
            zip(self.sublayers, self._n_side_outputs, strict=True)
        ):
            items = to_list(stack)
            outputs = to_list(run(layer, i, inputs_from_stack(stack, layer.n_in)))
            n_main = len(outputs) - n_side
            side.extend(outputs[n_main:])
            stack = tuple(outputs[:n_main] + items[layer.n_in :])
        return packed([*to_list(stack), *side])


def Freeze(*layers: Any) -> Layer:
    """Makes layers untrainable: no gradient, no decay, no optimizer slot.

    A single layer is returned itself, so its weights keep their path.
    """
    flat = ensure_layers(layers, "Freeze")
    layer = flat[0] if len(flat) == 1 else Serial(flat)
    layer.trainable = False
    return layer


def _layer_or_serial(item: Any, place: int) -> Layer:
    if item is None or isinstance(item, (tuple, list)):
        return Serial(item)
    if not isinstance(item, Layer):
        raise TypeError(f"item {place} is no layer but {no_layer(item)}")
    return item

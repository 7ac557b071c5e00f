"""`LoRA`: trains a layer by a low-rank change of its matrix, the rest frozen.

Above `base` and `stack`. `merge_lora` and `insert_lora` go between the weights of a
model with LoRA layers and those of the same model without.
"""

from __future__ import annotations

from typing import Any

import gin
import jax
import jax.numpy as jnp

from retrax.layers import initializers as init
from retrax.layers.base import Layer, State, Weights, is_marker
from retrax.layers.stack import child_rngs, remember_output

__all__ = ["LoRA", "insert_lora", "merge_lora"]


@gin.configurable(module="retrax.layers")
class LoRA(Layer):
    """Adds (alpha / rank) x A B to a frozen layer that maps x to x W + ...

    Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685, equation 3. B starts at 0,
    so at first the layer is the one it wraps. Only A (d_in, rank) and B (rank, d_out)
    are trained. Weights: (those of the layer, (A, B)).

    x: (..., d_in) float, y: (..., d_out). The layer has one input, one output, and one
    matrix of shape (d_in, d_out) among its weights, as `Dense` has; it becomes
    untrainable itself.

    Example:
      >>> from retrax import layers as tl
      >>> from retrax.shapes import ShapeDtype
      >>> plain = tl.Serial(tl.Dense(3), tl.Relu())
      >>> _ = plain.init(ShapeDtype((2, 4)))  # ... and training, or init_from_file
      >>> tuned = tl.Serial(tl.LoRA(tl.Dense(3), rank=1), tl.Relu())
      >>> _ = tuned.init(ShapeDtype((2, 4)))
      >>> tuned.weights = tl.insert_lora(tuned, plain.weights)
      >>> x = jnp.ones((2, 4))
      >>> bool((tuned(x) == plain(x)).all())  # ... and training again
      True
      >>> plain.weights, plain.state = tl.merge_lora(tuned)
    """

    def __init__(
        self,
        layer: Layer,
        rank: int = 8,
        alpha: float | None = None,
        kernel_initializer: Any = None,
        name: str | None = None,
    ) -> None:
        """Wraps a layer.

        Args:
          layer: the layer to change.
          rank: columns of A.
          alpha: the change is multiplied by alpha / rank; None: by 1.
          kernel_initializer: makes A from (shape, rng); normal with variance 1 / d_in
            by default.
          name: name of the layer.

        Raises:
          TypeError: the layer is no layer.
          ValueError: it has several inputs or outputs, or rank is not positive.
        """
        if not isinstance(layer, Layer):
            raise TypeError(f"LoRA wraps a layer, got {layer!r}.")
        if (layer.n_in, layer.n_out) != (1, 1):
            raise ValueError(
                f"LoRA wraps a layer with one input and output; {layer.name} has "
                f"n_in={layer.n_in}, n_out={layer.n_out}."
            )
        if rank < 1:
            raise ValueError(f"LoRA needs rank of at least 1, got {rank}.")
        super().__init__(name=name)
        layer.trainable = False
        self._scale = 1.0 if alpha is None else alpha / rank
        self._sublayers = [layer, _LowRank(rank, self._scale, kernel_initializer)]

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Initialises the layer, and A and B by its input and output."""
        layer, low_rank = self.sublayers
        w, s = layer.init(input_signature, use_cache=True)
        output = layer.output_signature(input_signature)
        if not is_marker(w):
            _matrix_index(self, w, (input_signature.shape[-1], output.shape[-1]))
        ab, empty = low_rank.init((input_signature, output), use_cache=True)
        self.weights, self.state = (w, ab), (s, empty)
        remember_output(
            self,
            input_signature,
            low_rank.output_signature((input_signature, output)),
        )

    def forward(self, x: Any) -> Any:
        """Computes what the layer does, and adds the change."""
        layer, low_rank = self.sublayers
        rngs = child_rngs(self)
        y, s = layer.pure_fn(x, self.weights[0], self.state[0], rngs[0], use_cache=True)
        y, empty = low_rank.pure_fn(
            (x, y), self.weights[1], self.state[1], rngs[1], use_cache=True
        )
        self.state = (s, empty)
        return y

    def merged(self, weights: Weights) -> Weights:
        """Returns the weights of the wrapped layer with the change in its matrix.

        Args:
          weights: (those of the layer, (A, B)), all of them with equal first axes more
            if they are stacked (`Repeat`).
        """
        base, (a, b) = weights
        i = _matrix_index(self, base, (a.shape[-2], b.shape[-1]))
        leaves, structure = jax.tree.flatten(base)
        change = self._scale * jnp.matmul(a, b)
        leaves[i] = (leaves[i] + change).astype(leaves[i].dtype)
        return jax.tree.unflatten(structure, leaves)


def merge_lora(
    layer: Layer, weights: Weights = None, state: State = None
) -> tuple[Weights, State]:
    """Returns (weights, state) for the same model without LoRA layers.

    Matrices are W + (alpha / rank) A B, so the outputs are the same up to rounding.

    Args:
      layer: a model with LoRA layers, also inside of Repeat.
      weights: its weights; None: those it holds.
      state: its state; None: that which it holds.
    """
    weights = layer.weights if weights is None else weights
    state = layer.state if state is None else state

    def merged(lora: LoRA, weights: Weights) -> Weights:
        base = _without(lora.sublayers[0], weights[0], merged)
        return lora.merged((base, weights[1]))

    return (
        _without(layer, weights, merged),
        _without(layer, state, lambda lora, s: _without_state(lora, s)),
    )


def insert_lora(layer: Layer, plain_weights: Weights) -> Weights:
    """Returns the model's weights with those of the same model without LoRA put in.

    A and B stay as the model holds them.

    Args:
      layer: an initialised model with LoRA layers.
      plain_weights: weights of the model without.

    Raises:
      ValueError: the two do not fit; says at which layer.
    """
    return _inserted(layer, layer.weights, plain_weights)


class _LowRank(Layer):
    """Maps (x, y) to y + scale x A B."""

    def __init__(self, rank: int, scale: float, kernel_initializer: Any) -> None:
        super().__init__(n_in=2, name="LowRank")
        self._rank = rank
        self._scale = scale
        self._kernel_initializer = kernel_initializer or init.LeCunNormalInitializer()

    def init_weights_and_state(self, input_signature: Any) -> None:
        x, y = input_signature
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"LoRA needs float inputs, got {x.dtype}.")
        a = self._kernel_initializer((x.shape[-1], self._rank), self.rng)
        self.weights = (a, jnp.zeros((self._rank, y.shape[-1]), a.dtype))

    def forward(self, inputs: Any) -> Any:
        x, y = inputs
        a, b = self.weights
        return y + (self._scale * jnp.dot(jnp.dot(x, a), b)).astype(y.dtype)


def _matrix_index(lora: LoRA, weights: Weights, shape: tuple[int, int]) -> int:
    """Which leaf of a layer's weights is its matrix.

    Raises:
      ValueError: none or several have the shape.
    """
    shapes = [tuple(w.shape) for w in jax.tree.leaves(weights)]
    places = [i for i, s in enumerate(shapes) if len(s) >= 2 and s[-2:] == shape]
    if len(places) != 1:
        raise ValueError(
            f"LoRA needs a layer with one matrix of shape {shape}, from its input to "
            f"its output; {lora.sublayers[0].name} has weights of shapes {shapes}."
        )
    return places[0]


def _without(layer: Layer, tree: Any, unwrap: Any) -> Any:
    """Replaces the parts of a weights or state tree that belong to LoRA layers."""
    if is_marker(tree):
        return tree
    if isinstance(layer, LoRA):
        return unwrap(layer, tree)
    template = layer._template
    if template is not None:
        return _without(template, tree, unwrap)
    n = len(layer.sublayers)
    if not n or not isinstance(tree, (tuple, list)):
        return tree
    parts = [
        _without(child, part, unwrap)
        for child, part in zip(layer.sublayers, tree, strict=False)
    ]
    return (*parts, *tree[n:])


def _without_state(lora: LoRA, state: State) -> State:
    return _without(lora.sublayers[0], state[0], _without_state)


def _inserted(layer: Layer, weights: Weights, plain: Weights) -> Weights:
    if is_marker(weights):
        return weights
    if isinstance(layer, LoRA):
        return (_inserted(layer.sublayers[0], weights[0], plain), weights[1])
    template = layer._template
    if template is not None:
        return _inserted(template, weights, plain)
    n = len(layer.sublayers)
    if n:
        n_got = len(plain) if isinstance(plain, (tuple, list)) else 1
        if n_got != n:
            raise ValueError(f"{layer.name} has {n} sublayers, {n_got} are given.")
        return tuple(map(_inserted, layer.sublayers, weights, plain))
    shapes = [[tuple(x.shape) for x in jax.tree.leaves(t)] for t in (weights, plain)]
    if jax.tree.structure(weights) != jax.tree.structure(plain) or (
        shapes[0] != shapes[1]
    ):
        raise ValueError(
            f"{layer.name} has weights of shapes {shapes[0]}, {shapes[1]} are given."
        )
    return plain

"""Layers without inputs, which put a tensor of their own on the data stack.

Above `base` and `running`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from retrax.layers.base import Layer
from retrax.layers.running import data_axis

__all__ = ["RandomUniform", "Weights"]


class Weights(Layer):
    """Takes no inputs and puts a trainable tensor on the stack."""

    def __init__(
        self,
        initializer: Callable[..., Any],
        shape: int | Sequence[int] = (),
        use_bfloat16: bool = False,
        name: str | None = None,
    ) -> None:
        """Makes a layer of one weight.

        Args:
          initializer: makes the weight from (shape, rng).
          shape: its shape.
          use_bfloat16: keeps it in bfloat16.
          name: name of the layer.
        """
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        super().__init__(n_in=0, n_out=1, name=name or f"Weights_{shape}")
        self._initializer = initializer
        self._shape = shape
        self._use_bfloat16 = use_bfloat16

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes the weight."""
        w = self._initializer(self._shape, self.rng)
        self.weights = w.astype(jnp.bfloat16) if self._use_bfloat16 else w

    def forward(self, x: Any) -> Any:
        """Returns the weight."""
        return self.weights


class RandomUniform(Layer):
    """Takes no inputs and puts uniform random numbers on the stack."""

    def __init__(
        self,
        min_val: float = 0.0,
        max_val: float = 1.0,
        shape: Sequence[int] = (),
        dtype: Any = jnp.float32,
        sync: bool = False,
        name: str | None = None,
    ) -> None:
        """Makes a source of random numbers in [min_val, max_val).

        Args:
          min_val: lower end.
          max_val: upper end, excluded.
          shape: of the output.
          dtype: of the output, floating or integer.
          sync: gives all devices of a training step the same numbers.
          name: name of the layer.
        """
        super().__init__(n_in=0, n_out=1, name=name)
        self._min_val = min_val
        self._max_val = max_val
        self._shape = tuple(shape)
        self._dtype = dtype
        self._sync = sync

    def forward(self, x: Any) -> Any:
        """Draws the numbers."""
        integer = jnp.issubdtype(self._dtype, jnp.integer)
        draw: Any = jax.random.randint if integer else jax.random.uniform
        y = draw(
            self.rng,
            self._shape,
            minval=self._min_val,
            maxval=self._max_val,
            dtype=self._dtype,
        )
        axis = data_axis()
        if self._sync and axis is not None:
            first = jax.lax.axis_index(axis) == 0
            y = jax.lax.psum(jnp.where(first, y, jnp.zeros_like(y)), axis)
        return y

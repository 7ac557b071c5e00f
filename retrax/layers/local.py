"""Locally connected layers: convolutions whose weights differ from place to place.

Above `base` and `initializers`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from retrax.layers import initializers as init
from retrax.layers.base import Layer

__all__ = ["LocallyConnected1d"]


class LocallyConnected1d(Layer):
    """Maps windows of a sequence like a convolution, by other weights at each place.

    x: (..., length, d_in), y: (..., length, filters), or with 'VALID' padding
    (..., length - kernel_size + 1, filters). W: (length, kernel_size, d_in, filters)
    belongs to the places of the input: kernel item i at place l adds to the output at
    l + i - (kernel_size - 1) / 2 ('VALID': at l + i - kernel_size + 1).
    The length is fixed at init.
    """

    def __init__(
        self,
        filters: int,
        kernel_size: int,
        kernel_initializer: Callable[..., Any] | None = None,
        bias_initializer: Callable[..., Any] | None = None,
        use_bias: bool = True,
        padding: str = "VALID",
        name: str | None = None,
    ) -> None:
        """Makes a locally connected layer.

        Args:
          filters: number of output features.
          kernel_size: odd length of the window.
          kernel_initializer: makes W; Glorot uniform by default. The axis of places is
            told to it as `nonreceptive_dims=0` if it takes such an argument.
          bias_initializer: makes b, (length of y, filters).
          use_bias: whether there is a b.
          padding: 'VALID', 'SAME' (zeros beyond the ends) or 'WRAP' (a ring).
          name: name of the layer.

        Raises:
          ValueError: kernel_size is even or padding unknown.
        """
        super().__init__(name=name or f"LocallyConnected1d_{filters}_{kernel_size}")
        if kernel_size % 2 != 1:
            raise ValueError(
                f"LocallyConnected1d needs an odd kernel_size, got {kernel_size}."
            )
        if padding not in ("VALID", "SAME", "WRAP"):
            raise ValueError(
                f"padding must be 'VALID', 'SAME' or 'WRAP', got {padding!r}."
            )
        self._filters = filters
        self._kernel_size = kernel_size
        self._kernel_initializer = kernel_initializer or init.GlorotUniformInitializer()
        self._bias_initializer = bias_initializer or init.RandomNormalInitializer(1e-6)
        self._use_bias = use_bias
        self._padding = padding

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes (W, b), or the bare W without bias."""
        if len(input_signature.shape) < 2:
            raise ValueError(
                "LocallyConnected1d needs inputs of shape (..., length, d_in), got "
                f"{input_signature.shape}."
            )
        length, d_in = input_signature.shape[-2:]
        n_places = length
        if self._padding == "VALID":
            n_places = length - self._kernel_size + 1
        if n_places < 1:
            raise ValueError(
                f"a window of kernel_size {self._kernel_size} does not fit into "
                f"length {length}; use padding='SAME' or a smaller window."
            )
        rng_w, rng_b = jax.random.split(self.rng, 2)
        shape_w = (length, self._kernel_size, d_in, self._filters)
        takes = inspect.signature(self._kernel_initializer).parameters
        told = {"nonreceptive_dims": 0} if "nonreceptive_dims" in takes else {}
        w = self._kernel_initializer(shape_w, rng_w, **told)
        if self._use_bias:
            b = self._bias_initializer((n_places, self._filters), rng_b)
            self.weights = (w, b)
        else:
            self.weights = w

    def forward(self, x: Any) -> Any:
        """Computes the sum of all windows' contributions."""
        w, b = self.weights if self._use_bias else (self.weights, 0.0)
        k = self._kernel_size
        # parts[..., l, i, f]: what input place l adds to the output i - k // 2 further.
        parts = jnp.einsum("...ld,lidf->...lif", x, w)
        return b + sum(self._shifted(parts[..., i, :], i - k // 2) for i in range(k))

    def _shifted(self, part: Any, by: int) -> Any:
        length, half = part.shape[-2], self._kernel_size // 2
        rolled = jnp.roll(part, by, axis=-2)
        if self._padding == "WRAP":
            return rolled
        if self._padding == "VALID":
            return rolled[..., half : length - half, :]
        place = jnp.arange(length)[:, None] - by
        return jnp.where((place >= 0) & (place < length), rolled, 0.0)

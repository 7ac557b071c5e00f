"""Positions as places in a grid, each axis of which has a few trained vectors.

Above `positions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import gin
import jax
import jax.numpy as jnp

from retrax.layers import initializers as init
from retrax.layers.base import State
from retrax.layers.positions import _AddsPositions
from retrax.layers.sequences import refuse_overrun

__all__ = ["AxialPositionalEncoding"]


@gin.configurable(module="retrax.layers", denylist=["mode"])
class AxialPositionalEncoding(_AddsPositions):
    """Adds a trained vector that is put together from one vector for each axis.

    Source: Kitaev et al. 2020, https://arxiv.org/abs/2001.04451, section 4 (in full in
    Ho et al. 2019, https://arxiv.org/abs/1912.12180). Position t is a place in a grid
    of the given shape, counted row by row; its vector joins those of its coordinates.
    So prod(shape) positions take sum(shape) vectors.

    x, y: (..., length, sum(d_embs)) float, length at most prod(shape); a shorter
    sequence takes the first places of the grid. In mode 'predict' a call's positions
    follow those of the call before; `model.reset_state()` goes back to 0. A sequence
    that is too long is a ValueError; compiled code that cannot raise gives NaN there,
    see `check_state`.

    Example:
      >>> layer = AxialPositionalEncoding(shape=(2, 3), d_embs=(1, 3))
      >>> x = jnp.zeros((1, 6, 4))
      >>> [w.shape for w in layer.init(x)[0]]
      [(2, 1), (3, 3)]
    """

    def __init__(
        self,
        shape: Sequence[int] = (64, 64, 3),
        d_embs: Sequence[int] = (384, 384, 256),
        kernel_initializer: Callable[..., Any] | None = None,
        dropout: float = 0.0,
        dropout_broadcast_dims: Sequence[int] = (),
        mode: str = "train",
        name: str | None = None,
    ) -> None:
        """Makes the encoding.

        Args:
          shape: sizes of the grid.
          d_embs: sizes of the vectors of each axis; their sum is that of the inputs.
          kernel_initializer: makes the vectors; None for a normal one of deviation 1.
          dropout: chance of an entry of the vectors to be dropped in mode 'train'.
          dropout_broadcast_dims: axes along which entries are dropped together.
          mode: 'train', 'eval' or 'predict'.
          name: name of the layer.

        Raises:
          ValueError: shape and d_embs are not alike in length, or not positive.
        """
        super().__init__(dropout, dropout_broadcast_dims, mode, name)
        self._shape, self._d_embs = tuple(shape), tuple(d_embs)
        sizes = (*self._shape, *self._d_embs)
        if len(self._shape) != len(self._d_embs) or not sizes or min(sizes) < 1:
            raise ValueError(
                f"{self.name} needs one size in d_embs for each axis of shape, all "
                f"positive, got shape={self._shape} and d_embs={self._d_embs}."
            )
        self._kernel_initializer = kernel_initializer or init.RandomNormalInitializer(
            1.0
        )

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes (shape[i], d_embs[i]) for each axis i."""
        super().init_weights_and_state(input_signature)
        d = input_signature.shape[-1]
        if d != sum(self._d_embs):
            raise ValueError(
                f"{self.name}: the sizes d_embs={self._d_embs} have the sum "
                f"{sum(self._d_embs)}, but inputs have {d} features; they must be "
                "equal."
            )
        keys = jax.random.split(self.rng, len(self._shape))
        sizes = zip(self._shape, self._d_embs, keys, strict=True)
        self.weights = tuple(
            self._kernel_initializer((n, d_emb), key) for n, d_emb, key in sizes
        )

    def check_own_state(self, state: State) -> None:
        """Raises ValueError if the sequence is longer than the grid."""
        if self._mode == "predict":
            refuse_overrun(self, state, math.prod(self._shape), "prod(shape)")

    def own_limit(self) -> int | None:
        """Returns the number of places in mode 'predict'."""
        return math.prod(self._shape) if self._mode == "predict" else None

    def _vectors(self, start: Any, n: int, d: int) -> Any:
        n_places = math.prod(self._shape)
        if n > n_places:
            raise ValueError(
                f"{self.name} has a grid of {self._shape}, which is {n_places} places, "
                f"but the inputs have length {n}; give a larger shape."
            )
        left = start + jnp.arange(n)
        inside = (left < n_places)[:, None]
        parts = []
        for size, vectors in zip(self._shape[::-1], self.weights[::-1], strict=True):
            parts.append(vectors[left % size])
            left = left // size
        return jnp.where(inside, jnp.concatenate(parts[::-1], axis=-1), jnp.nan)

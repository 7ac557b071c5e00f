"""Positions added to embeddings.

Above `base` and `sequences`. Positions inside of attention are in `rotary` and
`position_bias`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np

from retrax.layers import initializers as init
from retrax.layers.base import EMPTY_WEIGHTS, Layer, State
from retrax.layers.sequences import advance, refuse_overrun

__all__ = ["PositionalEncoding", "SinCosPositionalEncoding"]

_KINDS = ("sinusoidal", "trainable", "learned")


class _AddsPositions(Layer):
    """Adds a vector to each position; counts positions in mode 'predict'."""

    def __init__(
        self,
        dropout: float,
        dropout_broadcast_dims: Sequence[int],
        mode: str,
        name: str | None,
    ) -> None:
        super().__init__(name=name)
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"{self.name}: dropout must be in [0, 1), got {dropout}.")
        self._dropout = dropout
        self._dropout_broadcast_dims = tuple(dropout_broadcast_dims)
        self._mode = mode

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes the position of mode 'predict'."""
        if len(input_signature.shape) < 2:
            raise ValueError(
                f"{self.name} needs inputs (..., length, d_feature), got "
                f"{tuple(input_signature.shape)}."
            )
        if self._mode == "predict":
            self.state = jnp.zeros((), jnp.int32)

    def start_state(self, state: State) -> State:
        """Goes back to position 0."""
        return jax.tree.map(jnp.zeros_like, state)

    def forward(self, x: Any) -> Any:
        """Adds the vectors of the positions."""
        n = x.shape[-2]
        start: Any = 0
        if self._mode == "predict":
            start, self.state = advance(self.state, n)
            self.check_own_state(self.state)
        elif self._mode == "train":
            start = self._random_start(n)
        px = self._vectors(start, n, x.shape[-1])
        if self._mode == "train" and self._dropout:
            px = self._drop(px)
        return x + px.astype(x.dtype)

    def _drop(self, px: Any) -> Any:
        """Drops entries of the position vectors, for all rows of the batch alike."""
        shape = [1, *px.shape]
        for axis in self._dropout_broadcast_dims:
            shape[axis] = 1
        key = jax.random.fold_in(self._key("dropout"), 1)
        keep = jax.random.bernoulli(key, 1.0 - self._dropout, tuple(shape))[0]
        return jnp.where(keep, px / (1.0 - self._dropout), 0.0)

    def _key(self, why: str) -> Any:
        if self.rng is None:
            raise ValueError(
                f"{self.name} needs a random key in mode 'train' ({why}), got "
                "rng=None; pass rng=jax.random.key(seed), or build the model with "
                "mode='eval'."
            )
        return self.rng

    def _random_start(self, n: int) -> Any:
        return 0

    def _vectors(self, start: Any, n: int, d: int) -> Any:
        raise NotImplementedError


@gin.configurable(module="retrax.layers", denylist=["mode"])
class PositionalEncoding(_AddsPositions):
    """Adds to each embedding a vector that tells its position.

    Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.5: feature
    2i of position t is sin(t / 10000^(2i/d)), feature 2i + 1 the cosine.

    x, y: (..., length, d_feature) float, length at most max_len. In mode 'predict' a
    call's positions follow those of the call before; `model.reset_state()` goes back to
    0. A sequence longer than max_len is a ValueError; compiled code that cannot raise
    gives NaN there, see `check_state`.

    Trax keeps the sinusoids as a trainable weight, so that they are trained, decayed
    and saved; here they are constants unless `kind` says otherwise.
    """

    def __init__(
        self,
        max_len: int = 2048,
        dropout: float = 0.0,
        dropout_broadcast_dims: Sequence[int] = (-2,),
        use_bfloat16: bool = False,
        start_from_zero_prob: float = 1.0,
        max_offset_to_add: int = 0,
        d_feature: int | None = None,
        mode: str = "train",
        kind: str = "sinusoidal",
        name: str | None = None,
    ) -> None:
        """Makes a positional encoding.

        Args:
          max_len: number of positions.
          dropout: chance of an entry of the vectors to be dropped in mode 'train'.
          dropout_broadcast_dims: axes along which entries are dropped together.
          use_bfloat16: makes the vectors, and weights, in bfloat16.
          start_from_zero_prob: chance that a batch starts at position 0 in mode
            'train'; else it starts at a random one.
          max_offset_to_add: that random position is in [0, max_offset_to_add].
          d_feature: size of the vectors, which a trained matrix takes to the size of
            the inputs; None makes them of that size, without a matrix.
          mode: 'train', 'eval' or 'predict'.
          kind: 'sinusoidal' (constant), 'trainable' (weights that start as sinusoids,
            Trax's) or 'learned' (weights that start normal with deviation 0.02).
          name: name of the layer.

        Raises:
          ValueError: an argument is out of range; says which.
        """
        super().__init__(dropout, dropout_broadcast_dims, mode, name)
        if kind not in _KINDS:
            raise ValueError(
                f"PositionalEncoding: kind must be one of {_KINDS}, got {kind!r}."
            )
        if max_len < 1 or not 0 <= max_offset_to_add < max_len:
            raise ValueError(
                "PositionalEncoding needs max_len >= 1 and 0 <= max_offset_to_add < "
                f"max_len, got max_len={max_len}, max_offset_to_add="
                f"{max_offset_to_add}."
            )
        self._max_len = max_len
        self._dtype = jnp.bfloat16 if use_bfloat16 else jnp.float32
        self._start_from_zero_prob = start_from_zero_prob
        self._max_offset_to_add = max_offset_to_add
        self._d_feature = d_feature
        self._kind = kind

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes the table and the matrix, as far as they are trained."""
        super().init_weights_and_state(input_signature)
        d_input = input_signature.shape[-1]
        d = self._d_feature or d_input
        rng_table, rng_matrix = jax.random.split(self.rng, 2)
        table: Any = EMPTY_WEIGHTS
        if self._kind == "trainable":
            table = jnp.asarray(_sinusoids(self._max_len, d), self._dtype)
        elif self._kind == "learned":
            table = 0.02 * jax.random.normal(rng_table, (self._max_len, d))
            table = table.astype(self._dtype)
        if self._d_feature is None:
            self.weights = table
        else:
            matrix = init.GlorotUniformInitializer()((d, d_input), rng_matrix)
            self.weights = (table, matrix.astype(self._dtype))

    def check_own_state(self, state: State) -> None:
        """Raises ValueError if the sequence is longer than max_len."""
        if self._mode == "predict":
            refuse_overrun(self, state, self._max_len, "max_len")

    def own_limit(self) -> int | None:
        """Returns max_len in mode 'predict'."""
        return self._max_len if self._mode == "predict" else None

    def _random_start(self, n: int) -> Any:
        if self._start_from_zero_prob >= 1.0 or not self._max_offset_to_add:
            return 0
        key_zero, key_start = jax.random.split(self._key("random offsets"))
        high = self._max_offset_to_add + 1
        start = jax.random.randint(key_start, (), 0, high)
        at_zero = jax.random.uniform(key_zero) < self._start_from_zero_prob
        return jnp.where(at_zero, 0, start)

    def _vectors(self, start: Any, n: int, d: int) -> Any:
        shifted = self._mode == "train" and not isinstance(start, int)
        shift = self._max_offset_to_add if shifted else 0
        if n + shift > self._max_len:
            started = f" and start at up to {shift}" if shift else ""
            raise ValueError(
                f"{self.name} holds max_len={self._max_len} positions, but the inputs "
                f"have length {n}{started}; make the model with a larger max_len, or "
                "the sequences shorter."
            )
        table, matrix = self.weights, None
        if self._d_feature is not None:
            table, matrix = self.weights
        if self._kind == "sinusoidal":
            d = self._d_feature or d
            table = jnp.asarray(_sinusoids(self._max_len, d), self._dtype)
        if isinstance(start, int):
            px = table[:n]
        else:
            px = jax.lax.dynamic_slice_in_dim(table, start, n)
            px = jnp.where(start + n <= self._max_len, px, jnp.nan)
        return px if matrix is None else jnp.dot(px, matrix)


@gin.configurable(module="retrax.layers", denylist=["mode"])
class SinCosPositionalEncoding(_AddsPositions):
    """Adds sinusoids of any length, in training shifted by a random start.

    The vectors are those of `PositionalEncoding`, computed for each position, so there
    is no longest sequence. As training starts at random positions, no position is
    special, and sequences may go on past the length of training ones.

    x, y: (..., length, d_feature) float. In mode 'predict' a call's positions follow
    those of the call before; `model.reset_state()` goes back to 0.
    """

    def __init__(
        self,
        add_offset: int = 2048,
        dropout: float = 0.0,
        dropout_broadcast_dims: Sequence[int] = (-2,),
        start_from_zero_one_in: int = 2,
        mode: str = "train",
        name: str | None = None,
    ) -> None:
        """Makes the encoding.

        Args:
          add_offset: random starts are in [0, add_offset); 0 for none.
          dropout: chance of an entry of the vectors to be dropped in mode 'train'.
          dropout_broadcast_dims: axes along which entries are dropped together.
          start_from_zero_one_in: one in so many batches starts at 0 in mode 'train'.
          mode: 'train', 'eval' or 'predict'.
          name: name of the layer.
        """
        super().__init__(dropout, dropout_broadcast_dims, mode, name)
        if add_offset < 0 or start_from_zero_one_in < 1:
            raise ValueError(
                "SinCosPositionalEncoding needs add_offset >= 0 and "
                f"start_from_zero_one_in >= 1, got {add_offset} and "
                f"{start_from_zero_one_in}."
            )
        self._add_offset = add_offset
        self._start_from_zero_one_in = start_from_zero_one_in

    def _random_start(self, n: int) -> Any:
        if not self._add_offset:
            return 0
        key_zero, key_start = jax.random.split(self._key("random starts"))
        start = jax.random.randint(key_start, (), 0, self._add_offset)
        one_in = jax.random.randint(key_zero, (), 0, self._start_from_zero_one_in)
        return jnp.where(one_in == 0, 0, start)

    def _vectors(self, start: Any, n: int, d: int) -> Any:
        exponents = np.arange(0, d, 2) / d
        frequencies = jnp.asarray(10000.0**-exponents, jnp.float32)
        positions = (start + jnp.arange(n)).astype(jnp.float32)
        angles = positions[:, None] * frequencies
        pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        return jnp.reshape(pairs, (n, -1))[:, :d]


@functools.lru_cache(maxsize=8)
def _sinusoids(length: int, d: int) -> np.ndarray:
    """(length, d) float64; a NumPy constant, so that a trace cannot leak into it."""
    angles = np.arange(length)[:, None] * 10000.0 ** -(np.arange(0, d, 2) / d)
    pairs = np.stack([np.sin(angles), np.cos(angles)], axis=-1)
    return np.reshape(pairs, (length, -1))[:, :d]

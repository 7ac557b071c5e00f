"""Positions without a greatest one: waves whose phases wander, and time bins.

Above `base` and `sequences`, beside `positions`. Made for sequences that go on after
what was trained on, and for attention over bins of time.
"""

from __future__ import annotations

from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np

from retrax.layers import initializers as init
from retrax.layers.base import Layer, State
from retrax.layers.sequences import advance

__all__ = ["InfinitePositionalEncoding", "TimeBinPositionalEncoding"]

_TRANSFORMS = ("any", "diag", "none")
_N_BIN_FEATURES = 3
_BLOCK = 256  # Positions whose cycles are counted together, see _cycles.
_WALK_SEED, _PHASE_SEED = 0x1F1, 0x9A5E  # Any will do, as long as it stays.


class _GoesOn(Layer):
    """Knows where a call's positions start; counts them in mode 'predict'."""

    def __init__(self, time_bin_length: int | None, mode: str, name: str | None):
        super().__init__(name=name)
        if time_bin_length is not None and time_bin_length < 1:
            raise ValueError(
                f"{self.name} needs a time_bin_length of at least 1 position, got "
                f"{time_bin_length}."
            )
        self._time_bin_length = time_bin_length
        self._mode = mode

    def start_state(self, state: State) -> State:
        """Goes back to position 0."""
        return jax.tree.map(jnp.zeros_like, state)

    def _check_signature(self, sig: Any) -> int:
        """Returns d_feature."""
        least = 1 if self._time_bin_length is None else _N_BIN_FEATURES
        if len(sig.shape) < 2 or sig.shape[-1] < least:
            raise ValueError(
                f"{self.name} needs inputs (..., length, d_feature) with d_feature of "
                f"at least {least}, got {tuple(sig.shape)}."
            )
        return sig.shape[-1]

    def _with_bins(self, y: Any, positions: Any) -> Any:
        """Puts the features of time bins in place of the last ones of y."""
        if self._time_bin_length is None:
            return y
        bins = _bin_features(positions, self._time_bin_length).astype(y.dtype)
        bins = jnp.broadcast_to(bins, (*y.shape[:-1], _N_BIN_FEATURES))
        return jnp.concatenate([y[..., :-_N_BIN_FEATURES], bins], axis=-1)


@gin.configurable(module="retrax.layers", denylist=["mode"])
class InfinitePositionalEncoding(_GoesOn):
    """Adds waves that never repeat, so that there is no longest sequence.

    Feature 2i + p of position t, with p 0 or 1, is the cosine of 2 pi times

        p / 4 + f_i t + n_i(t) / 4 + u

    cycles. The frequencies f_i go geometrically from 1/2 to drift^2 / 2 cycles per
    position. n_i is a random walk of variance `drift` per position, the same in all
    calls: it makes waves forget their origin after about 1 / drift positions. u is
    a random phase of the feature: drawn anew for each call in mode 'train', so that no
    position is special, and the same ones in all others. A trained map follows; then
    it all is added to the inputs.

    x, y: (..., length, d_feature) float. In mode 'predict' a call's positions follow
    those of the call before, any number of them, and cost no more the later they are;
    the state is (positions so far, the walk). `model.reset_state()` goes back to 0.

    Trax draws u anew in evaluation too, so that there, unlike here, mode 'predict' does
    not give what 'eval' gives; its walk is made of other random numbers; and its
    mode 'predict' takes one position at a time.
    """

    def __init__(
        self,
        drift: float = 0.03,
        affine: bool = True,
        transform: str = "any",
        time_bin_length: int | None = None,
        mode: str = "train",
        name: str | None = None,
    ) -> None:
        """Makes the encoding.

        Args:
          drift: variance of the walk, per position, in units of a quarter wave;
            in (0, 1].
          affine: whether there are random phases u.
          transform: the trained map: 'any' (a matrix that starts orthogonal), 'diag' (a
            factor for each feature, softplus of a weight that starts near 0), 'none'.
          time_bin_length: puts the features of `TimeBinPositionalEncoding` in place of
            the last three waves; None does not.
          mode: 'train', 'eval' or 'predict'.
          name: name of the layer.

        Raises:
          ValueError: an argument is out of range; says which.
        """
        super().__init__(time_bin_length, mode, name)
        if transform not in _TRANSFORMS:
            raise ValueError(
                f"{self.name}: transform must be one of {_TRANSFORMS}, got "
                f"{transform!r}."
            )
        if not 0.0 < drift <= 1.0:
            raise ValueError(f"{self.name}: drift must be in (0, 1], got {drift}.")
        self._drift = drift
        self._affine = affine
        self._transform = transform

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes the trained map, and the position of mode 'predict'."""
        d = self._check_signature(input_signature)
        if self._transform == "any":
            self.weights = init.OrthogonalInitializer()((d, d), self.rng)
        elif self._transform == "diag":
            self.weights = jnp.full((d,), 1e-4, jnp.float32)
        if self._mode == "predict":
            walk = jnp.zeros((_n_waves(d),), jnp.float32)
            self.state = (jnp.zeros((), jnp.int32), walk)

    def forward(self, x: Any) -> Any:
        """Adds the waves of the positions."""
        n, d = x.shape[-2:]
        start: Any = 0
        before: Any = 0.0
        if self._mode == "predict":
            index, before = self.state
            start, index = advance(index, n)
        positions = start + jnp.arange(n)
        walk = before + jnp.cumsum(self._steps(positions, d), axis=0)
        if self._mode == "predict":
            self.state = (index, walk[-1] if n else before)
        waves = self._with_bins(self._waves(positions, walk, d), positions)
        if self._transform == "any":
            waves = jnp.dot(waves, self.weights)
        elif self._transform == "diag":
            waves = waves * jax.nn.softplus(self.weights)
        return x + waves.astype(x.dtype)

    def _steps(self, positions: Any, d: int) -> Any:
        """The walk's steps to these positions, (length, waves), of variance drift."""
        key, limit = jax.random.key(_WALK_SEED), (3.0 * self._drift) ** 0.5

        def step(position: Any) -> Any:
            own = jax.random.fold_in(key, position)
            return jax.random.uniform(own, (_n_waves(d),), jnp.float32, -limit, limit)

        return jax.vmap(step)(positions)

    def _waves(self, positions: Any, walk: Any, d: int) -> Any:
        """(length, d) float32."""
        cycles = (_cycles(positions, _frequencies(self._drift, d)) + walk / 4) % 1
        cycles = jnp.stack([cycles, cycles + 0.25], axis=-1)
        cycles = jnp.reshape(cycles, (cycles.shape[0], -1))[:, :d]
        if self._affine:
            cycles = cycles + jax.random.uniform(self._phase_key(), (d,))
        return jnp.cos(2 * jnp.pi * cycles)

    def _phase_key(self) -> Any:
        if self._mode != "train":
            return jax.random.key(_PHASE_SEED)
        if self.rng is None:
            raise ValueError(
                f"{self.name} needs a random key in mode 'train' (random phases), got "
                "rng=None; pass rng=jax.random.key(seed), or build the model with "
                "mode='eval' or affine=False."
            )
        return self.rng


@gin.configurable(module="retrax.layers", denylist=["mode"])
class TimeBinPositionalEncoding(_GoesOn):
    """Puts where a position is among bins of time in place of the last three features.

    With bin b = t // time_bin_length of position t: 1 / (1 + b), t's place in the bin
    as a share of it, in [0, 1), and b mod 2.

    x, y: (..., length, d_feature) float, d_feature at least 3. In mode 'predict' a
    call's positions follow those of the call before; `model.reset_state()` goes back
    to 0.
    """

    def __init__(
        self, time_bin_length: int, mode: str = "train", name: str | None = None
    ) -> None:
        """Makes the encoding.

        Args:
          time_bin_length: positions in a bin.
          mode: 'train', 'eval' or 'predict'.
          name: name of the layer.

        Raises:
          ValueError: the bins are empty.
        """
        super().__init__(time_bin_length, mode, name)

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes the position of mode 'predict'."""
        self._check_signature(input_signature)
        if self._mode == "predict":
            self.state = jnp.zeros((), jnp.int32)

    def forward(self, x: Any) -> Any:
        """Replaces the last three features."""
        start: Any = 0
        if self._mode == "predict":
            start, self.state = advance(self.state, x.shape[-2])
        return self._with_bins(x, start + jnp.arange(x.shape[-2]))


def _n_waves(d: int) -> int:
    return (d + 1) // 2


def _frequencies(drift: float, d: int) -> np.ndarray:
    """(waves,) float64, cycles per position."""
    n = _n_waves(d)
    lowest = drift**2 if d <= 2 else drift ** (2 * n / (d // 2))
    return 0.5 * lowest ** (np.arange(n) / max(n - 1, 1))


def _cycles(positions: Any, frequencies: np.ndarray) -> Any:
    """(length, waves) float32: positions times frequencies, up to whole cycles.

    A single product would lose the phase of late positions in rounding; whole turns of
    each block of positions are left out before they are rounded.
    """
    n = _BLOCK
    of_blocks = jnp.asarray(frequencies * n % 1, jnp.float32)
    inside = jnp.asarray(frequencies, jnp.float32)
    blocks, places = positions[:, None] // n, positions[:, None] % n
    return blocks * of_blocks % 1 + places * inside % 1


def _bin_features(positions: Any, length: int) -> Any:
    """(length of the sequence, 3) float32."""
    b, place = positions // length, positions % length
    return jnp.stack([1 / (1 + b), place / length, (b % 2).astype(jnp.float32)], -1)

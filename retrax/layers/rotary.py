"""Rotary positions: queries and keys turned by angles that grow with the position.

Above `base`; under `attention_cores`, which applies them inside of attention.
"""

from __future__ import annotations

from typing import Any

import gin
import jax
import jax.numpy as jnp

from retrax.layers.base import Layer, State
from retrax.layers.sequences import advance

__all__ = ["Rotate", "RotaryPositions", "rotate"]


@gin.configurable(module="retrax.layers", denylist=["mode"])
class RotaryPositions(Layer):
    """Turns pairs of features by angles proportional to the position.

    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864, equation 34: pair i of
    position t is turned by t * base^(-2i / d). The product of a turned query and a
    turned key then depends on their distance only.

    x: (batch, length, ..., d) float with d even, y the same. Attention layers take it
    as `rotary=`; by itself it starts at position 0, or in mode 'predict' where the call
    before ended.

    Example:
      >>> y = RotaryPositions()(jnp.ones((1, 3, 2)))
      >>> [round(float(a), 3) for a in y[0, 1]]  # Turned by 1 rad.
      [-0.301, 1.382]
    """

    def __init__(
        self,
        base: float = 10000.0,
        fraction: float = 1.0,
        interleaved: bool = False,
        mode: str = "train",
        name: str | None = None,
    ) -> None:
        """Makes a rotation.

        Args:
          base: the longest wave has a length of about 2 pi base positions.
          fraction: share of the features that is turned; the last ones stay.
          interleaved: pairs neighbours (0, 1), (2, 3), ... as the paper; False pairs
            feature i with i + d/2, as most published weights.
          mode: 'predict' goes on where the call before ended.
          name: name of the layer.

        Raises:
          ValueError: base or fraction is out of range.
        """
        super().__init__(name=name)
        if base <= 1 or not 0 < fraction <= 1:
            raise ValueError(
                "RotaryPositions needs base > 1 and fraction in (0, 1], got "
                f"{base} and {fraction}."
            )
        self._base = base
        self._fraction = fraction
        self._interleaved = interleaved
        self._mode = mode

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes the position of mode 'predict'."""
        if self._mode == "predict":
            self.state = jnp.zeros((), jnp.int32)

    def start_state(self, state: State) -> State:
        """Goes back to position 0."""
        return jax.tree.map(jnp.zeros_like, state)

    def forward(self, x: Any) -> Any:
        """Turns the features."""
        if x.ndim < 3:
            raise ValueError(
                f"{self.name} needs inputs (batch, length, ..., d), got {x.shape}."
            )
        start: Any = 0
        if self._mode == "predict":
            start, self.state = advance(self.state, x.shape[1])
        return self.turn(x, start + jnp.arange(x.shape[1]))

    def turn(self, x: Any, positions: Any) -> Any:
        """Returns x (batch, length, ..., d) turned for positions (length,) int."""
        d = x.shape[-1]
        n_turned = 2 * int(d * self._fraction / 2)
        if d % 2 or not n_turned:
            raise ValueError(
                f"{self.name} turns pairs of features, but there are {d} of them"
                + (" per head" if x.ndim > 3 else "")
                + f" (fraction {self._fraction}); use an even number."
            )
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        exponents = jnp.arange(0, n_turned, 2, dtype=dtype) / n_turned
        angles = positions.astype(dtype)[:, None] * self._base**-exponents
        angles = jnp.reshape(
            angles, (x.shape[1], *(1,) * (x.ndim - 3), angles.shape[1])
        )
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        turned = x[..., :n_turned].astype(dtype)
        if self._interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            pairs = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
            y = jnp.reshape(pairs, turned.shape)
        else:
            a, b = jnp.split(turned, 2, axis=-1)
            y = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
        return jnp.concatenate([y.astype(x.dtype), x[..., n_turned:]], axis=-1)


@gin.configurable(module="retrax.layers")
def Rotate() -> Layer:
    """Makes a layer that turns pairs of neighbours in x: (batch, length, d)."""
    return RotaryPositions(interleaved=True, name="Rotate")


def rotate(x: Any) -> Any:
    """Returns x: (batch, length, d) with pairs of neighbours turned by position."""
    return RotaryPositions(interleaved=True).turn(x, jnp.arange(x.shape[1]))

"""`SinCosTimeEmbedding`: features of a number such as a time or a noise level.

Above `base`. Positions of tokens have layers of their own.
"""

from __future__ import annotations

from typing import Any

import gin
import jax.numpy as jnp
import numpy as np

from retrax.layers.base import Layer

__all__ = ["SinCosTimeEmbedding"]


@gin.configurable(module="retrax.layers")
class SinCosTimeEmbedding(Layer):
    """Turns each number t into sines and cosines of d_feature / 2 frequencies.

    y = (sin(f_0 t), ..., sin(f_k t), cos(f_0 t), ..., cos(f_k t)), where f_i goes from
    1 to 1 / max_period in equal steps of its logarithm (Ho et al. 2020,
    https://arxiv.org/abs/2006.11239, appendix B, after Vaswani et al. 2017, whose last
    frequency is a step lower and whose sines and cosines take turns).

    t: (...) int or float, y: (..., d_feature), of t's dtype; float32 if t is int.
    Computed in float32: the error of f_0 t is |t| * 6e-8, so keep |t| below 1e5. No
    weights.

    Example:
      >>> SinCosTimeEmbedding(4, max_period=100.0)(jnp.array([0, 3])).shape
      (2, 4)
    """

    def __init__(
        self, d_feature: int, max_period: float = 10_000.0, name: str | None = None
    ) -> None:
        """Makes an embedding.

        Args:
          d_feature: number of features, even and at least 4.
          max_period: 2 pi times it is the longest period, in units of t; the shortest
            one is 2 pi.
          name: name of the layer.

        Raises:
          ValueError: d_feature is odd or below 4, or max_period not above 1.
        """
        super().__init__(name=name or f"SinCosTimeEmbedding_{d_feature}")
        if d_feature < 4 or d_feature % 2:
            raise ValueError(
                f"d_feature must be even and at least 4, got {d_feature}: half of the "
                "features are sines, half cosines."
            )
        if max_period <= 1:
            raise ValueError(f"max_period must be above 1, got {max_period}.")
        self._d_feature = d_feature
        self._max_period = max_period

    def forward(self, t: Any) -> Any:
        """Computes the features."""
        t = jnp.asarray(t)
        dtype = t.dtype if jnp.issubdtype(t.dtype, jnp.floating) else jnp.float32
        wide = jnp.promote_types(dtype, jnp.float32)
        n = self._d_feature // 2
        frequencies = self._max_period ** -np.linspace(0.0, 1.0, n)
        angles = t[..., None].astype(wide) * jnp.asarray(frequencies, wide)
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(dtype)

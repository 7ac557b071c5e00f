"""Biases of attention scores that depend on the distance of query and key.

Above `base`. Attention layers take these as `position_bias=` and give them the
positions; they are layers so that their weights are trained, and shared by sharing the
instance.
"""

from __future__ import annotations

import math
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np

from retrax.layers.base import Layer

__all__ = ["AlibiBias", "RelativePositionBias"]


@gin.configurable(module="retrax.layers")
class RelativePositionBias(Layer):
    """Learns one number for each head and each bucket of distances.

    Source: Raffel et al. 2020 (T5), https://arxiv.org/abs/1910.10683, section 2.1.
    Half of the buckets are for one distance each, the others grow logarithmically up to
    max_distance; all farther ones share the last.

    Takes (query positions (q,) int, key positions (k,) int), gives (n_heads, q, k).
    The weights are one array (n_buckets, n_heads).
    """

    def __init__(
        self,
        n_heads: int,
        n_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = False,
        name: str | None = None,
    ) -> None:
        """Makes a bias.

        Args:
          n_heads: number of heads of the attention.
          n_buckets: number of buckets.
          max_distance: distances from here on share a bucket.
          bidirectional: half of the buckets for keys after the query. False, for causal
            attention, counts those as distance 0.
          name: name of the layer.

        Raises:
          ValueError: there are too few buckets for max_distance, or too many.
        """
        super().__init__(n_in=2, name=name)
        per_side = n_buckets // 2 if bidirectional else n_buckets
        if n_heads < 1 or per_side < 2 or max_distance <= per_side // 2:
            raise ValueError(
                "RelativePositionBias needs at least 2 buckets on each side and a "
                f"max_distance over half of them, got n_heads={n_heads}, n_buckets="
                f"{n_buckets}, max_distance={max_distance}, bidirectional="
                f"{bidirectional}."
            )
        self._n_heads = n_heads
        self._n_buckets = n_buckets
        self._per_side = per_side
        self._max_distance = max_distance
        self._bidirectional = bidirectional

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes the numbers, normal with deviation 0.02."""
        shape = (self._n_buckets, self._n_heads)
        self.weights = 0.02 * jax.random.normal(self.rng, shape)

    def forward(self, inputs: Any) -> Any:
        """Looks up the numbers."""
        queries, keys = inputs
        behind = queries[:, None] - keys[None, :]
        return jnp.moveaxis(self.weights[self._bucket(behind)], -1, 0)

    def _bucket(self, behind: Any) -> Any:
        """Bucket of a key that is `behind` positions before its query."""
        first = 0
        if self._bidirectional:
            first = jnp.where(behind < 0, self._per_side, 0)
            distance = jnp.abs(behind)
        else:
            distance = jnp.maximum(behind, 0)
        n_exact = self._per_side // 2
        n_rest = self._per_side - n_exact
        ratio = jnp.maximum(distance, 1).astype(jnp.float32) / n_exact
        growth = jnp.log(ratio) / math.log(self._max_distance / n_exact)
        far = n_exact + jnp.floor(growth * n_rest).astype(jnp.int32)
        far = jnp.minimum(far, self._per_side - 1)
        return first + jnp.where(distance < n_exact, distance, far)


@gin.configurable(module="retrax.layers")
class AlibiBias(Layer):
    """Lowers scores in proportion to the distance, at a fixed slope for each head.

    Source: Press et al. 2022 (ALiBi), https://arxiv.org/abs/2108.12409, section 3.
    Head i of n = 2^m has the slope 2^(-8 (i + 1) / n); for other n those of the next
    lower power of two come first, then every second one of the next higher.

    Takes (query positions (q,) int, key positions (k,) int), gives (n_heads, q, k):
    -slope * |distance|. No weights.
    """

    def __init__(self, n_heads: int, name: str | None = None) -> None:
        """Makes a bias for n_heads heads."""
        super().__init__(n_in=2, name=name)
        if n_heads < 1:
            raise ValueError(f"AlibiBias needs at least 1 head, got {n_heads}.")
        self._slopes = _alibi_slopes(n_heads)

    def forward(self, inputs: Any) -> Any:
        """Computes the bias."""
        queries, keys = inputs
        distance = jnp.abs(queries[:, None] - keys[None, :]).astype(jnp.float32)
        slopes = jnp.asarray(self._slopes, jnp.float32)
        return -slopes[:, None, None] * distance


def _alibi_slopes(n: int) -> np.ndarray:
    def of_power(m: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / m) for i in range(m)]

    lower = 2 ** int(math.log2(n))
    return np.array(of_power(lower) + of_power(2 * lower)[0::2][: n - lower])

"""Attention between points of equal hashes (Reformer), as a layer.

Above `lsh_kernel` and `efficient_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gin
import jax
import jax.numpy as jnp

from retrax.layers.attention_kernel import dot_product_attention
from retrax.layers.base import State
from retrax.layers.efficient_attention import checked_windows, self_bias
from retrax.layers.efficient_heads import CachingAttention
from retrax.layers.lsh_kernel import (
    Windows,
    hash_buckets,
    keys_of_queries,
    lsh_attention,
    new_rotations,
)

__all__ = ["LSHSelfAttention", "buckets_for"]

_SEED = 0x15A  # Any will do, as long as it stays.
_MOST_BUCKETS = 128  # More are made of two hashes, since each costs a rotation.


@gin.configurable(module="retrax.layers", denylist=["mode"])
class LSHSelfAttention(CachingAttention):
    """Attends to positions whose queries have an equal hash, in n log n time.

    x, y: (batch, length, d_model) float, any length. If masked, takes (x, mask): mask
    (batch, length), bool or 0/1; where it is 0, attention is 0 and nobody looks.
    Keys are the queries; see `SelfAttention` on share_qk, and `lsh_attention` for
    what is seen and the source.

    Rotations come from the key in mode 'train'. In all others they are always the same
    ones, so that evaluation needs no key and mode 'predict' gives what 'eval' gives.
    What a causal query sees depends on no later position. Hashes send no gradient.

    Trax looks at all of the neighbouring chunks of the sorted order, at other buckets
    too, and what is seen in several rounds counts several times.

    Example:
      >>> layer = LSHSelfAttention(d_qk=4, d_v=4, causal=True, chunk_len=2, n_hashes=2)
      >>> x = jax.random.normal(jax.random.key(0), (1, 5, 3))
      >>> _ = layer.init(x)
      >>> layer(x).shape
      (1, 5, 3)
    """

    _projections = ("q", "v")

    def __init__(
        self,
        n_heads: int = 2,
        d_qk: int = 64,
        d_v: int = 64,
        share_qk: bool = True,
        causal: bool = False,
        masked: bool = False,
        chunk_len: int = 128,
        n_chunks_before: int = 1,
        n_chunks_after: int = 0,
        n_hashes: int = 1,
        n_buckets: int | Sequence[int] | None = None,
        mode: str = "train",
        predict_mem_len: int = 2048,
        attention_dropout: float = 0.0,
        output_dropout: float = 0.0,
        max_length_for_buckets: int | None = None,
        bias: bool = False,
        n_parallel_heads: int | None = None,
        name: str | None = None,
    ) -> None:
        """Makes the layer; arguments not named here are those of `SelfAttention`.

        Args:
          share_qk: there is no other way, so True.
          chunk_len: positions in a chunk of the sorted order.
          n_chunks_before: chunks before its own that a query sees; if causal, it sees
            the last chunk_len * n_chunks_before positions of its bucket.
          n_chunks_after: chunks after its own that a query sees.
          n_hashes: rounds of hashing; near positions that one misses another may find.
          n_buckets: an even number, or its factors, each of them even; 1 for no
            hashing. None for two buckets a chunk, and for 1 where all is one chunk.
          max_length_for_buckets: length that n_buckets None goes by; None for that of
            the inputs, so that hashes change with it.

        Raises:
          ValueError: an argument is out of range, or two do not go together.
        """
        super().__init__(
            predict_mem_len,
            causal,
            n_heads,
            d_qk,
            d_v,
            masked,
            bias,
            mode,
            attention_dropout,
            output_dropout,
            n_parallel_heads,
            name,
        )
        windows = checked_windows(
            self.name, chunk_len, n_chunks_before, n_chunks_after, causal
        )
        if windows is None or (causal and not n_chunks_before):
            raise ValueError(
                f"{self.name} needs a chunk_len, and n_chunks_before >= 1 if causal, "
                f"got {chunk_len} and {n_chunks_before}."
            )
        if not share_qk or n_hashes < 1:
            raise ValueError(
                f"{self.name} hashes queries that are keys as well, once or more; got "
                f"share_qk={share_qk} and n_hashes={n_hashes}."
            )
        self._windows = windows
        self._n_hashes = n_hashes
        self._max_length = max_length_for_buckets
        self._n_buckets = _factors(self.name, n_buckets)
        if self._caches and not (self._n_buckets or max_length_for_buckets):
            raise ValueError(
                f"{self.name}: mode 'predict' does not know the final length, which "
                "the number of buckets goes by; give n_buckets or "
                "max_length_for_buckets, in all modes alike."
            )

    def _attend(self, *heads_and_seen: Any) -> Any:
        q, v, seen = heads_and_seen
        n_buckets, rotations = self._rotations(q.shape[1])

        def one(q: Any, v: Any, seen: Any, key: Any) -> Any:
            return lsh_attention(
                q,
                v,
                seen,
                rotations,
                n_buckets,
                self._windows,
                dropout=self._attention_dropout,
                rng=key,
            )

        return self._for_each_head(one, (q, v), seen)

    def _go_on(self, *heads: Any) -> Any:
        q, v = heads
        n_buckets, rotations = self._rotations(q.shape[1])
        points = jnp.reshape(q, (-1, self._d_qk))
        buckets = hash_buckets(points, rotations, n_buckets)
        buckets = jnp.moveaxis(buckets, 0, 1).reshape(*q.shape[:3], self._n_hashes)
        (k, v, kept), start = self._append(keys_of_queries(q), v, buckets)
        mask = _seen_by_hash(buckets, kept, start, self._windows)
        y = dot_product_attention(q, k, v, mask, bias_fn=self_bias, start=start)
        return self._nan_past_end(y)

    def _rotations(self, length: int) -> tuple[tuple[int, ...], Any]:
        """Factors of the number of buckets, and rotations for them."""
        n_buckets = self._n_buckets
        if n_buckets is None:
            longest = self._max_length or length
            n_buckets = buckets_for(longest, self._windows.chunk_len)
        if math.prod(n_buckets) == 1:
            key = jax.random.key(0)  # Any: nothing is turned.
        elif self._mode == "train":
            key = jax.random.fold_in(self._key("hash rotations"), 1)
        else:
            key = jax.random.key(_SEED)
        rotations = new_rotations(key, self._n_hashes, self._d_qk, n_buckets)
        return n_buckets, rotations

    def _empty_cache(self, n_rows: int, dtype: Any) -> State:
        shape = (n_rows, self._cache_length, self._n_heads)
        return (
            jnp.zeros((*shape, self._d_qk), dtype),
            jnp.zeros((*shape, self._d_v), dtype),
            jnp.zeros((*shape, self._n_hashes), jnp.int32),
            jnp.zeros((), jnp.int32),
        )


# --- Helpers ------------------------------------------------------------------------


def buckets_for(length: int, chunk_len: int) -> tuple[int, ...]:
    """Factors of the number of buckets: two a chunk, or 1 where all is one chunk."""
    if length <= chunk_len:
        return (1,)
    n = 2 * -(-length // chunk_len)
    if n <= _MOST_BUCKETS:
        return (n,)
    first = 2 ** math.ceil(math.log2(n) / 2)
    return (first, 2 * -(-n // (2 * first)))


def _factors(name: str, n: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if n is None:
        return None
    factors = (n,) if isinstance(n, int) else tuple(n)
    if factors != (1,) and (not factors or any(f < 2 or f % 2 for f in factors)):
        raise ValueError(
            f"{name}: n_buckets must be an even number or a list of even numbers (or "
            f"1), as a hash is a rotated axis or its opposite; got {n}."
        )
    return factors


def _seen_by_hash(buckets: Any, kept: Any, start: Any, windows: Windows) -> Any:
    """What queries see in any round: (batch, n_heads, queries, keys) bool.

    buckets: (batch, queries, n_heads, n_hashes), those of the queries, which begin at
    position `start`; kept: (batch, keys, n_heads, n_hashes), of positions from 0 on.
    """
    mine, theirs = start + jnp.arange(buckets.shape[1]), jnp.arange(kept.shape[1])
    past = (theirs <= mine[:, None])[None, :, :, None]
    seen = jnp.zeros((), bool)
    for r in range(buckets.shape[-1]):
        same = past & (buckets[:, :, None, :, r] == kept[:, None, :, :, r])
        rank = jnp.cumsum(same, axis=2)
        ago = rank[:, :, -1:] - rank
        seen = seen | (same & (ago <= windows.chunk_len * windows.n_before))
    return jnp.moveaxis(seen, 3, 1)

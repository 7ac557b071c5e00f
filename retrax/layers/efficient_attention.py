"""Attention for long sequences: in chunks, and between two sequences.

Above `efficient_heads`, `lsh_kernel` and `attention_kernel`; under `lsh_attention`.
"""

from __future__ import annotations

from typing import Any

import gin
import jax.numpy as jnp

from retrax.layers.attention_kernel import dot_product_attention
from retrax.layers.base import State
from retrax.layers.efficient_heads import CachingAttention, EfficientAttention
from retrax.layers.lsh_kernel import (
    SELF_SCORE,
    Windows,
    chunked_attention,
    keys_of_queries,
)

__all__ = ["EncDecAttention", "SelfAttention"]


@gin.configurable(module="retrax.layers", denylist=["mode"])
class SelfAttention(CachingAttention):
    """Attends within one sequence, to all positions or to neighbouring chunks.

    x, y: (batch, length, d_model) float. If masked, takes (x, mask): mask (batch,
    length), bool or 0/1, true at positions that may be seen. A query that sees nothing
    gives 0 before the last projection. With chunk_len, any length is taken, and memory
    grows with length * chunk_len.

    With share_qk keys are the queries scaled to a mean square of 1, and a position
    sees itself only if it sees nothing else (Kitaev et al. 2020,
    https://arxiv.org/abs/2001.04451, section 2).

    In mode 'predict' each call takes the positions that follow those of the calls
    before, any number of them, and gives what mode 'eval' gives there.

    Example:
      >>> layer = SelfAttention(n_heads=2, d_qk=4, d_v=4, causal=True, chunk_len=2,
      ...                       n_chunks_before=1)
      >>> x = jnp.ones((1, 5, 3))
      >>> _ = layer.init(x)
      >>> layer(x).shape
      (1, 5, 3)
    """

    def __init__(
        self,
        n_heads: int = 2,
        d_qk: int = 64,
        d_v: int = 64,
        share_qk: bool = False,
        causal: bool = False,
        masked: bool = False,
        chunk_len: int | None = None,
        n_chunks_before: int = 0,
        n_chunks_after: int = 0,
        bias: bool = False,
        mode: str = "train",
        predict_mem_len: int = 2048,
        attention_dropout: float = 0.0,
        output_dropout: float = 0.0,
        n_parallel_heads: int | None = None,
        name: str | None = None,
    ) -> None:
        """Makes the layer.

        Args:
          n_heads: number of heads.
          d_qk: size of a head's queries and keys.
          d_v: size of a head's values.
          share_qk: makes keys of queries, without a projection of their own.
          causal: whether a query sees no later positions.
          masked: whether there is a mask.
          chunk_len: positions in a chunk; None for all.
          n_chunks_before: chunks before its own that a query sees.
          n_chunks_after: chunks after its own that a query sees.
          bias: whether the projections add a bias.
          mode: 'train', 'eval' or 'predict'.
          predict_mem_len: longest sequence of mode 'predict'.
          attention_dropout: chance of an attention weight to be dropped in 'train'.
          output_dropout: chance of an output to be dropped in mode 'train'.
          n_parallel_heads: heads (of all examples) handled at a time, to save memory;
            None for all.
          name: name of the layer.

        Raises:
          ValueError: an argument is out of range, or two do not go together.
        """
        self._projections = ("q", "v") if share_qk else ("q", "k", "v")
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
        self._share_qk = share_qk
        self._windows = checked_windows(
            self.name, chunk_len, n_chunks_before, n_chunks_after, causal
        )

    def _attend(self, *heads_and_seen: Any) -> Any:
        *heads, seen = heads_and_seen
        q, k, v = self._q_k_v(heads)
        length = q.shape[1]
        windows = self._windows or Windows(length, 0, 0, self._causal)

        def one(q: Any, k: Any, v: Any, seen: Any, key: Any) -> Any:
            return chunked_attention(
                q,
                k,
                v,
                seen,
                windows,
                exclude_self=self._share_qk,
                dropout=self._attention_dropout,
                rng=key,
            )

        return self._for_each_head(one, (q, k, v), seen)

    def _go_on(self, *heads: Any) -> Any:
        q, k, v = self._q_k_v(heads)
        (k, v), start = self._append(k, v)
        mask = None
        if self._windows:
            m = self._windows.chunk_len
            mine, theirs = start + jnp.arange(q.shape[1]), jnp.arange(k.shape[1])
            ago = mine[:, None] // m - theirs // m
            mask = (ago <= self._windows.n_before)[None, None]
        y = dot_product_attention(
            q,
            k,
            v,
            mask,
            causal=True,
            start=start,
            bias_fn=self_bias if self._share_qk else None,
        )
        return self._nan_past_end(y)

    def _q_k_v(self, heads: Any) -> tuple[Any, Any, Any]:
        if self._share_qk:
            q, v = heads
            return q, keys_of_queries(q), v
        q, k, v = heads
        return q, k, v

    def _empty_cache(self, n_rows: int, dtype: Any) -> State:
        shape = (n_rows, self._cache_length, self._n_heads)
        return (
            jnp.zeros((*shape, self._d_qk), dtype),
            jnp.zeros((*shape, self._d_v), dtype),
            jnp.zeros((), jnp.int32),
        )


@gin.configurable(module="retrax.layers", denylist=["mode"])
class EncDecAttention(EfficientAttention):
    """Attends from one sequence to another: (x, source[, mask]) -> y.

    x, y: (batch, length, d_model) float; source: (batch, s_length, d_source) float;
    mask, if masked: (batch, s_length), bool or 0/1, true at positions of the source
    that may be seen. All modes but 'train' (dropout) are alike.
    """

    def __init__(
        self,
        n_heads: int = 2,
        d_qk: int = 64,
        d_v: int = 64,
        masked: bool = True,
        mode: str = "train",
        attention_dropout: float = 0.0,
        output_dropout: float = 0.0,
        n_parallel_heads: int | None = None,
        name: str | None = None,
    ) -> None:
        """Makes the layer; see `SelfAttention` for the arguments."""
        super().__init__(
            2,
            n_heads,
            d_qk,
            d_v,
            masked,
            False,
            mode,
            attention_dropout,
            output_dropout,
            n_parallel_heads,
            name,
        )

    def _source(self, items: Any) -> Any:
        return items[1]

    def _attend(self, *heads_and_seen: Any) -> Any:
        q, k, v, seen = heads_and_seen

        def one(q: Any, k: Any, v: Any, seen: Any, key: Any) -> Any:
            y = dot_product_attention(
                q[None, :, None],
                k[None, :, None],
                v[None, :, None],
                seen[None, None, None],
                dropout=self._attention_dropout,
                rng=key,
            )
            return y[0, :, 0]

        return self._for_each_head(one, (q, k, v), seen)


# --- Helpers ------------------------------------------------------------------------


def self_bias(q_positions: Any, k_positions: Any) -> Any:
    """Makes (1, queries, keys) that lets positions see themselves last of all."""
    return jnp.where(q_positions[:, None] == k_positions, SELF_SCORE, 0.0)[None]


def checked_windows(
    name: str, chunk_len: int | None, n_before: int, n_after: int, causal: bool
) -> Windows | None:
    """Returns what a query sees; None for everything. ValueError if it cannot be."""
    if chunk_len is None:
        if n_before or n_after:
            raise ValueError(
                f"{name}: without chunk_len there is one chunk, got n_chunks_before="
                f"{n_before} and n_chunks_after={n_after}; give chunk_len as well."
            )
        return None
    if chunk_len < 1 or n_before < 0 or n_after < 0:
        raise ValueError(
            f"{name} needs chunk_len >= 1, n_chunks_before >= 0 and n_chunks_after >= "
            f"0, got {chunk_len}, {n_before} and {n_after}."
        )
    if causal and n_after:
        raise ValueError(
            f"{name}: a causal query sees nothing in later chunks, got n_chunks_after="
            f"{n_after}; use 0."
        )
    return Windows(chunk_len, n_before, n_after, causal)

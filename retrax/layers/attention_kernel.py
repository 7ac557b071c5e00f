"""Scaled dot-product attention as a function of arrays, whole or by chunks.

Under the layers of `attention_cores`. Knows arrays only: no layer, weights or state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["attention_weights_of", "dot_product_attention"]

BiasFn = Callable[[Any, Any], Any]


def dot_product_attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    *,
    causal: bool = False,
    start: Any = 0,
    bias_fn: BiasFn | None = None,
    dropout: float = 0.0,
    rng: Any = None,
    chunk: int | None = None,
) -> Any:
    """Averages values with weights softmax(q k^T / sqrt(d_head) + bias).

    Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, equation 1. The
    softmax is in float32 (float64 for such inputs). A query that may see no key gives
    zeros and sends no gradient back, where Trax averages over the masked keys.

    Args:
      q: (batch, q_length, n_heads, d_head) float.
      k: (batch, k_length, n_kv_heads, d_head) float; query head i goes with key head
        i // (n_heads / n_kv_heads) (grouped, https://arxiv.org/abs/2305.13245).
      v: (batch, k_length, n_kv_heads, d_value) float.
      mask: broadcasts to (batch, n_heads, q_length, k_length), bool or numbers; what
        is not 0 is seen. None if all is seen.
      causal: whether query i sees only keys at positions up to start + i.
      start: position of the first query; keys start at 0. int or int32 scalar.
      bias_fn: gives (n_heads, queries, keys), added to the scores, from the positions
        (queries,) and (keys,).
      dropout: chance of a weight to be dropped; needs `rng`.
      rng: random key.
      chunk: number of queries handled at a time, so that only chunk x k_length scores
        exist per head, also in the backward pass; None for all.

    Returns:
      (batch, q_length, n_heads, d_value), of the dtype of q.

    Raises:
      ValueError: shapes do not fit; says which.

    Example:
      >>> q = k = v = jnp.ones((1, 3, 2, 4))
      >>> dot_product_attention(q, k, v, causal=True).shape
      (1, 3, 2, 4)
    """
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    mask = _checked(q, k, v, mask)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 query (or None), got {chunk}.")

    def attend(q: Any, mask: Any, start: Any, rng: Any) -> Any:
        seen, bias = _seen_and_bias(q, k, mask, causal, start, bias_fn)
        y = _attend(q, k, v, seen, bias, dropout, rng)
        # A causal query sees itself, so only a mask can hide all keys.
        return y if mask is None else jnp.where(_sees_any(seen), y, 0)

    if chunk is None or chunk >= q.shape[1]:
        return attend(q, mask, start, rng)
    return _by_chunks(attend, q, mask, start, rng, chunk)


def attention_weights_of(
    q: Any,
    k: Any,
    mask: Any = None,
    *,
    causal: bool = False,
    start: Any = 0,
    bias_fn: BiasFn | None = None,
) -> Any:
    """Returns the weights (batch, n_heads, q_length, k_length) float of attention.

    Takes the arguments of `dot_product_attention`. Each row sums to 1, or is zero if
    the query sees no key.
    """
    q, k = jnp.asarray(q), jnp.asarray(k)
    mask = _checked(q, k, k, mask)
    seen, bias = _seen_and_bias(q, k, mask, causal, start, bias_fn)
    return _softmax(q, k, seen, bias)


# --- Helpers ------------------------------------------------------------------------


def _seen_and_bias(
    q: Any, k: Any, mask: Any, causal: bool, start: Any, bias_fn: BiasFn | None
) -> tuple[Any, Any]:
    """The full mask (4 axes, bool) or None, and the bias (4 axes) or None."""
    q_positions = start + jnp.arange(q.shape[1])
    k_positions = jnp.arange(k.shape[1])
    seen = mask
    if causal:
        past = (k_positions <= q_positions[:, None])[None, None]
        seen = past if mask is None else mask & past
    bias = None if bias_fn is None else bias_fn(q_positions, k_positions)[None]
    return seen, bias


def _sees_any(seen: Any) -> Any:
    """(batch, q_length, n_heads, 1) bool: does the query see a key? 1s broadcast."""
    return jnp.swapaxes(jnp.any(seen, axis=-1, keepdims=True), 1, 2)


def _softmax(q: Any, k: Any, seen: Any, bias: Any) -> Any:
    b, n_queries, n_heads, d_head = q.shape
    n_kv = k.shape[2]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    grouped = jnp.reshape(q, (b, n_queries, n_kv, n_heads // n_kv, d_head))
    scores = jnp.einsum(
        "bqkgd,bskd->bkgqs", grouped, k.astype(q.dtype), preferred_element_type=dtype
    )
    scores = jnp.reshape(scores, (b, n_heads, n_queries, k.shape[1]))
    scores = scores / jnp.sqrt(jnp.asarray(d_head, dtype))
    if bias is not None:
        scores = scores + bias.astype(dtype)
    if seen is None:
        return jax.nn.softmax(scores, axis=-1)
    scores = jnp.where(seen, scores, -0.7 * float(jnp.finfo(jnp.float32).max))
    # A row that sees nothing is uniform now; the second `where` makes it zero.
    return jnp.where(seen, jax.nn.softmax(scores, axis=-1), 0)


def _attend(
    q: Any, k: Any, v: Any, seen: Any, bias: Any, dropout: float, rng: Any
) -> Any:
    """All queries at once; rows that see nothing come out as anything finite."""
    # jax.nn's function has no dropout, takes values of the keys' size only, its softmax
    # is in float32 even for float64, and CPUs refuse its products of float16.
    fits = q.dtype in (jnp.float32, jnp.bfloat16)
    if not dropout and v.shape[3] == k.shape[3] and fits:
        k, v = k.astype(q.dtype), v.astype(q.dtype)
        return jax.nn.dot_product_attention(q, k, v, bias=bias, mask=seen)
    weights = _softmax(q, k, seen, bias)
    if dropout:
        keep = jax.random.bernoulli(rng, 1.0 - dropout, weights.shape)
        weights = jnp.where(keep, weights / (1.0 - dropout), 0)
    b, n_heads, n_queries, n_keys = weights.shape
    n_kv = v.shape[2]
    weights = jnp.reshape(weights, (b, n_kv, n_heads // n_kv, n_queries, n_keys))
    y = jnp.einsum("bkgqs,bskd->bqkgd", weights.astype(q.dtype), v.astype(q.dtype))
    return jnp.reshape(y, (b, n_queries, n_heads, v.shape[3]))


def _by_chunks(
    attend: Callable[..., Any], q: Any, mask: Any, start: Any, rng: Any, chunk: int
) -> Any:
    """Runs `attend` on one chunk of queries after another.

    Rows of the softmax are independent, so each chunk is exact by itself; no running
    maximum over chunks of keys is needed.
    """
    n_queries = q.shape[1]
    n_chunks = -(-n_queries // chunk)

    def cut(x: Any, axis: int) -> Any:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, n_chunks * chunk - n_queries)
        x = jnp.pad(x, widths)
        x = jnp.reshape(x, (*x.shape[:axis], n_chunks, chunk, *x.shape[axis + 1 :]))
        return jnp.moveaxis(x, axis, 0)

    per_query = mask is not None and mask.shape[2] != 1
    masks = cut(mask, 2) if per_query else None

    def one(chunk_of: tuple[Any, Any, Any]) -> Any:
        i, queries, own_mask = chunk_of
        key = None if rng is None else jax.random.fold_in(rng, i)
        seen = own_mask if per_query else mask
        return attend(queries, seen, start + i * chunk, key)

    # Without the checkpoint the loop would keep the scores of all chunks.
    ys = jax.lax.map(
        jax.checkpoint(one, prevent_cse=False), (jnp.arange(n_chunks), cut(q, 1), masks)
    )
    y = jnp.moveaxis(ys, 0, 1)
    y = jnp.reshape(y, (y.shape[0], n_chunks * chunk, *y.shape[3:]))
    return y[:, :n_queries]


def _checked(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Checks that all shapes fit; returns the mask with 4 axes, bool."""
    for name, x in (("queries", q), ("keys", k), ("values", v)):
        if x.ndim != 4:
            raise ValueError(
                f"{name} must have shape (batch, length, heads, d_head), got {x.shape}."
            )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "queries and keys must agree in batch size and d_head, got "
            f"{q.shape} and {k.shape} for (batch, length, heads, d_head)."
        )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            "keys and values must agree in batch size, length and heads, got "
            f"{k.shape} and {v.shape} for (batch, length, heads, d_head)."
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads cannot share {k.shape[2]} key heads evenly; "
            "n_heads must be a multiple of n_kv_heads."
        )
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    wanted = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    shape = (1,) * (4 - mask.ndim) + mask.shape
    pairs = zip(shape, wanted, strict=False)
    if len(shape) != 4 or any(n not in (1, w) for n, w in pairs):
        raise ValueError(
            f"the mask has shape {mask.shape}, which does not broadcast to (batch, "
            f"heads, queries, keys) = {wanted}{_mask_hint(mask.shape, wanted)}."
        )
    mask = jnp.reshape(mask, shape)
    return mask if mask.dtype == bool else mask != 0


def _mask_hint(shape: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    b, _, n_queries, n_keys = wanted
    if shape == (b, n_keys):
        return "; for one flag per key pass mask[:, None, None, :]"
    if shape == (b, n_queries, n_keys):
        return "; for one matrix per example pass mask[:, None]"
    return ""

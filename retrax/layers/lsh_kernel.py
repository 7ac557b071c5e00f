"""Attention within chunks and between points of equal hashes, as functions of arrays.

Under the layers of `efficient_attention`. All is for one head of one example; layers
map over the others. No score of a pair of points exists but within neighbouring
chunks, so memory grows with length * chunk_len.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = [
    "SELF_SCORE",
    "Windows",
    "chunked_attention",
    "hash_buckets",
    "keys_of_queries",
    "lsh_attention",
    "new_rotations",
]

# The score of a point with itself where queries are keys (Kitaev et al., section 2):
# nothing beside any other, and far above what is hidden.
SELF_SCORE = -1e5
_HIDDEN = -1e9
# Scores computed at a time for one head: 1 MiB in float32.
_PAIRS = 2**18


class Windows(NamedTuple):
    """Which points a query sees among those in a row.

    Attributes:
      chunk_len: points in a chunk.
      n_before: chunks before its own that a query sees.
      n_after: chunks after its own that a query sees.
      causal: whether a query sees no later points.
    """

    chunk_len: int
    n_before: int
    n_after: int
    causal: bool


def keys_of_queries(q: Any) -> Any:
    """Returns shared keys: queries (..., d) scaled to a mean square of 1."""
    x = q.astype(jnp.promote_types(q.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return (x * scale).astype(q.dtype)


def chunked_attention(
    q: Any,
    k: Any,
    v: Any,
    seen: Any,
    windows: Windows,
    *,
    exclude_self: bool = False,
    dropout: float = 0.0,
    rng: Any = None,
) -> Any:
    """Attends from each chunk to itself and its neighbours.

    Args:
      q: (length, d) float.
      k: (length, d) float.
      v: (length, d_v) float.
      seen: (length,) bool, true for keys that may be seen.
      windows: what a query sees.
      exclude_self: whether a query sees itself only if it sees nothing else.
      dropout: chance of a weight to be dropped; needs `rng`.
      rng: random key.

    Returns:
      (length, d_v) float; 0 for queries that see nothing.
    """
    length = q.shape[0]
    m, n_chunks = _chunks(length, windows)
    q, k, v, seen = (_padded(x, n_chunks * m) for x in (q, k, v, seen))
    idx = jnp.arange(n_chunks * m).reshape(n_chunks, m)

    def masks(idx: Any, key_idx: Any, inside: Any) -> tuple[Any, Any, Any]:
        allowed = inside[:, None] & seen[key_idx][:, None]
        if windows.causal:
            allowed = allowed & (key_idx[:, None] <= idx[:, :, None])
        is_self = idx[:, :, None] == key_idx[:, None] if exclude_self else None
        return allowed, is_self, None

    y, _ = _attend_in_order(q[idx], k[idx], v[idx], idx, masks, windows, dropout, rng)
    return y.reshape(n_chunks * m, -1)[:length].astype(q.dtype)


def new_rotations(rng: Any, n_hashes: int, d: int, n_buckets: tuple[int, ...]) -> Any:
    """Draws (n_hashes, d, sum(n_buckets) / 2) float32 normal, for `hash_buckets`."""
    n = sum(each // 2 for each in n_buckets)
    return jax.random.normal(rng, (n_hashes, d, n), jnp.float32)


def hash_buckets(x: Any, rotations: Any, n_buckets: tuple[int, ...]) -> Any:
    """Gives points buckets that near points (in angle) are likely to share.

    Source: Andoni et al. 2015, https://arxiv.org/abs/1509.02897, as in Kitaev et al.,
    section 2: h(x) = argmax([xR; -xR]). With factors, the bucket is the tuple of one
    hash for each factor.

    Args:
      x: (length, d) float.
      rotations: from `new_rotations`.
      n_buckets: factors of the number of buckets, all even, or (1,).

    Returns:
      (n_hashes, length) int32 in [0, prod(n_buckets)).
    """
    n_hashes = rotations.shape[0]
    buckets = jnp.zeros((n_hashes, x.shape[0]), jnp.int32)
    if math.prod(n_buckets) == 1:
        return buckets
    x = jax.lax.stop_gradient(x).astype(jnp.float32)
    rotated = jnp.einsum("ld,hdb->hlb", x, rotations)
    start = 0
    for n in n_buckets:
        part = rotated[..., start : start + n // 2]
        hashes = jnp.argmax(jnp.concatenate([part, -part], axis=-1), axis=-1)
        buckets = buckets * n + hashes.astype(jnp.int32)
        start += n // 2
    return buckets


def lsh_attention(
    q: Any,
    v: Any,
    seen: Any,
    rotations: Any,
    n_buckets: tuple[int, ...],
    windows: Windows,
    *,
    dropout: float = 0.0,
    rng: Any = None,
) -> Any:
    """Attends between points that share a bucket in any of several rounds of hashing.

    Source: Kitaev et al. 2020 (Reformer), https://arxiv.org/abs/2001.04451, section 2
    and appendix A. In each round points are sorted by (bucket, position) and cut into
    chunks. A query sees the points of its bucket in its own and the neighbouring
    chunks; if causal, the chunk_len * n_before points of its bucket that came last. So
    what a causal query sees depends on no later point, unlike where chunks of the
    sorted order decide. A point seen in several rounds counts once; itself a query sees
    only if it sees nothing else.

    Args:
      q: (length, d) float, queries; keys are `keys_of_queries` of them.
      v: (length, d_v) float.
      seen: (length,) bool; others see nothing of the rest, and get 0.
      rotations: (n_hashes, d, n), see `new_rotations`.
      n_buckets: factors of the number of buckets.
      windows: what a query sees in each round.
      dropout: chance of a weight to be dropped; needs `rng`.
      rng: random key.

    Returns:
      (length, d_v) float.
    """
    length = q.shape[0]
    m, n_chunks = _chunks(length, windows)
    n_hashes = rotations.shape[0]
    # What is hidden has a bucket of its own, so that it takes nobody's place.
    buckets = hash_buckets(q, rotations, n_buckets)
    buckets = jnp.where(seen, buckets, math.prod(n_buckets))
    widths = ((0, 0), (0, n_chunks * m - length))
    buckets = jnp.pad(buckets, widths, constant_values=math.prod(n_buckets))
    k = keys_of_queries(q)
    q, k, v, seen = (_padded(x, n_chunks * m) for x in (q, k, v, seen))
    order = jnp.argsort(buckets, axis=-1, stable=True)
    slots = jnp.argsort(order, axis=-1)
    together = _together(buckets, slots, windows, m)

    def one_round(r: Any) -> tuple[Any, Any]:
        def masks(idx: Any, key_idx: Any, inside: Any) -> tuple[Any, Any, Any]:
            mine = inside[:, None] & seen[key_idx][:, None]
            is_self = idx[:, :, None] == key_idx[:, None]
            offset = None
            if n_hashes > 1:
                n_times = _count(lambda i: together(i, idx, key_idx), n_hashes)
                dtype = jnp.promote_types(q.dtype, jnp.float32)
                offset = -jnp.log(jnp.maximum(n_times, 1).astype(dtype))
            return together(r, idx, key_idx) & mine, is_self, offset

        idx = order[r].reshape(n_chunks, m)
        key = None if rng is None else jax.random.fold_in(rng, r)
        y, total = _attend_in_order(
            q[idx], k[idx], v[idx], idx, masks, windows, dropout, key
        )
        back = slots[r]
        return y.reshape(n_chunks * m, -1)[back], total.reshape(-1)[back]

    ys, totals = jax.lax.map(one_round, jnp.arange(n_hashes))
    shares = jax.nn.softmax(totals, axis=0)
    y = jnp.sum(shares[..., None] * ys, axis=0)
    return y[:length].astype(q.dtype)


# --- Helpers ------------------------------------------------------------------------


def _chunks(length: int, windows: Windows) -> tuple[int, int]:
    """Points in a chunk, no more than there are, and number of chunks."""
    m = min(windows.chunk_len, length)
    return m, -(-length // m)


def _padded(x: Any, length: int) -> Any:
    widths = [(0, length - x.shape[0]), *[(0, 0)] * (x.ndim - 1)]
    return jnp.pad(x, widths)


def _neighbours(idx: Any, windows: Windows) -> tuple[Any, Any]:
    """For points (chunks, m): keys (chunks, n) near each chunk, and which are real."""
    n_chunks, m = idx.shape
    before = min(windows.n_before, n_chunks - 1)
    after = min(windows.n_after, n_chunks - 1)
    chunks = jnp.arange(n_chunks)[:, None] + jnp.arange(-before, after + 1)
    inside = (chunks >= 0) & (chunks < n_chunks)
    keys = idx[jnp.clip(chunks, 0, n_chunks - 1)].reshape(n_chunks, -1)
    return keys, jnp.repeat(inside, m, axis=1)


def _together(
    buckets: Any, slots: Any, windows: Windows, m: int
) -> Callable[[Any, Any, Any], Any]:
    """Makes a function that says who sees whom in a round: (chunks, m, keys) bool."""

    def together(r: Any, idx: Any, key_idx: Any) -> Any:
        bucket, slot = buckets[r], slots[r]
        same = bucket[idx][:, :, None] == bucket[key_idx][:, None]
        mine, theirs = slot[idx][:, :, None], slot[key_idx][:, None]
        if windows.causal:  # In a bucket the order is that of positions.
            ago = mine - theirs
            return same & (ago >= 0) & (ago <= windows.chunk_len * windows.n_before)
        ago = mine // m - theirs // m
        return same & (ago >= -windows.n_after) & (ago <= windows.n_before)

    return together


def _count(is_true: Callable[[Any], Any], n: int) -> Any:
    """In how many of n rounds is_true; one round in memory at a time."""
    first = is_true(0).astype(jnp.int32)
    return jax.lax.fori_loop(1, n, lambda i, total: total + is_true(i), first)


def _attend_in_order(
    q: Any,
    k: Any,
    v: Any,
    idx: Any,
    masks: Callable[[Any, Any, Any], tuple[Any, Any, Any]],
    windows: Windows,
    dropout: float,
    rng: Any,
) -> tuple[Any, Any]:
    """Attends from chunks to their neighbours, some chunks at a time.

    Scores of some thousand points stay near the processor, and none are kept for the
    backward pass, which computes them again.

    Args:
      q: (n_chunks, m, d), in the order of chunks.
      k: (n_chunks, m, d).
      v: (n_chunks, m, d_v).
      idx: (n_chunks, m) int, what points these are.
      masks: makes (allowed, is_self, offset) of `_attend` from some chunks of (idx,
        points of their neighbours, which of those there are).
      windows: what a query sees.
      dropout: see `_attend`, and so `rng`.

    Returns:
      (n_chunks, m, d_v) and (n_chunks, m), as `_attend`.
    """
    n_chunks, m = idx.shape
    before = min(windows.n_before, n_chunks - 1)
    after = min(windows.n_after, n_chunks - 1)
    n_seen = before + 1 + after
    size = min(max(_PAIRS // (m * m * n_seen), 1), n_chunks)
    n_groups = -(-n_chunks // size)
    key_idx, inside = _neighbours(idx, windows)

    def grouped(x: Any) -> Any:
        """(n_chunks, ...) -> (n_groups, size, ...)."""
        x = _padded(x, n_groups * size)
        return x.reshape((n_groups, size, *x.shape[1:]))

    def with_neighbours(x: Any) -> Any:
        """(n_chunks, ...) -> (n_groups, before + size + after, ...)."""
        n_behind = n_groups * size - n_chunks + after
        x = jnp.pad(x, [(before, n_behind), *[(0, 0)] * (x.ndim - 1)])
        first = jnp.arange(n_groups)[:, None] * size
        return x[first + jnp.arange(before + size + after)]

    def seen_by_each(x: Any) -> Any:
        """(before + size + after, m, d) -> (size, n_seen * m, d)."""
        return jnp.concatenate([x[i : i + size] for i in range(n_seen)], axis=1)

    def one_group(xs: Any) -> tuple[Any, Any]:
        q, k, v, places, i = xs
        key = None if rng is None else jax.random.fold_in(rng, i)
        return _attend(
            q, seen_by_each(k), seen_by_each(v), *masks(*places), dropout, key
        )

    places = tuple(map(grouped, (idx, key_idx, inside)))
    xs = (grouped(q), *map(with_neighbours, (k, v)), places, jnp.arange(n_groups))
    y, total = jax.lax.map(jax.checkpoint(one_group, prevent_cse=False), xs)
    return (
        y.reshape((n_groups * size, *y.shape[2:]))[:n_chunks],
        total.reshape((n_groups * size, m))[:n_chunks],
    )


def _attend(
    q: Any,
    k: Any,
    v: Any,
    allowed: Any,
    is_self: Any,
    offset: Any,
    dropout: float,
    rng: Any,
) -> tuple[Any, Any]:
    """Attends within chunks; returns values and the log of the sum of exp(scores).

    q: (chunks, m, d); k: (chunks, n, d); v: (chunks, n, d_v); allowed, is_self and
    offset: (chunks, m, n). Softmax in float32, or float64 for such queries.
    """
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("cid,cjd->cij", q, k, preferred_element_type=dtype)
    scores = scores / jnp.sqrt(jnp.asarray(q.shape[-1], dtype))
    if is_self is not None:
        scores = jnp.where(is_self, SELF_SCORE, scores)
    if offset is not None:
        scores = scores + offset
    scores = jnp.where(allowed, scores, _HIDDEN)
    peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.where(allowed, jnp.exp(scores - peak), 0)
    total = jnp.sum(weights, axis=-1)
    any_seen = total > 0
    safe = jnp.where(any_seen, total, 1)
    weights = weights / safe[..., None]
    if dropout:
        keep = jax.random.bernoulli(rng, 1.0 - dropout, weights.shape)
        weights = jnp.where(keep, weights / (1.0 - dropout), 0)
    y = jnp.einsum(
        "cij,cjv->civ", weights.astype(v.dtype), v, preferred_element_type=dtype
    )
    return y, jnp.where(any_seen, jnp.log(safe) + peak[..., 0], _HIDDEN)

"""Time to sample 256 tokens: retrax against hand-written JAX, cached and not.

All sample from a network of one shape (4 layers, width 128, 4 heads, 72 ids, room for
320 positions) after a prompt of 16 ids, in turn, round after round; each ratio is the
median over rounds of its time to that of the hand-written loop in the same round.
Prints one JSON line.

  hand_written    one jax.jit: the prompt at once, then lax.scan with a cache
  retrax          supervised.decoding.autoregressive_sample, mode 'predict'
  greedy          the same at temperature 0
  beams           supervised.decoding.beam_search with 4 beams
  uncached        the sampler with eval_mode=True: all tokens anew for each new one

usage: python benchmarks/decoding.py [--batch 1 16] [--rounds N] [--tokens N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from retrax import models
from retrax.shapes import ShapeDtype
from retrax.supervised import decoding

N_IDS, N_LAYERS, D, D_FF, N_HEADS, ROOM = 72, 4, 128, 512, 4, 320
N_PROMPT = 16


def main() -> None:
    """Measures all ways for each batch size and prints them as one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "benchmark": "decoding",
        "tokens": args.tokens,
        "jax": jax.__version__,
    }
    for batch in args.batch:
        result[f"batch_{batch}"] = measure(batch, args.rounds, args.tokens)
    print(json.dumps(result))


def measure(batch: int, rounds: int, n: int) -> dict[str, Any]:
    """Times all ways in turn."""
    prompt = np.random.default_rng(0).integers(2, N_IDS, (batch, N_PROMPT), np.int32)
    ways = {
        "hand_written": hand_written(prompt, n),
        **retrax_ways(prompt, n),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()  # Compiles.
    for i in range(rounds):
        for name, way in ways.items():
            if name == "uncached" and i % 4:  # Takes long, and its ratio is large.
                continue
            start = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - start)
    base = times["hand_written"]
    few = base[::4]
    return {
        "ms": {k: round(1e3 * statistics.median(t), 1) for k, t in times.items()},
        "ratio_to_hand_written": {
            k: round(
                statistics.median(
                    a / b
                    for a, b in zip(t, few if k == "uncached" else base, strict=True)
                ),
                3,
            )
            for k, t in times.items()
        },
    }


def retrax_ways(prompt: np.ndarray, n: int) -> dict[str, Callable[[], Any]]:
    """The ways to sample that retrax offers."""

    def lm(mode: str, max_len: int) -> Any:
        return models.TransformerLM(
            N_IDS, D, D_FF, N_LAYERS, N_HEADS, max_len, dropout=0.0, mode=mode
        )

    cached = lm("predict", ROOM)
    uncached = lm("eval", 512)  # Its length is padded to a power of two.
    uncached.init(ShapeDtype(prompt.shape, np.int32), rng=jax.random.key(0))
    cached.weights = uncached.weights
    how: dict[str, Any] = dict(max_length=n, eos_id=None, rng=jax.random.key(0))
    sample = decoding.autoregressive_sample
    return {
        "retrax": lambda: sample(cached, prompt, **how),
        "greedy": lambda: sample(cached, prompt, temperature=0.0, **how),
        "beams": lambda: decoding.beam_search(cached, prompt, n_beams=4, **how),
        "uncached": lambda: sample(uncached, prompt, eval_mode=True, **how),
    }


def hand_written(prompt: np.ndarray, n: int) -> Callable[[], Any]:
    """The network, its cache and the loop written out in JAX."""
    weights = initial_weights()
    positions = jnp.asarray(sinusoids())

    def network(weights: Any, cache: Any, ids: Any, index: Any) -> Any:
        x = weights["embedding"][ids]
        x = x + jax.lax.dynamic_slice_in_dim(positions, index, ids.shape[1])
        at = index + jnp.arange(ids.shape[1])
        seen = (jnp.arange(ROOM) <= at[:, None])[None, None]
        new_cache = []
        for w, (keys, values) in zip(weights["blocks"], cache, strict=True):
            h = norm(x, w["norm_1"])
            q, k, v = (heads(dense(h, w[name])) for name in "qkv")
            keys = jax.lax.dynamic_update_slice(keys, k, (0, index, 0, 0))
            values = jax.lax.dynamic_update_slice(values, v, (0, index, 0, 0))
            h = jax.nn.dot_product_attention(q, keys, values, mask=seen)
            x = x + dense(jnp.reshape(h, x.shape), w["o"])
            h = jax.nn.relu(dense(norm(x, w["norm_2"]), w["in"]))
            x = x + dense(h, w["out"])
            new_cache.append((keys, values))
        x = norm(x[:, -1], weights["norm"])
        return dense(x, weights["logits"]), new_cache

    @jax.jit
    def sample(weights: Any, prompt: Any, rng: Any) -> Any:
        n_rows = prompt.shape[0]
        empty = jnp.zeros((n_rows, ROOM, N_HEADS, D // N_HEADS))
        cache = [(empty, empty)] * N_LAYERS
        prompt = jnp.pad(prompt, ((0, 0), (1, 0)))
        logits, cache = network(weights, cache, prompt, 0)
        token = jax.random.categorical(jax.random.fold_in(rng, 0), logits)

        def step(loop: Any, t: Any) -> Any:
            token, cache = loop
            index = prompt.shape[1] + t - 1
            logits, cache = network(weights, cache, token[:, None], index)
            new = jax.random.categorical(jax.random.fold_in(rng, t), logits)
            return (new, cache), token

        (last, _), tokens = jax.lax.scan(step, (token, cache), jnp.arange(1, n))
        return jnp.concatenate([tokens, last[None]]).T

    rng = jax.random.key(0)
    return lambda: np.asarray(sample(weights, prompt, rng))


def initial_weights() -> Any:
    """Random weights."""
    rng = np.random.default_rng(1)

    def matrix(n_in: int, n_out: int) -> Any:
        w = rng.standard_normal((n_in, n_out)) / np.sqrt(n_in)
        return jnp.asarray(w, jnp.float32), jnp.zeros(n_out)

    def scale() -> Any:
        return jnp.ones(D), jnp.zeros(D)

    blocks = [
        {
            **{name: matrix(D, D) for name in "qkvo"},
            "in": matrix(D, D_FF),
            "out": matrix(D_FF, D),
            "norm_1": scale(),
            "norm_2": scale(),
        }
        for _ in range(N_LAYERS)
    ]
    return {
        "embedding": matrix(N_IDS, D)[0],
        "blocks": blocks,
        "norm": scale(),
        "logits": matrix(D, N_IDS),
    }


def dense(x: Any, w: Any) -> Any:
    """x W + b."""
    return x @ w[0] + w[1]


def heads(x: Any) -> Any:
    """(batch, length, D) -> (batch, length, N_HEADS, D / N_HEADS)."""
    return jnp.reshape(x, (*x.shape[:2], N_HEADS, -1))


def norm(x: Any, w: Any) -> Any:
    """Layer normalization."""
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(variance + 1e-6) * w[0] + w[1]


def sinusoids() -> np.ndarray:
    """(ROOM, D) positions."""
    angles = np.arange(ROOM)[:, None] / 10000 ** (np.arange(0, D, 2) / D)
    pairs = np.stack([np.sin(angles), np.cos(angles)], axis=-1)
    return pairs.reshape(ROOM, D).astype(np.float32)


if __name__ == "__main__":
    main()

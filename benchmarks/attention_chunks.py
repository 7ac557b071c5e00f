"""Attention over a long sequence, whole and by chunks of queries: memory and time.

Compiles forward and backward pass of `CausalAttention` on one sequence, and prints as
one JSON line the peak of temporary bytes (XLA's `memory_analysis`) of both forms and
their times, measured in turn; ratios are to the whole form, medians over rounds.

usage: python benchmarks/attention_chunks.py [--length N] [--chunks N ...] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from retrax import layers as tl
from retrax.shapes import signature

D, N_HEADS = 128, 2


def main() -> None:
    """Measures all forms in turn and prints them as one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    x = jax.random.normal(jax.random.key(0), (1, args.length, D))
    forms: dict[str, Any] = {"whole": compiled(x, None)}
    forms |= {f"chunk_{n}": compiled(x, n) for n in args.chunks}
    times: dict[str, list[float]] = {name: [] for name in forms}
    for i in range(args.rounds + 1):
        for name, run in forms.items():
            start = time.perf_counter()
            jax.block_until_ready(run(x))
            if i:
                times[name].append(time.perf_counter() - start)
    bytes_of = {n: f.memory_analysis().temp_size_in_bytes for n, f in forms.items()}
    result = {
        "benchmark": "attention_chunks",
        "length": args.length,
        "jax": jax.__version__,
        "temporary_mb": {n: round(b / 2**20, 1) for n, b in bytes_of.items()},
        "temporary_ratio": {n: b / bytes_of["whole"] for n, b in bytes_of.items()},
        "s": {n: round(statistics.median(t), 2) for n, t in times.items()},
        "time_ratio": {
            n: statistics.median(a / b for a, b in zip(t, times["whole"], strict=True))
            for n, t in times.items()
        },
    }
    for name in ("temporary_ratio", "time_ratio"):
        result[name] = {k: round(v, 3) for k, v in result[name].items()}
    print(json.dumps(result))


def compiled(x: jax.Array, chunk: int | None) -> Any:
    """Gradients of the layer's weights and inputs, compiled."""
    layer = tl.CausalAttention(D, n_heads=N_HEADS, dropout=0.0, chunk=chunk)
    layer.init(signature(x), rng=jax.random.key(1))
    weights, state = layer.weights, layer.state

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(layer.pure_fn(x, weights, state, None)[0] ** 2)

    grads = jax.jit(lambda x: jax.grad(loss, argnums=(0, 1))(weights, x))
    return grads.lower(x).compile()


if __name__ == "__main__":
    main()

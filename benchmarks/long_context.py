"""A Reformer on long sequences: memory of a whole training step, time of attention.

Prints one JSON line for each part; each part runs in a process of its own.

  step       one training step of a ReformerLM (12 layers, d_model 256) on one sequence:
             seconds, and the most memory that the process ever had, beside what
             `inspect` predicts for the step
  predicted  what `inspect` says of that model, and of the same one with full attention,
             in each way of training, without running them
  attention  time of LSH attention, forward and backward, for a token of sequences from
             4,096 tokens on, with freed memory kept as `retrax train` does; the goal is
             at most 1.5 times as much at 65,536. Also in time of the processor, which
             other programs disturb less

usage: python benchmarks/long_context.py [--part step predicted attention] [--length N]
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from retrax import layers as tl
from retrax import models, optimizers
from retrax.shapes import ShapeDtype, signature
from retrax.trainer import StepTrainer, allocator
from retrax.trainer.inspect.totals import totals

VOCAB, D, HEADS, D_HEAD, LAYERS, CHUNK = 256, 256, 4, 64, 12, 64
GIB = 2**30


def main() -> None:
    """Runs each part that is asked for in a new process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--length", type=int, default=65536, help="a power of 4")
    parser.add_argument("--here", action="store_true", help="run in this process")
    args = parser.parse_args()
    for part in args.part:
        if args.here:
            line = PARTS[part](args.length)
            print(json.dumps({"benchmark": "long_context", "part": part, **line}))
            continue
        flags = ["--here", "--part", part, "--length", str(args.length)]
        subprocess.run([sys.executable, __file__, *flags], check=True)


def lsh(**kwargs: Any) -> tl.Layer:
    """LSH attention in one round, one head at a time."""
    return tl.LSHSelfAttention(chunk_len=CHUNK, n_parallel_heads=1, **kwargs)


def full(**kwargs: Any) -> tl.Layer:
    """Attention of all tokens to all before them, one head at a time."""
    return tl.SelfAttention(share_qk=True, n_parallel_heads=1, **kwargs)


def model_with_loss(length: int, attention: Any) -> tl.Layer:
    """The language model of a sequence of that length."""
    side = round(length**0.5)
    lm = models.ReformerLM(
        VOCAB,
        d_model=D,
        d_ff=4 * D,
        d_attention_key=D_HEAD,
        d_attention_value=D_HEAD,
        n_layers=LAYERS,
        n_heads=HEADS,
        dropout=0.0,
        max_len=length,
        attention_type=attention,
        pos_axial_shape=(side, side),
        ff_chunk_size=min(length, 4096),
        scan_layers=True,
    )
    return tl.Serial(lm, tl.WeightedCategoryCrossEntropy())


def batch_signature(length: int) -> tuple[ShapeDtype, ...]:
    """Shapes of (ids, ids, weights)."""
    ids = ShapeDtype((1, length), np.int32)
    return ids, ids, ShapeDtype((1, length))


def step(length: int) -> dict[str, Any]:
    """One step, and the peak of this process."""
    adam = optimizers.Adam(1e-4)
    model, sig = model_with_loss(length, lsh), batch_signature(length)
    (predicted,) = totals(model, sig, adam, ("reversible",))
    model.init(sig, rng=jax.random.key(0))
    trainer = StepTrainer(model, adam, n_devices=1)
    ids = np.random.default_rng(0).integers(1, VOCAB, (1, length)).astype(np.int32)
    batch = (ids, ids, np.ones((1, length), np.float32))
    before = psutil.Process().memory_info().rss
    start = time.perf_counter()
    loss, stats = trainer.one_step(batch, jax.random.key(1))
    loss = float(loss)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "length": length,
        "loss": round(loss, 4),
        "gradients_finite": bool(stats["grads_finite"]),
        "seconds_with_compiling": round(seconds, 1),
        "peak_rss_gib": round(peak / GIB, 2),
        "rss_before_step_gib": round(before / GIB, 2),
        "predicted_gib": round(predicted.peak / GIB, 2),
        "of_it_held_gib": round(predicted.held / GIB, 2),
    }


def predicted(length: int) -> dict[str, Any]:
    """GiB by attention and way of training; the machine's memory."""
    found: dict[str, Any] = {"length": length}
    for name, attention in (("lsh", lsh), ("full", full)):
        sums = totals(
            model_with_loss(length, attention),
            batch_signature(length),
            optimizers.Adam(),
            ("plain", "reversible", "remat"),
        )
        found[f"{name}_gib"] = {t.mode: round(t.peak / GIB, 2) for t in sums}
    found["machine_gib"] = round(psutil.virtual_memory().total / GIB, 2)
    return found


def attention(longest: int) -> dict[str, Any]:
    """Microseconds a token, forward and backward, by length."""
    allocator.keep_freed_memory()
    found: dict[str, dict[int, float]] = {"us_per_token": {}, "cpu_us_per_token": {}}
    length = 4096
    while length <= longest:
        layer = lsh(n_heads=HEADS, d_qk=D_HEAD, d_v=D_HEAD, causal=True, mode="eval")
        x = jax.random.normal(jax.random.key(1), (1, length, D))
        layer.init(signature(x), rng=jax.random.key(0))
        gradient = jax.jit(jax.grad(functools.partial(_loss, layer), (0, 1)))
        times = []
        for i in range(6):
            start = time.perf_counter(), time.process_time()
            jax.block_until_ready(gradient(x, layer.weights))
            if i:
                ends = time.perf_counter(), time.process_time()
                times.append([b - a for a, b in zip(start, ends, strict=True)])
        for name, each in zip(found, zip(*times, strict=True), strict=True):
            found[name][length] = round(1e6 * statistics.median(each) / length, 2)
        length *= 4
    growth = {k: round(v[max(v)] / v[min(v)], 3) for k, v in found.items()}
    return {**found, "growth": growth}


def _loss(layer: tl.Layer, x: Any, weights: Any) -> Any:
    return jnp.mean(jnp.square(layer.pure_fn(x, weights, layer.state, None)[0]))


PARTS = {"step": step, "predicted": predicted, "attention": attention}

if __name__ == "__main__":
    main()

"""Memory and time of deep models: kept, computed again, reversed, layer by layer.

Prints one JSON line for each part.

  compiled   bytes of temporary memory of a compiled gradient of n half residuals under
             Repeat (width 256, 512 rows), for each memory mode and for a scan with a
             custom_vjp written out by hand
  time       time of that gradient, as the median over rounds of the ratio to 'plain'
  layers     ReversibleSerialTrainer: most bytes alive on the device at any time in a
             step plus the largest temporary memory, against depth
  step       time of its step against StepTrainer's, and of compiling 64 equal layers
             against 4
  error      what reversing n blocks finds, against what was there

usage: python benchmarks/memory_depth.py [--part compiled time layers step error]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from retrax import layers as tl
from retrax import optimizers
from retrax.layers.reversing import reverse
from retrax.layers.running import MEMORY_MODES, memory_context
from retrax.shapes import signature
from retrax.trainer import ReversibleSerialTrainer, StepTrainer

WIDTH, ROWS = 256, 512


def main() -> None:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    for part in args.part:
        for line in PARTS[part](args.rounds):
            print(json.dumps({"benchmark": "memory_depth", "part": part, **line}))


def half(width: int = WIDTH) -> tl.Layer:
    """One half residual with one matrix."""
    return tl.ReversibleHalfResidual(tl.Dense(width), tl.Relu())


def deep(n: int, width: int = WIDTH) -> tl.Layer:
    """n half residuals on two streams, under Repeat."""
    block = tl.Repeat(lambda: [half(width), tl.ReversibleSwap()], n)
    return tl.Serial(tl.Dup(), block, tl.Add(), tl.Mean(axis=None))


def gradient_of(n: int, mode: str) -> tuple[Callable[..., Any], Any, Any]:
    """Returns (compiled gradient, weights, x)."""
    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    model = deep(n)
    model.init(signature(x), rng=jax.random.key(0))
    weights = jax.tree.map(lambda w: w / n**0.5, model.weights)

    def loss(weights: Any, x: Any) -> Any:
        with memory_context(mode):
            return model.pure_fn(x, weights, model.state, None)[0]

    if mode == "by hand":
        weights, loss = tuple(jax.tree.leaves(weights)), by_hand
    return jax.jit(jax.grad(loss)).lower(weights, x).compile(), weights, x


@jax.custom_vjp
def streams(weights: Any, x: Any) -> Any:
    """The same network as a scan, differentiated by reversing, without retrax."""

    def body(xy: Any, wb: Any) -> Any:
        a, b = xy
        return (b, a + jax.nn.relu(b @ wb[0] + wb[1])), None

    return jax.lax.scan(body, (x, x), weights)[0]


def _streams_back(kept: Any, grads: Any) -> Any:
    weights, y = kept

    def body(carry: Any, wb: Any) -> Any:
        (b, a), (gb, ga) = carry
        f, vjp = jax.vjp(lambda b, wb: jax.nn.relu(b @ wb[0] + wb[1]), b, wb)
        gb_more, gw = vjp(ga)
        return ((a - f, b), (ga, gb + gb_more)), gw

    (_, (ga, gb)), gw = jax.lax.scan(body, (y, grads), weights, reverse=True)
    return gw, ga + gb


def _streams_forward(w: Any, x: Any) -> Any:
    y = streams(w, x)
    return y, (w, y)


streams.defvjp(_streams_forward, _streams_back)


def by_hand(weights: Any, x: Any) -> Any:
    """The loss of `deep` without retrax."""
    a, b = streams(weights, x)
    return jnp.mean(a + b)


def compiled(rounds: int) -> Any:
    """Temporary bytes by depth; the goal is at most 1.02 from 8 to 128."""
    for mode in (*MEMORY_MODES, "by hand"):
        mb = {
            n: gradient_of(n, mode)[0].memory_analysis().temp_size_in_bytes / 2**20
            for n in (8, 32, 128)
        }
        yield {"mode": mode, "temp_mb": mb, "ratio_128_to_8": round(mb[128] / mb[8], 3)}


def timed(rounds: int) -> Any:
    """Time of the gradient of 32 layers; the goal is 1.35 times that of keeping."""
    fns = {mode: gradient_of(32, mode) for mode in (*MEMORY_MODES, "by hand")}
    times = in_turn({k: lambda f=f: f[0](*f[1:]) for k, f in fns.items()}, rounds)
    yield {"ms": medians(times), "ratio_to_plain": ratios(times, "plain")}


def layer_by_layer(rounds: int) -> Any:
    """Most bytes on the device in a step for 8 and 128 layers, against a bound.

    Copies go beside the computation, so steps differ; the median is compared.

    The bound is two layers (weights, gradients, two slots), what one block works on
    (its two streams before and after, their cotangents, and one value inside), and the
    rest of the data stack (the batch).
    """
    found = {}
    for n in (8, 128):
        trainer, batch = trainers(n, ROWS, WIDTH)[1:]
        trainer.one_step(batch, jax.random.key(0))
        peak_of_step(trainer, batch)
        peaks = [peak_of_step(trainer, batch) / 2**20 for _ in range(rounds)]
        found[n] = statistics.median(peaks), max(peaks)
    layer = 4 * 4 * (WIDTH * WIDTH + WIDTH) / 2**20
    stream = ROWS * WIDTH * 4 / 2**20
    bound = 2 * layer + 9 * stream + 3 * stream
    yield {
        "peak_mb": {n: round(mb, 2) for n, (mb, _) in found.items()},
        "largest_peak_mb": {n: round(mb, 2) for n, (_, mb) in found.items()},
        "ratio_128_to_8": round(found[128][0] / found[8][0], 3),
        "bound_mb": round(bound, 2),
        "ratio_to_bound": round(found[128][0] / bound, 3),
    }


def peak_of_step(trainer: Any, batch: Any) -> int:
    """Most bytes on the device in a step: at each program what is alive, what it gives
    (but what it writes over its arguments) and its temporary memory."""
    gc.collect()
    before = live_bytes()
    peaks, needs = [0], {}

    def watched(i: int, what: str) -> Any:
        program = programs(i, what)

        def call(*args: Any) -> Any:
            key = (id(program), str(jax.tree.map(jnp.shape, args)))
            if key not in needs:
                needs[key] = program.lower(*args).compile().memory_analysis()
            m = needs[key]
            given = m.output_size_in_bytes - m.alias_size_in_bytes
            peaks.append(live_bytes() - before + given + m.temp_size_in_bytes)
            return program(*args)

        return call

    programs, trainer._program = trainer._program, watched
    trainer.one_step(batch, jax.random.key(0))
    trainer._program = programs
    return max(peaks)


def step_time(rounds: int) -> Any:
    """Time of a step against StepTrainer's at tens of milliseconds a layer."""
    n, rows, width = 6, 4096, 768
    plain, layered, batch = trainers(n, rows, width)
    key = jax.random.key(0)
    times = in_turn(
        {
            "plain": lambda: plain.one_step(batch, key)[0],
            "layer_by_layer": lambda: layered.one_step(batch, key)[0],
        },
        rounds,
    )
    ms = medians(times)
    yield {
        "ms": ms,
        "ms_per_layer_plain": round(ms["plain"] / n, 1),
        "ratio_to_plain": ratios(times, "plain"),
    }
    seconds = {}
    for n in (8, 4, 64):  # The first one also pays what a process pays once.
        _, layered, batch = trainers(n, 8, 32)
        start = time.perf_counter()
        layered.one_step(batch, key)
        first = time.perf_counter() - start
        start = time.perf_counter()
        layered.one_step(batch, key)
        seconds[n] = first - (time.perf_counter() - start)
    yield {"compile_s": seconds, "ratio_64_to_4": round(seconds[64] / seconds[4], 3)}


def reconstruction(rounds: int) -> Any:
    """Largest error of reversing n blocks, relative to the largest input."""
    for dtype in (jnp.float32, jnp.bfloat16):
        errors = {}
        for n in (4, 16, 64):
            layers = tl.Repeat(lambda: [half(64), tl.ReversibleSwap()], n)
            x = jax.random.normal(jax.random.key(1), (64, 64)).astype(dtype)
            layers.init(signature((x, x)), rng=jax.random.key(0))
            weights = jax.tree.map(
                lambda w, n=n, dtype=dtype: (w / n**0.5).astype(dtype), layers.weights
            )
            y, state = layers.pure_fn((x, x), weights, layers.state, None)
            back = reverse(layers, y, weights, layers.state, state, None)
            differences = [jnp.max(jnp.abs(b - x)).astype(float) for b in back]
            errors[n] = float(max(differences) / jnp.max(jnp.abs(x)))
        eps = float(jnp.finfo(dtype).eps)
        yield {
            "dtype": jnp.dtype(dtype).name,
            "relative_error": {n: float(f"{e:.3g}") for n, e in errors.items()},
            "in_eps_per_block": {n: round(e / eps / n, 3) for n, e in errors.items()},
        }


def trainers(n: int, rows: int, width: int) -> tuple[Any, Any, Any]:
    """Returns (StepTrainer, ReversibleSerialTrainer, batch) for n layers."""
    rng = np.random.default_rng(0)
    batch = (
        rng.standard_normal((rows, width), np.float32),
        rng.standard_normal((rows, width), np.float32),
        np.ones((rows, width), np.float32),
    )
    made = []
    for _ in range(2):
        block = tl.Repeat(lambda: [half(width), tl.ReversibleSwap()], n)
        model = tl.Serial(tl.Serial(tl.Dup(), block, tl.Add()), tl.L2Loss())
        model.init(signature(batch), rng=jax.random.key(0))
        made.append(model)
    adam = optimizers.Adam(1e-4)
    return (
        StepTrainer(made[0], adam, n_devices=1),
        ReversibleSerialTrainer.from_model(made[1], adam, n_devices=1),
        batch,
    )


def live_bytes() -> int:
    """Bytes of all arrays that are alive; of those in one place, once."""
    return sum(
        {x.unsafe_buffer_pointer(): x.nbytes for x in jax.live_arrays()}.values()
    )


def in_turn(fns: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Times all functions in turn, round after round."""
    for fn in fns.values():
        jax.block_until_ready(fn())
    times: dict[str, list[float]] = {name: [] for name in fns}
    for _ in range(rounds):
        for name, fn in fns.items():
            start = time.perf_counter()
            jax.block_until_ready(fn())
            times[name].append(time.perf_counter() - start)
    return times


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    """Median milliseconds."""
    return {k: round(1e3 * statistics.median(t), 1) for k, t in times.items()}


def ratios(times: dict[str, list[float]], base: str) -> dict[str, float]:
    """Median over rounds of the ratio to `base` in the same round."""
    return {
        k: round(
            statistics.median(a / b for a, b in zip(t, times[base], strict=True)), 3
        )
        for k, t in times.items()
    }


PARTS = {
    "compiled": compiled,
    "time": timed,
    "layers": layer_by_layer,
    "step": step_time,
    "error": reconstruction,
}

if __name__ == "__main__":
    main()

"""Time of one training step: retrax against hand-written JAX and other frameworks.

All do the same work in one process, in turn, round after round, and each ratio is the
median over rounds of its time to that of the hand-written loop in the same round: so
a machine that is slow for a while does not favour anybody. Prints one JSON line for
each workload.

  mlp    64-128-64-10, batch 32, Adam: what a framework costs
  wide   64-1024-1024-10, batch 512, Adam: steps of 10 ms and more

  hand_written    jax.jit with donation, Adam written out, loss read at the end
  step_trainer    retrax.StepTrainer.one_step
  trainer         retrax.Trainer.train_epoch: stream, schedule, progress, logging on
  nnx, equinox, haiku, keras   each framework's own loop with Optax or its own Adam,
                  loss logged every 50 steps (Keras: fit() with its logs)

usage: python benchmarks/step_time.py [--work mlp wide] [--rounds N] [--steps N]
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np

LR = 1e-3
N_BATCHES = 16
LOG_EVERY = 50
WORKS = {"mlp": ((64, 128, 64, 10), 32), "wide": ((64, 1024, 1024, 10), 512)}

Loop = Callable[[int], None]


def main() -> None:
    """Measures every workload and prints a JSON line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", nargs="+", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=0, help="steps in a round")
    args = parser.parse_args()
    for work in args.work:
        n_steps = args.steps or {"mlp": 200, "wide": 10}[work]
        print(json.dumps(measure(work, args.rounds, n_steps)), flush=True)


def measure(work: str, rounds: int, n_steps: int) -> dict[str, Any]:
    """Times all loops of a workload in turn."""
    widths, batch = WORKS[work]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N_BATCHES * batch, widths[0]), np.float32)
    y = rng.integers(0, widths[-1], N_BATCHES * batch, np.int32)
    loops: dict[str, Loop] = {}
    missing = []
    for name, make in LOOPS.items():
        needs = NEEDS.get(name)
        if needs and importlib.util.find_spec(needs) is None:
            missing.append(name)
            continue
        loops[name] = make(widths, batch, x, y)
        loops[name](n_steps)  # Compiles, and fills caches.
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            start = time.perf_counter()
            loop(n_steps)
            times[name].append((time.perf_counter() - start) / n_steps)
    base = times["hand_written"]
    return {
        "benchmark": "step_time",
        "work": work,
        "jax": jax.__version__,
        "us_per_step": {
            n: round(1e6 * statistics.median(t), 1) for n, t in times.items()
        },
        "ratio_to_hand_written": {
            n: round(statistics.median(a / b for a, b in zip(t, base, strict=True)), 3)
            for n, t in times.items()
        },
        "not_installed": missing,
    }


def batches(x: np.ndarray, y: np.ndarray, batch: int) -> Callable[[int], Any]:
    """Returns a function from step number to a batch of host arrays."""
    xs = x.reshape(N_BATCHES, batch, -1)
    ys = y.reshape(N_BATCHES, batch)
    return lambda i: (xs[i % N_BATCHES], ys[i % N_BATCHES])


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    """Mean cross-entropy of integer targets."""
    log_p = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_p, y[..., None], -1))


def looped(step: Callable[[int], Any], log: bool) -> Loop:
    """Returns a loop over `step`, which returns the loss; it ends when all is done."""
    done = 0

    def loop(n: int) -> None:
        nonlocal done
        loss, shown = None, io.StringIO()
        for i in range(done, done + n):
            loss = step(i)
            if log and i % LOG_EVERY == 0:
                print(f"step {i} loss {float(loss):.4f}", file=shown)
        jax.block_until_ready(loss)
        done += n

    return loop


def hand_written(widths: Any, batch: int, x: Any, y: Any) -> Loop:
    """The network and Adam written out in JAX."""
    keys = jax.random.split(jax.random.key(0), len(widths))
    weights = [
        {"w": jax.random.normal(k, (i, o)) / np.sqrt(i), "b": jnp.zeros(o)}
        for k, i, o in zip(keys, widths[:-1], widths[1:], strict=False)
    ]
    moments = (jax.tree.map(jnp.zeros_like, weights),) * 2
    moments = jax.tree.map(jnp.copy, moments)

    def loss_fn(weights: Any, xy: Any) -> jax.Array:
        h, targets = xy
        for layer in weights[:-1]:
            h = jax.nn.relu(h @ layer["w"] + layer["b"])
        return cross_entropy(h @ weights[-1]["w"] + weights[-1]["b"], targets)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(weights: Any, moments: Any, i: Any, xy: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(weights, xy)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, moments[1], grads)
        c1, c2 = 1 - 0.9 ** (i + 1.0), 1 - 0.999 ** (i + 1.0)
        weights = jax.tree.map(
            lambda w, m, v: w - LR * (m / c1) / (jnp.sqrt(v / c2) + 1e-8), weights, m, v
        )
        return weights, (m, v), loss

    get = batches(x, y, batch)

    def step(i: int) -> Any:
        nonlocal weights, moments
        weights, moments, loss = update(weights, moments, np.int32(i), get(i))
        return loss

    return looped(step, log=False)


def _retrax_model(widths: Any) -> Callable[..., Any]:
    from retrax import layers as tl

    def model(mode: str = "train") -> Any:
        del mode
        hidden = [[tl.Dense(w), tl.Relu()] for w in widths[1:-1]]
        return tl.Serial(hidden, tl.Dense(widths[-1]))

    return model


def step_trainer(widths: Any, batch: int, x: Any, y: Any) -> Loop:
    """retrax, one step at a time."""
    from retrax import layers as tl
    from retrax import optimizers, shapes, trainer

    get = batches(x, y, batch)
    model = tl.Serial(_retrax_model(widths)(), tl.CategoryCrossEntropy())
    model.init(shapes.signature(get(0)), rng=jax.random.key(0))
    stepper = trainer.StepTrainer(
        model, optimizers.Adam(LR, weight_decay_rate=0.0), n_devices=1
    )
    key = jax.random.key(1)
    return looped(lambda i: stepper.one_step(get(i), key, i + 1, LR)[0], log=False)


def full_trainer(widths: Any, batch: int, x: Any, y: Any) -> Loop:
    """retrax with all that a run has: stream, schedule, progress and log files."""
    from retrax import data, optimizers, trainer
    from retrax import layers as tl
    from retrax.supervised import lr_schedules
    from retrax.trainer.run_log import RunLog

    folder = tempfile.mkdtemp()
    made = trainer.Trainer(
        _retrax_model(widths),
        tl.CategoryCrossEntropy(),
        optimizers.Adam(LR, weight_decay_rate=0.0),
        lr_schedules.warmup(100, LR),
        data.Inputs(data.ArrayStream((x, y), batch, drop_remainder=True)),
        output_dir=folder,
        should_save_checkpoints=False,
        n_devices=1,
        log=RunLog(folder, stream=io.StringIO()),
        log_every=LOG_EVERY,
    )

    def loop(n: int) -> None:
        made.train_epoch(n, 0)

    return loop


def nnx_loop(widths: Any, batch: int, x: Any, y: Any) -> Loop:
    """Flax NNX."""
    import optax
    from flax import nnx

    rngs = nnx.Rngs(0)

    class Net(nnx.Module):
        def __init__(self) -> None:
            sizes = zip(widths[:-1], widths[1:], strict=True)
            self.layers = nnx.List([nnx.Linear(i, o, rngs=rngs) for i, o in sizes])

        def __call__(self, h: Any) -> Any:
            for layer in list(self.layers)[:-1]:
                h = nnx.relu(layer(h))
            return self.layers[len(widths) - 2](h)

    net = Net()
    optimizer = nnx.Optimizer(net, optax.adam(LR), wrt=nnx.Param)

    @nnx.jit
    def update(net: Any, optimizer: Any, xy: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda n: cross_entropy(n(xy[0]), xy[1]))(net)
        optimizer.update(net, grads)
        return loss

    get = batches(x, y, batch)
    return looped(lambda i: update(net, optimizer, get(i)), log=True)


def equinox_loop(widths: Any, batch: int, x: Any, y: Any) -> Loop:
    """Equinox."""
    import equinox as eqx
    import optax

    keys = jax.random.split(jax.random.key(0), len(widths))
    layers: list[Any] = []
    for k, i, o in zip(keys, widths[:-1], widths[1:], strict=False):
        layers += [eqx.nn.Linear(i, o, key=k), eqx.nn.Lambda(jax.nn.relu)]
    net = eqx.nn.Sequential(layers[:-1])
    tx = optax.adam(LR)
    state = tx.init(eqx.filter(net, eqx.is_array))

    @eqx.filter_jit(donate="all-except-first")
    def update(xy: Any, net: Any, state: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(
            lambda n: cross_entropy(jax.vmap(n)(xy[0]), xy[1])
        )(net)
        updates, state = tx.update(grads, state)
        return eqx.apply_updates(net, updates), state, loss

    get = batches(x, y, batch)

    def step(i: int) -> Any:
        nonlocal net, state
        net, state, loss = update(get(i), net, state)
        return loss

    return looped(step, log=True)


def haiku_loop(widths: Any, batch: int, x: Any, y: Any) -> Loop:
    """Haiku with Optax; its loop is written by its users."""
    import haiku as hk
    import optax

    get = batches(x, y, batch)
    net = hk.without_apply_rng(hk.transform(lambda h: hk.nets.MLP(widths[1:])(h)))
    weights = net.init(jax.random.key(0), get(0)[0])
    tx = optax.adam(LR)
    state = tx.init(weights)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(weights: Any, state: Any, xy: Any) -> Any:
        loss, grads = jax.value_and_grad(
            lambda w: cross_entropy(net.apply(w, xy[0]), xy[1])
        )(weights)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(weights, updates), state, loss

    def step(i: int) -> Any:
        nonlocal weights, state
        weights, state, loss = update(weights, state, get(i))
        return loss

    return looped(step, log=True)


def keras_loop(widths: Any, batch: int, x: Any, y: Any) -> Loop:
    """Keras on JAX, through fit()."""
    import keras

    hidden = [keras.layers.Dense(w, activation="relu") for w in widths[1:-1]]
    net = keras.Sequential(
        [keras.Input((widths[0],)), *hidden, keras.layers.Dense(widths[-1])]
    )
    net.compile(
        keras.optimizers.Adam(LR),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )

    def loop(n: int) -> None:
        repeats = -(-n // N_BATCHES)
        xs, ys = np.tile(x, (repeats, 1)), np.tile(y, repeats)
        net.fit(xs[: n * batch], ys[: n * batch], batch_size=batch, verbose=0)

    return loop


LOOPS: dict[str, Callable[..., Loop]] = {
    "hand_written": hand_written,
    "step_trainer": step_trainer,
    "trainer": full_trainer,
    "nnx": nnx_loop,
    "equinox": equinox_loop,
    "haiku": haiku_loop,
    "keras": keras_loop,
}
NEEDS = {"nnx": "flax", "equinox": "equinox", "haiku": "haiku", "keras": "keras"}


if __name__ == "__main__":
    main()

"""Trains random chains of standard layers both ways, and counts the bits that differ.

Usage: exact_run.py SEED...; test_reversible_trainer.py judges what is printed: a JSON
line for each seed. To be run with XLA neither fusing operations nor contracting
products and sums, so that nothing depends on what else is in a program.
"""

import json
import sys

import jax
import numpy as np

from retrax import layers as tl
from retrax import optimizers
from retrax.shapes import signature
from retrax.trainer import ReversibleSerialTrainer, StepTrainer

KEY = jax.random.key(5)
CLASSES, STEPS = 3, 20


def block(kind, width):
    dense = tl.Dense(width)
    return {
        "relu": lambda: [dense, tl.Relu()],
        "tanh": lambda: [dense, tl.Dropout(0.3), tl.Tanh()],
        "batch_norm": lambda: [dense, tl.BatchNorm(axis=0, momentum=0.5), tl.Gelu()],
        "residual": lambda: tl.Residual(
            tl.LayerNorm(), tl.Dense(2 * width), tl.Gelu(), tl.Dropout(0.1), dense
        ),
        "repeat": lambda: tl.Repeat(lambda: [tl.Dense(width), tl.Tanh()], 3),
        "nested": lambda: tl.Serial(tl.Serial(tl.LayerNorm(), dense), tl.Elu()),
    }[kind]()


KINDS = ("relu", "tanh", "batch_norm", "residual", "repeat", "nested")


def chain(rng, width):
    kinds = rng.choice(KINDS, size=rng.integers(3, 7))
    return kinds, tl.Serial(
        tl.Dense(width), [block(kind, width) for kind in kinds], tl.Dense(CLASSES)
    )


def batches(rng, rows):
    return [
        (
            rng.normal(size=(rows, 5)).astype(np.float32),
            rng.integers(0, CLASSES, rows).astype(np.int32),
            rng.uniform(size=rows).astype(np.float32),
        )
        for _ in range(STEPS)
    ]


def trained(seed, layered):
    rng = np.random.default_rng(seed)
    width, rows = int(rng.integers(3, 40)), int(rng.integers(4, 40))
    kinds, net = chain(rng, width)
    data = batches(rng, rows)
    model = tl.Serial(net, tl.WeightedCategoryCrossEntropy())
    model.init(signature(data[0]), rng=jax.random.key(seed))
    before = jax.tree.map(np.array, model.weights)
    make = ReversibleSerialTrainer.from_model if layered else StepTrainer
    trainer = make(model, optimizers.Adam(1e-2), 1)
    losses = [float(trainer.one_step(batch, KEY)[0]) for batch in data]
    after = jax.tree.leaves((model.weights, model.state))
    moved = max(
        float(np.abs(a - b).max())
        for a, b in zip(
            jax.tree.leaves(before), jax.tree.leaves(model.weights), strict=True
        )
    )
    found = {"kinds": kinds.tolist(), "width": width, "rows": rows, "moved": moved}
    return found, [np.float64(losses), *map(np.asarray, after)]


def main():
    for seed in map(int, sys.argv[1:]):
        found, plain = trained(seed, layered=False)
        _, layered = trained(seed, layered=True)
        pairs = zip(plain, layered, strict=True)
        differ = sum(a.tobytes() != b.tobytes() for a, b in pairs)
        print(json.dumps({**found, "arrays": len(plain), "differ": differ}), flush=True)


if __name__ == "__main__":
    main()

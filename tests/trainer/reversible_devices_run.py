"""Trains layer by layer and as usual on 2 CPU devices, and saves what came out.

Usage: reversible_devices_run.py OUTPUT.npz; test_reversible_trainer.py judges it.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from retrax import layers as tl
from retrax import optimizers
from retrax.shapes import signature
from retrax.trainer import ReversibleSerialTrainer, StepTrainer

KEY = jax.random.key(5)


def batch(rows, seed):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(rows, 5)).astype(np.float32),
        rng.integers(0, 3, rows).astype(np.int32),
        rng.uniform(size=rows).astype(np.float32),
    )


def model(*middle):
    half = tl.ReversibleHalfResidual(
        tl.BatchNorm(axis=0, momentum=0.5), tl.Dropout(0.3), tl.Dense(4), tl.Tanh()
    )
    layers = (tl.Dense(4), *middle, tl.Dup(), half, tl.Add(), tl.Dense(3))
    whole = tl.Serial(tl.Serial(layers), tl.WeightedCategoryCrossEntropy())
    whole.init(signature(batch(8, 0)), rng=jax.random.key(1))
    return whole


def leaves(net):
    values = jax.tree.leaves((net.weights, net.state))
    return np.concatenate([np.asarray(x).ravel() for x in values])


def main():
    found = {}
    for name in ("plain", "layered"):

        def made(net, name=name, **options):
            if name == "plain":
                return StepTrainer(net, optimizers.Adam(0.01), 2, **options)
            return ReversibleSerialTrainer.from_model(
                net, optimizers.Adam(0.01), 2, **options
            )

        net = model()
        trainer = made(net)
        losses = [trainer.one_step(batch(8, i), KEY)[0] for i in range(3)]
        found[f"{name} losses"] = np.array(losses)
        found[f"{name} weights"] = leaves(net)
        loss, _ = trainer.one_step(batch(7, 9), KEY)
        found[f"{name} uneven"] = np.append(leaves(net), loss)
        net = model()
        made(net, adasum=True).one_step(batch(8, 0), KEY)
        found[f"{name} adasum"] = leaves(net)

    class Counter(tl.Layer):
        def init_weights_and_state(self, input_signature):
            self.state = jnp.zeros(())

        def forward(self, x):
            self.state = self.state + 1
            return x

    try:
        ReversibleSerialTrainer.from_model(
            model(Counter()), optimizers.SGD(), 2
        ).one_step(batch(8, 0), KEY)
    except ValueError as error:
        found["undeclared"] = np.array(str(error))
    np.savez(sys.argv[1], **found)


if __name__ == "__main__":
    main()

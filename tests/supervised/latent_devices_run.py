"""Computes the loss vectors on two CPU devices, trains, and saves what came out.

Usage: latent_devices_run.py OUTPUT.json

The values are judged in test_latent_devices.py.
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np


def load(name):
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses_of(vectors, inputs):
    """Name -> total, terms and norm of the gradient, from two devices."""
    import jax
    import jax.numpy as jnp

    from retrax.layers.running import batch_context
    from retrax.supervised.latent_config import LatentConfig
    from retrax.supervised.latent_layers import LatentThoughtLoss
    from retrax.trainer.devices import Devices
    from retrax.trainer.padding import pad_rows
    from retrax.trainer.step import Reduce

    tokens, start, levels, candidates, logits, cand_logits = vectors.arrays(inputs)
    # Devices cut the first axis, which must be that of rows.
    rows = (tokens, start, levels, candidates, logits.swapaxes(0, 1))
    batch = (*rows, cand_logits.swapaxes(0, 1))
    batch, mask = pad_rows(batch, 2)
    devices = Devices(2)
    reduce = Reduce(devices.axis, 2)

    def of(config, xs, mask):
        tokens, start, levels, candidates, logits, cand_logits = xs
        layer = LatentThoughtLoss(LatentConfig(**config))

        def total(logits):
            x = (logits.swapaxes(0, 1), cand_logits.swapaxes(0, 1), jnp.float32(0))
            x = (*x, tokens, start, levels, candidates)
            with batch_context(devices.axis, mask):
                loss, _, emitted = layer.apply(x, (), (), None)
            emitted = dict(emitted)
            return loss * reduce.share(emitted.pop("weight")), emitted

        (loss, emitted), grad = jax.value_and_grad(total, has_aux=True)(logits)
        out = {"total": reduce.sum(loss), "norm": reduce.sum(jnp.sum(grad**2)) ** 0.5}
        for name, (value, weight) in emitted.items():
            weights = jnp.maximum(reduce.sum(weight), 1e-9)
            out[name] = reduce.sum(value * weight) / weights
        return out

    wanted = [v for v in vectors.VECTORS["loss_vectors"] if v["inputs"] == inputs]

    def run(carry, shared, xs):
        return carry, {v["name"]: of(v["config"], *xs) for v in wanted}

    return devices.compile(run)((), (), (batch, mask))[1]


def trained():
    """Reports and weights after a joint step of 3 rows, on one device and on two."""
    import jax

    from retrax import models, optimizers
    from retrax.data.sudoku import SudokuDataset, generate
    from retrax.layers import Serial
    from retrax.shapes import signature
    from retrax.supervised.latent_config import LatentConfig
    from retrax.supervised.latent_layers import LatentThoughtLoss, LatentThoughts
    from retrax.supervised.latent_step import LatentStepTrainer, StepPlan

    config = LatentConfig(leak_weight=0.5, delta_bg=0.3)
    lm = models.LatentTransformerLM(4, 2, 8, 8, 1, 2, dropout=0.0)
    whole = Serial(LatentThoughts(lm, config), LatentThoughtLoss(config))
    batch = next(SudokuDataset(generate(3, 2, (4, 7), seed=2), 3, 2))
    whole.init(signature(batch), rng=jax.random.key(0))
    first = jax.tree.map(np.array, whole.weights)
    tokens = np.stack([batch[0], batch[0][::-1]], axis=1)
    found = []
    for n_devices in (1, 2):
        whole.weights = first
        trainer = LatentStepTrainer(whole, optimizers.SGD(0.1), n_devices=n_devices)
        trainer.plan = StepPlan((0, 1))
        _, stats = trainer.one_step((tokens, *batch[1:]), jax.random.key(1))
        names = ("loss", "ce_loss", "aux_loss", "leak_loss", "gradients_l2")
        leaves = [np.ravel(w) for w in jax.tree.leaves(trainer.weights)]
        reports = [float(stats[name]) for name in names]
        found.append(reports + np.concatenate(leaves).tolist())
    return found


def main():
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    vectors = load("latent_vectors")
    found = {}
    for inputs in vectors.VECTORS["inputs"]:
        found |= losses_of(vectors, inputs)
    named = {n: {k: float(v) for k, v in x.items()} for n, x in found.items()}
    named["trained"] = trained()
    Path(sys.argv[1]).write_text(json.dumps(named))


if __name__ == "__main__":
    main()

"""Computes the loss vectors on two CPU devices, and saves what came out.

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
    batch, mask = pad_rows(batch, len(tokens) % 2)
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


def main():
    vectors = load("latent_vectors")
    found = {}
    for inputs in vectors.VECTORS["inputs"]:
        found |= losses_of(vectors, inputs)
    named = {n: {k: float(v) for k, v in x.items()} for n, x in found.items()}
    Path(sys.argv[1]).write_text(json.dumps(named))


if __name__ == "__main__":
    np.seterr(all="raise")
    main()

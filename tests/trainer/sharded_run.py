"""Trains with weights cut in several ways, in a process with 8 CPU devices.

Usage: sharded_run.py OUTPUT.npz FOLDER

The values are judged in test_sharding.py.
"""

import sys

import numpy as np

N_STEPS = 20


def batches():
    """Uneven batches of (x, labels, weights), one shard masked, a small last one."""
    made = []
    for i in range(N_STEPS):
        rng = np.random.default_rng(i)
        n = 13 if i == N_STEPS - 1 else 16
        x = rng.normal(size=(n, 16)).astype(np.float32)
        q = rng.integers(0, 4, n).astype(np.float32)
        q[:2] = 0  # The whole of the first of eight shards.
        made.append((x, rng.integers(0, 8, n).astype(np.int32), q))
    return made


def train(**options):
    import jax

    from retrax import layers as tl
    from retrax import optimizers
    from retrax.shapes import signature
    from retrax.trainer import Evaluator, StepTrainer

    model = tl.Serial(
        tl.Dense(64),
        tl.BatchNorm(axis=0),
        tl.Relu(),
        tl.Dense(64),
        tl.Relu(),
        tl.Dense(8),
    )
    whole = tl.Serial(model, tl.WeightedCategoryCrossEntropy())
    data = batches()
    whole.init(signature(data[0]), rng=jax.random.key(1))
    trainer = StepTrainer(whole, optimizers.Adam(3e-4), **options)
    losses = [float(trainer.one_step(b, jax.random.key(5))[0]) for b in data]
    carry = trainer.carry
    leaves = jax.tree.leaves((carry.weights, carry.slots))
    metrics = {
        "loss": tl.WeightedCategoryCrossEntropy(),
        "accuracy": tl.CategoryAccuracy(),
    }
    evaluator = Evaluator(model, metrics, trainer.devices)
    values = evaluator.evaluate(data, carry.weights[0], carry.state[0])
    found = {
        "losses": np.array(losses),
        "metrics": np.array(list(values.values())),
        "bytes": np.array(sum(x.addressable_shards[0].data.nbytes for x in leaves)),
        "all_bytes": np.array(sum(x.nbytes for x in leaves)),
    }
    for i, leaf in enumerate(jax.tree.leaves((trainer.weights, trainer.state))):
        found[f"leaf{i}"] = np.array(leaf)
    return found


def refused():
    from jax.sharding import PartitionSpec as P

    from retrax.trainer import Sharding

    cases = {
        "unmatched": Sharding({"Attention": P("model")}, n_model=2),
        "undivided": Sharding({"0.Dense.*/0": P(None, "model")}, n_model=3),
        "axis": Sharding({"0.Dense.*/0": P("rows")}, n_model=2),
        "rank": Sharding({"0.Dense.*/1": P(None, "model")}, n_model=2),
        "grid": Sharding(n_model=3),
        "name": "zero3",
    }  # fmt: skip
    texts = {}
    for name, sharding in cases.items():
        try:
            train(n_devices=6 if name == "undivided" else 4, sharding=sharding)
            texts[name] = ""
        except ValueError as e:
            texts[name] = str(e)
    try:
        train(n_devices=4, sharding="fsdp", reduce="mean")
    except ValueError as e:
        texts["reduce"] = str(e)
    return texts


def resumed(folder):
    """A Trainer that saves with 4 devices cut and goes on with 2 and with 1 whole."""
    import io

    import jax

    from retrax import data, optimizers
    from retrax import layers as tl
    from retrax.trainer import Trainer
    from retrax.trainer.run_log import RunLog

    def run(folder, steps, n, sharding=None):
        trainer = Trainer(
            lambda mode: tl.Serial(tl.Dense(32), tl.Relu(), tl.Dense(10)),
            tl.CategoryCrossEntropy(),
            optimizers.Adam,
            lambda step: 1e-3,
            data.digits(batch_size=32, flatten=True),
            folder,
            n_devices=n,
            should_write_summaries=False,
            sharding=sharding,
            log=RunLog(stream=io.StringIO()),
        )
        trainer.run(steps, eval_frequency=None, eval_steps=1)
        trainer.close()
        leaves = jax.tree.leaves((trainer.model_weights, trainer.step_trainer.slots))
        return np.concatenate([np.ravel(x) for x in leaves])

    run(folder, 3, 4, "fsdp")
    run(folder, 6, 2)
    return {
        "resumed/parts": run(folder, 9, 4, "fsdp"),
        "resumed/whole": run(None, 9, 1),
    }


def looped():
    """Weights after `train` with a Loop, as a configuration asks for it."""
    import gin
    import jax

    from retrax import data, optimizers
    from retrax import layers as tl
    from retrax.supervised import trainer_lib

    found = {}
    for name, n in (("cut", 4), ("whole", 1)):
        with gin.unlock_config():
            gin.parse_config(f"num_devices.value = {n}")
            if name == "cut":
                gin.parse_config("train.sharding = @Sharding()")
                gin.parse_config("Sharding.rules = {'Dense.*/0$': (None, 'model')}")
                gin.parse_config("Sharding.n_model = 2")
        loop = trainer_lib.train(
            None,
            lambda mode: tl.Serial(tl.Dense(32), tl.Relu(), tl.Dense(10)),
            tl.CategoryCrossEntropy(),
            data.digits(batch_size=30, flatten=True),
            optimizers.Adam,
            steps=3,
            eval_steps=1,
            use_loop=True,
        )
        leaves = jax.tree.leaves(loop.step_trainer.carry.weights)
        share = sum(x.addressable_shards[0].data.nbytes for x in leaves)
        found[f"looped/{name}"] = np.concatenate([np.ravel(x) for x in leaves])
        found[f"looped/{name}_share"] = np.array(share / sum(x.nbytes for x in leaves))
    return found


def main():
    from jax.sharding import PartitionSpec as P

    from retrax.trainer import Sharding

    output, folder = sys.argv[1:]
    rows, columns = P("model", None), P(None, "model")
    tensor = {
        r"0.Dense\w*/0$": columns,
        r"3.Dense\w*/0$": rows,
        "0.Dense.*/1$": P("model"),
    }
    runs = {
        "one": dict(n_devices=1),
        "whole8": dict(n_devices=8),
        "fsdp4": dict(n_devices=4, sharding="fsdp"),
        "tensor": dict(n_devices=4, sharding=Sharding(tensor, n_model=2)),
        "both": dict(n_devices=8, sharding=Sharding(tensor, fsdp=True, n_model=2)),
    }
    results = {}
    for name, options in runs.items():
        results |= {f"{name}/{key}": value for key, value in train(**options).items()}
    results |= {f"refused/{name}": np.array(text) for name, text in refused().items()}
    np.savez(output, **results, **resumed(folder), **looped())


if __name__ == "__main__":
    main()

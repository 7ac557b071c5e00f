"""Trains on 1, 2 and 4 CPU devices, in a process that has 4, and saves what came out.

Usage: several_devices_run.py GROUP OUTPUT.npz

The values are judged in test_several_devices.py, which also imports the data from here.
"""

import io
import sys
import tempfile
from pathlib import Path

import numpy as np

N_CLASSES = 3
RNG_SEED = 5


def batches_of(sizes, weighted=True):
    """Batches of (x, labels, weights); weights go from 0 to 50."""
    batches = []
    for i, n in enumerate(sizes):
        rng = np.random.default_rng(i)
        x = rng.normal(size=(n, 4)).astype(np.float32)
        labels = rng.integers(0, N_CLASSES, n).astype(np.int32)
        # Of 8 rows on 4 devices the first device has nothing, the second nearly all.
        q = np.array([0, 0, 50, 1, 0.01, 3, 0, 7], np.float32)
        batches.append((x, labels, np.resize(q, n)) if weighted else (x, labels))
    return batches


EVEN, UNEVEN, SMALL = [8] * 5, [8, 7, 7, 8, 7], [3, 2, 3, 1, 3]


def model(loss, *middle):
    import jax

    from retrax import layers as tl
    from retrax.shapes import signature

    whole = tl.Serial(tl.Dense(6), *middle, tl.Tanh(), tl.Dense(N_CLASSES), loss)
    example = batches_of([8], weighted=loss.n_in == 3)[0]
    whole.init(signature(example), rng=jax.random.key(1))
    return whole


def train(make_model, batches, n, optimizer=None, **options):
    """Steps on n devices; {'initial', 'weights', 'state': leaves, 'losses'}."""
    import jax

    from retrax import optimizers
    from retrax.trainer import StepTrainer

    net = make_model()
    found = {
        f"initial{i}": np.array(w) for i, w in enumerate(jax.tree.leaves(net.weights))
    }
    optimizer = optimizer or optimizers.SGD(0.3)
    trainer = StepTrainer(net, optimizer, n_devices=n, **options)
    rng = jax.random.key(RNG_SEED)
    losses = [trainer.one_step(batch, rng)[0] for batch in batches]
    found["losses"] = np.array(losses)
    for name in ("weights", "state"):
        for i, leaf in enumerate(jax.tree.leaves(getattr(net, name))):
            found[f"{name}{i}"] = np.array(leaf)
    return found


def equal_runs():
    """Settings in which any number of devices gives the same numbers."""
    import jax.numpy as jnp

    from retrax import layers as tl
    from retrax import optimizers

    def fn_loss():
        def loss(scores, labels, weights):
            hit = jnp.take_along_axis(scores, labels[:, None], 1)[:, 0]
            return jnp.mean((hit - jnp.tanh(weights)) ** 2)

        return model(tl.Fn("Loss", loss))

    def plain():
        return model(tl.CategoryCrossEntropy())

    def weighted():
        return model(tl.WeightedCategoryCrossEntropy())

    def batch_norm():
        norm = tl.BatchNorm(axis=0, momentum=0.5)
        return model(tl.WeightedCategoryCrossEntropy(), norm)

    def adam():
        return optimizers.Adam(0.01, weight_decay_rate=0, eps=1e-8)

    results = {}
    for n in (1, 2, 4):
        runs = {
            "weighted_uneven": train(weighted, batches_of(UNEVEN), n),
            "batch_norm": train(batch_norm, batches_of(UNEVEN), n),
        }
        if n > 1:  # One device alone is in test_step_trainer.
            runs |= {
                "plain": train(plain, batches_of(EVEN, False), n, adam()),
                "plain_uneven": train(plain, batches_of(UNEVEN, False), n),
                "small": train(weighted, batches_of(SMALL), n),
                "accumulate": train(weighted, batches_of(UNEVEN), n, accumulate=2),
                "fn_loss": train(fn_loss, batches_of(UNEVEN), n),
                "pmap": train(weighted, batches_of(UNEVEN), n, backend="pmap"),
            }
        for name, run in runs.items():
            results |= {f"{name}/{n}/{key}": value for key, value in run.items()}
    return results


def other_runs():
    """What differs by device, and what is refused."""
    import jax
    import jax.numpy as jnp

    from retrax import layers as tl
    from retrax import optimizers
    from retrax.shapes import signature
    from retrax.trainer import Devices, StepTrainer

    results = {}

    def add(name, run):
        results.update({f"{name}/{key}": value for key, value in run.items()})

    def weighted():
        return model(tl.WeightedCategoryCrossEntropy())

    add("mean", train(weighted, batches_of(EVEN), 2, reduce="mean"))
    whole = batches_of([8], weighted=False)[0]
    half = tuple(x[:4] for x in whole)
    twice = tuple(np.concatenate([x, x]) for x in half)
    plain = [half, twice]
    for name, batch in zip(("half", "twice"), plain, strict=True):
        n = 1 if name == "half" else 2
        run = train(
            lambda: model(tl.CategoryCrossEntropy()),
            [batch],
            n,
            optimizers.SGD(1.0),
            adasum=n == 2,
        )
        add(f"adasum_{name}", run)

    class Counter(tl.Layer):
        """Keeps the sum of what it saw, if it changes its state at all."""

        def __init__(self, changes=True):
            super().__init__()
            self._changes = changes

        def init_weights_and_state(self, input_signature):
            self.state = jnp.zeros(())

        def forward(self, x):
            if self._changes:
                self.state = self.state + jnp.sum(jax.lax.stop_gradient(x))
            return x

    class Summed(Counter):
        state_sync = "sum"

    def counted(layer):
        return lambda: model(tl.CategoryCrossEntropy(), tl.Serial(layer))

    batch = batches_of([8], weighted=False)
    try:
        train(counted(Counter()), batch, 2)
        refused = ""
    except ValueError as error:
        refused = f"{type(error).__name__}: {error}"
    results["undeclared"] = refused
    add("undeclared_one", train(counted(Counter()), batch, 1))
    add("unchanged", train(counted(Counter(changes=False)), batch, 2))
    add("summed", train(counted(Summed()), batch, 2))
    try:
        Devices(5)
    except ValueError as error:
        results["too_many"] = str(error)

    class Draw(tl.Layer):
        def forward(self, x):
            return x + jax.random.uniform(self.rng, x.shape)

    rows = np.zeros((4, 1), np.float32)
    net = tl.Serial(Draw(), tl.Fn("Mean", lambda x: jnp.mean(x)))
    net.init(signature(rows), rng=jax.random.key(0))
    trainer = StepTrainer(net, optimizers.SGD(1.0), n_devices=4)
    results["draws"] = trainer.one_step((rows,), jax.random.key(RNG_SEED), 1)[0]
    return results | held_weights() | one_bad_device() | golden_steps()


def held_weights():
    """Weights that are held, read and set between steps, on 4 devices."""
    import jax

    from retrax import layers as tl
    from retrax import optimizers
    from retrax.trainer import StepTrainer

    net = model(tl.WeightedCategoryCrossEntropy())
    trainer = StepTrainer(net, optimizers.SGD(0.3), n_devices=4)
    rng = jax.random.key(RNG_SEED)
    held = [net.weights]
    for batch in batches_of(UNEVEN):
        trainer.one_step(batch, rng)
        held += [net.weights, trainer.weights]
    net.weights = held[0]
    loss, _ = trainer.one_step(batches_of(UNEVEN)[0], rng)
    # Not by NumPy: it would read a copy on the host that outlives the array.
    deleted = [x.is_deleted() for x in jax.tree.leaves(held)]
    equal = [bool(jax.numpy.all(x == x)) for x in jax.tree.leaves(held)]
    same = np.array(not any(deleted) and all(equal))
    return {"held": same, "loss_again": np.array(loss)}


def golden_steps():
    """The golden weighted steps on as many devices as each asks for."""
    import weighted_model  # Lies beside this script.

    vectors = weighted_model.VECTORS["train_steps"]
    return {f"golden/{n}": x for n, x in weighted_model.results_of(vectors).items()}


def one_bad_device():
    """Float16 on 2 and 4 devices, where one row of one device is not finite."""
    import jax

    from retrax import layers as tl
    from retrax import optimizers
    from retrax.trainer import DynamicLossScale, StepTrainer

    results = {}
    good, bad = batches_of([8, 8])
    bad[0][5, 0] = np.nan
    for n in (2, 4):
        trainer = StepTrainer(
            model(tl.WeightedCategoryCrossEntropy(), tl.BatchNorm(axis=0)),
            optimizers.Adam(0.01),
            n_devices=n,
            precision="mixed_float16",
            loss_scale=DynamicLossScale(256.0),
        )
        rng = jax.random.key(RNG_SEED)
        kept, skipped = [], []
        for batch in (good, bad, good):
            _, stats = trainer.one_step(batch, rng)
            skipped.append(int(stats["skipped_steps"]))
            carry = trainer.carry[:3]
            shards = [
                np.concatenate([np.ravel(x) for x in jax.tree.leaves(own)])
                for own in zip(
                    *(
                        [s.data for s in x.addressable_shards]
                        for x in jax.tree.leaves(carry)
                    ),
                    strict=True,
                )
            ]
            kept.append(np.stack(shards))
        results[f"bad/{n}/kept"] = np.stack(kept)
        results[f"bad/{n}/skipped"] = np.array(skipped)
        results[f"bad/{n}/scale"] = np.array(float(trainer.loss_scale.loss_scale))
    return results


def evaluations():
    """Metrics on batches of 8, 7 and 3, and a Trainer on 4 devices and then on 1."""
    import jax
    import jax.numpy as jnp

    from retrax import data, optimizers
    from retrax import layers as tl
    from retrax.shapes import signature
    from retrax.trainer import Devices, Evaluator, Trainer
    from retrax.trainer.run_log import RunLog

    results = {}
    batches = batches_of([8, 7, 3])
    net = tl.Serial(tl.Dense(N_CLASSES))
    net.init(signature(batches[0][0]), rng=jax.random.key(1))

    def hits(scores, labels):
        return jnp.mean((jnp.argmax(scores, -1) == labels).astype(jnp.float32))

    emitting = {
        "loss": tl.WeightedCategoryCrossEntropy(),
        "accuracy": tl.CategoryAccuracy(),
    }
    for i, w in enumerate(net.weights[0]):
        results[f"eval_weights{i}"] = np.array(w)
    for n in (1, 2, 4):
        for backend in ("shard_map", "pmap"):
            for name, metrics in {
                "told": emitting,
                "untold": {**emitting, "hits": tl.Fn("Hits", hits)},
            }.items():
                evaluator = Evaluator(net, metrics, Devices(n, backend))
                values = evaluator.evaluate(batches, net.weights, net.state)
                for metric, value in values.items():
                    results[f"eval/{n}/{backend}/{name}/{metric}"] = np.array(value)

    def digits_model(mode):
        return tl.Serial(tl.Dense(8), tl.BatchNorm(axis=0, mode=mode), tl.Dense(10))

    def trainer(folder, n):
        return Trainer(
            digits_model,
            tl.CategoryCrossEntropy(),
            optimizers.Momentum(0.1),
            lambda step: 0.1,
            data.digits(batch_size=30, eval_batch_size=101, flatten=True),
            folder,
            n_devices=n,
            should_write_summaries=False,
            log=RunLog(stream=io.StringIO()),
        )

    with tempfile.TemporaryDirectory() as folder:
        for n, name in ((4, "4"), (1, "4 then 1")):
            made = trainer(folder, n)
            made.run(3 if n == 4 else 5, eval_frequency=2, eval_steps=None)
            results[f"trainer/{name}/step"] = np.array(made.step)
    alone = trainer(None, 1)
    alone.run(5, eval_frequency=2, eval_steps=None)
    for name, which in (("4 then 1", made), ("1", alone)):
        for metric in ("loss", "accuracy"):
            values = [v for _, v in which.history.get("eval", f"metrics/{metric}")]
            results[f"trainer/{name}/{metric}"] = np.array(values)
        leaves = jax.tree.leaves((which.model_weights, which.model_state))
        for i, leaf in enumerate(leaves):
            results[f"trainer/{name}/leaf{i}"] = np.array(leaf)
    return results


def main():
    import jax

    group, output = sys.argv[1:]
    assert len(jax.local_devices()) == 4
    groups = {"equal": equal_runs, "other": other_runs, "evaluations": evaluations}
    np.savez(Path(output), **groups[group]())


if __name__ == "__main__":
    main()

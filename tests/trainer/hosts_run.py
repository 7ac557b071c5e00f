"""Trains small models in one of several processes, or alone, and saves the numbers.

Usage: hosts_run.py OUTPUT.npz COORDINATOR NUM_PROCESSES PROCESS_ID
"""

import sys

import numpy as np

STEPS = 20
ROWS = [12, 12, 10, 12, 5]  # 10 and 5 leave some devices with padding, or with nothing.


def batches():
    """(x, y, weights): uneven weights, rows 3 to 5 (one device's share) all masked."""
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        n = ROWS[step % len(ROWS)]
        x = rng.normal(size=(n, 6)).astype(np.float32)
        y = rng.integers(0, 4, n).astype(np.int32)
        weights = rng.uniform(0.1, 2.0, n).astype(np.float32)
        if step % 2:
            weights[3:6] = 0.0
        yield x, y, weights


def model_with_loss(normalizes):
    import jax

    from retrax import layers as tl
    from retrax.shapes import signature

    norm = [tl.BatchNorm(axis=0, mode="train")] if normalizes else []
    model = tl.Serial(
        tl.Dense(16, use_bias=not normalizes),  # Else its gradient would be noise.
        *norm,
        tl.Relu(),
        tl.PerExample("norms", lambda x: (x**2).sum(-1)),
        tl.Dense(4),
        tl.WeightedCategoryCrossEntropy(),
    )
    model.init(signature(next(batches())), rng=jax.random.key(1))
    return model


def train(normalizes, **options):
    """Returns (losses, weights, state, per-example values of all steps)."""
    import jax

    from retrax import optimizers
    from retrax.trainer import StepTrainer

    trainer = StepTrainer(model_with_loss(normalizes), optimizers.Adam(1e-2), **options)
    losses, norms = [], []
    for batch in batches():
        loss, stats = trainer.one_step(batch, jax.random.key(2))
        losses.append(float(loss))
        norms.append(np.asarray(stats["per_example/norms"]))
    weights = [np.asarray(x) for x in jax.tree.leaves(trainer.weights)]
    state = [np.asarray(x) for x in jax.tree.leaves(trainer.state)]
    return np.array(losses), weights, state, np.concatenate(norms)


def train_reversible(**options):
    import jax

    from retrax import layers as tl
    from retrax import optimizers
    from retrax.shapes import signature
    from retrax.trainer import ReversibleSerialTrainer

    half = tl.Serial(
        tl.ReversibleHalfResidual(tl.Dense(6)),
        tl.ReversibleSwap(),
    )
    model = tl.Serial(
        tl.Dup(), half, tl.Concatenate(), tl.Dense(4), tl.WeightedCategoryCrossEntropy()
    )
    model.init(signature(next(batches())), rng=jax.random.key(1))
    trainer = ReversibleSerialTrainer.from_model(
        model, optimizers.Adam(1e-2), **options
    )
    losses = [
        float(trainer.one_step(batch, jax.random.key(2))[0]) for batch in batches()
    ]
    return np.array(losses)


def evaluate(n_devices=None):
    """Returns the metrics over all batches, as an array."""
    import jax

    from retrax import layers as tl
    from retrax.shapes import signature
    from retrax.trainer import Devices, Evaluator

    model = tl.Serial(tl.Dense(4))
    weights, state = model.init(signature(next(batches())[0]), rng=jax.random.key(3))
    metrics = {
        "loss": tl.WeightedCategoryCrossEntropy(),
        "accuracy": tl.WeightedCategoryAccuracy(),
    }
    evaluator = Evaluator(model, metrics, Devices(n_devices))
    return np.array([*evaluator.evaluate(batches(), weights, state).values()])


def read_in_first_process(n_devices=None):
    """Reads weights and loss in process 0 alone: a gather would wait for ever."""
    import jax

    from retrax import optimizers
    from retrax.trainer import StepTrainer

    trainer = StepTrainer(model_with_loss(False), optimizers.Adam(1e-2), n_devices)
    loss, _ = trainer.one_step(next(batches()), jax.random.key(2))
    if jax.process_index() == 0:
        assert np.isfinite(float(loss))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(trainer.weights))


def disagree():
    """What the processes are told when they do not agree."""
    import jax

    from retrax import optimizers
    from retrax.errors import ConfigError, HostError
    from retrax.layers import tree as layer_tree
    from retrax.trainer import Devices, StepTrainer, hosts
    from retrax.trainer.agreement import Agreement

    def fails():
        raise FileNotFoundError("no such file: x.pkl")

    told = {}
    try:
        hosts.from_first(fails)
    except FileNotFoundError as e:
        told["told"] = str(e)
    steps = 10 + hosts.index()
    try:
        hosts.check_equal("the configuration", f"a = 1\ntrain.steps = {steps}\n")
    except ConfigError as e:
        told["config"] = str(e)
    model = model_with_loss(False)
    named = layer_tree.named_leaves(model, model.weights)
    weights = Devices().put(model.weights)
    same = list(zip([p for p, _ in named], jax.tree.leaves(weights), strict=True))
    hosts.check_same_weights(same)
    own = [x + (hosts.index() if k in (1, 3) else 0) for k, (_, x) in enumerate(named)]
    wrong = zip([p for p, _ in named], Devices().put(own), strict=True)
    try:
        hosts.check_same_weights(list(wrong))
    except HostError as e:
        told["differs"] = str(e)
    trainer = StepTrainer(model, optimizers.Adam(1e-2))
    trainer.one_step(next(batches()), jax.random.key(2))
    agreement = Agreement(check_every=3)
    agreement.begin(0, [trainer])
    if hosts.index() == 1:
        trainer.weights = jax.tree.map(lambda x: 2 * x, trainer.weights)
    looked = agreement.look(2, signum=None, wish=hosts.index() == 1, step_trainers=[])
    told["wish"] = looked[1]
    try:
        agreement.look(3, None, False, [trainer])
    except HostError as e:
        told["drift"] = str(e)
    # Every process gets what the first has, and knows it.
    mine = {
        "w": np.full(3, hosts.index(), np.float32),
        "k": jax.random.key(hosts.index()),
    }
    whole = hosts.share_weights(mine)
    assert (whole["w"] == 0).all() and whole["k"] == jax.random.key(0)
    return told


def numbers(**options):
    """Returns name -> array: losses, weights and more of all ways to train."""
    ways = {
        "plain": dict(normalizes=False),
        "norm": dict(normalizes=True),
        "accumulate": dict(normalizes=False, accumulate=2),
    }
    if not options:
        ways["fsdp"] = dict(normalizes=False, sharding="fsdp")
    out = {"reversible": train_reversible(**options), "metrics": evaluate(**options)}
    for name, way in ways.items():
        losses, weights, state, norms = train(**way, **options)
        out[f"{name}/losses"], out[f"{name}/norms"] = losses, norms
        out.update({f"{name}/weights{i}": x for i, x in enumerate(weights)})
        out.update({f"{name}/state{i}": x for i, x in enumerate(state)})
    return out


def main(output, address, n, i):
    from retrax.trainer import hosts, meeting

    meeting.connect(address, int(n), int(i), timeout=60)
    out = numbers() | disagree()
    read_in_first_process()
    np.savez(output, **out)
    hosts.barrier("done")


if __name__ == "__main__":
    main(*sys.argv[1:])

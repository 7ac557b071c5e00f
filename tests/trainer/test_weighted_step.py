"""The weighted step: shares, keys, summaries, values of rows, against golden numbers.

Steps on several devices run in test_several_devices.py, with the same vectors.
"""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from retrax import layers as tl
from retrax import optimizers
from retrax.layers.running import emit
from retrax.shapes import ShapeDtype, signature
from retrax.trainer import Devices, Evaluator, Reduce, StepTrainer, step_rngs
from retrax.trainer.reduce import reduced_metrics

KEY = jax.random.key(7)


def _script():
    path = Path(__file__).with_name("weighted_model.py")
    spec = importlib.util.spec_from_file_location("weighted_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOY = _script()
VECTORS = TOY.VECTORS
STEPS = {v["name"]: v for v in VECTORS["train_steps"]}


def over_replicas(fn):
    """Runs a function for each of several replicas that share an axis."""
    return jax.vmap(fn, axis_name="batch")


# --- Golden numbers ------------------------------------------------------------------


def check_step(vector, found):
    wanted = vector["expected"]
    near = dict(rtol=1e-5, atol=1e-5)
    for name in ("w", "b"):
        np.testing.assert_allclose(found[name], wanted["params"][name], **near)
    for name in ("loss", "moving_mean", "grad_norm", "per_example"):
        np.testing.assert_allclose(found[name], wanted[name], **near)
    for name, pair in wanted["metrics"].items():
        np.testing.assert_allclose(found[f"metrics/{name}"], pair, **near)


def test_one_replica():
    vector = STEPS["one_replica"]
    found = TOY.results_of([vector])
    check_step(vector, {k.split("/", 1)[1]: v for k, v in found.items()})


@pytest.mark.parametrize("name", [n for n, v in STEPS.items() if v["replicas"] > 1])
def test_shares_of_replicas(name):
    vector = STEPS[name]
    n = vector["replicas"]
    q = np.float32(vector["example_weight"]).reshape(n, -1)
    reduce = Reduce("batch", n)
    shares = over_replicas(lambda q: reduce.share(jnp.sum(q)))(q)
    np.testing.assert_allclose(shares, vector["expected"]["shares"], rtol=1e-6)
    losses = np.float32(vector["expected"]["local_losses"])
    whole = over_replicas(lambda loss, s: reduce.losses(loss * s))(losses, shares)
    np.testing.assert_allclose(whole, [vector["expected"]["loss"]] * n, rtol=1e-5)


@pytest.mark.parametrize("i", range(len(VECTORS["metric_means"])))
def test_means_of_metrics(i):
    vector = VECTORS["metric_means"][i]
    values, weights = np.float32(vector["values"]), np.float32(vector["weights"])
    reduce = Reduce("batch", len(values))
    found = over_replicas(lambda v, w: reduced_metrics({"m": (v, w)}, reduce))(
        values, weights
    )
    mean, total = vector["expected"]
    np.testing.assert_allclose(found["m"], [mean] * len(values), rtol=1e-5)
    np.testing.assert_allclose(found["m/weight"], [total] * len(values), rtol=1e-5)


@pytest.mark.parametrize("i", range(len(VECTORS["mean_sync"])))
def test_state_that_is_averaged(i):
    vector = VECTORS["mean_sync"][i]
    new = np.float32(vector["new_per_replica"])
    old = np.float32(vector["old"])
    reduce = Reduce("batch", len(new))
    found = over_replicas(lambda x: reduce.state(x, old, ["mean"]))(new)
    np.testing.assert_allclose(found, [vector["expected"]] * len(new), rtol=1e-5)


@pytest.mark.parametrize("i", range(len(VECTORS["prng"])))
def test_keys_of_a_step(i):
    vector = VECTORS["prng"][i]
    base = jax.random.key(vector["seed"])
    forward, backward = step_rngs(base, vector["step"])
    assert jax.random.key_data(forward).tolist() == vector["forward"]
    assert jax.random.key_data(backward).tolist() == vector["backward"]
    drawn = jax.random.uniform(forward, (3,))
    np.testing.assert_allclose(drawn, vector["forward_uniform3"], atol=1e-7)
    folded = jax.random.fold_in(base, vector["step"])
    assert jax.random.key_data(folded).tolist() == vector["eval_key"]


# --- Scan ----------------------------------------------------------------------------


class Body(tl.Layer):
    """h <- h / 2 + (2 x where a coin says so); gives the sum of h."""

    def __init__(self):
        super().__init__(n_in=2, n_out=2)

    def forward(self, inputs):
        x, h = inputs
        h = 0.5 * h + jnp.where(jax.random.bernoulli(self.rng, 0.5, (2,)), 2 * x, 0)
        emit("forward/h_norm", jnp.sqrt(jnp.sum(h * h)))
        return jnp.sum(h), h


@pytest.mark.parametrize("i", range(len(VECTORS["scan_wrap"])))
@pytest.mark.parametrize("cut", [None, 1, 2])
def test_scan_by_time_in_one_piece_or_two(i, cut):
    vector = VECTORS["scan_wrap"][i]
    xs, h = np.float32(vector["xs"]), jnp.zeros(2)
    scan = tl.Scan(Body(), keep_time=True)
    _, state = scan.init((signature(xs), signature(h)))
    key = jax.random.key(vector["seed"])
    ys, norms = [], []
    for part in [xs] if cut is None else [xs[:cut], xs[cut:]]:
        run = jax.jit(lambda x, h, s: scan.apply((x, h), scan.weights, s, key)[:2])
        (y, h), new_state = run(part, h, state)
        _, _, emitted = scan.apply((part, h), scan.weights, state, key)
        assert [name for name, _ in emitted] == ["forward/h_norm"]
        ys.append(y)
        state = new_state
    near = dict(rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.concatenate(ys), vector["ys"], **near)
    np.testing.assert_allclose(h, vector["final_h"], **near)
    assert int(state[1][1]) == vector["final_time_step"]
    if cut is None:
        _, _, emitted = scan.apply(
            (xs, jnp.zeros(2)),
            scan.weights,
            scan.init((signature(xs), signature(h)))[1],
            key,
        )
        norms = dict(emitted)["forward/h_norm"]
        np.testing.assert_allclose(norms, vector["summaries"]["h_norm"], **near)


def test_reset_state_begins_a_new_sequence():
    scan = tl.Scan(Body(), keep_time=True)
    scan.init((ShapeDtype((3, 2)), ShapeDtype((2,))), rng=KEY)
    xs, h = np.ones((3, 2), np.float32), jnp.zeros(2)
    first = scan((xs, h))[0]
    assert int(scan.state[1][1]) == 3
    second = scan((xs, h))[0]
    scan.reset_state()
    np.testing.assert_array_equal(scan((xs, h))[0], first)
    assert not np.array_equal(first, second)


# --- What layers hand out -------------------------------------------------------------


def regression(n=8, d=3):
    rng = np.random.default_rng(n)
    x = rng.normal(size=(n, d)).astype(np.float32)
    return x, x[:, :1] * 2, np.linspace(0, 3, n, dtype=np.float32)[:, None]


def trainer_of(*layers, batch=None, **options):
    model = tl.Serial(*layers, tl.L2Loss())
    model.init(signature(regression() if batch is None else batch), rng=KEY)
    return StepTrainer(model, optimizers.SGD(0.1), n_devices=1, **options)


def test_summaries_leave_loops_branches_of_memory_and_reversible_runs():
    def half():
        return tl.ReversibleHalfResidual(tl.Summary("size"), tl.Dense(3))

    def block():
        return tl.Serial(tl.Dense(3), tl.Summary("mean"), tl.SummaryScalar("scalar"))

    made = trainer_of(
        tl.Repeat(block, 4),
        tl.Dup(),
        tl.Repeat(lambda: tl.Serial(half(), tl.ReversibleSwap()), 2),
        half(),
        tl.Add(),
        tl.Summary("mean"),
        tl.Summary("rows", lambda x: x[:, 0]),
        tl.Dense(1),
    )
    _, stats = made.one_step(regression(), KEY)
    shapes = {n: np.shape(x) for n, x in stats.items() if n.startswith("forward/")}
    assert shapes == {
        "forward/mean": (4,),
        "forward/size": (2,),
        "forward/size_1": (),
        "forward/mean_1": (),
        "forward/rows": (8,),
    }
    assert np.shape(stats["summary_scalar"]) == ()
    np.testing.assert_allclose(
        stats["summary_scalar"], np.mean(stats["forward/mean"]), rtol=1e-6
    )


def test_pairs_and_rows_leave_loops_by_weight_and_by_row():
    class Pair(tl.Layer):
        def forward(self, x):
            emit("pair", (jnp.mean(x), jnp.sum(x)))
            return x * 2

    layers = [Pair(), tl.PerExample("x", lambda x: x[:, 0])]
    model = tl.Repeat(lambda: tl.Serial(*layers), 3)
    x = jnp.arange(1.0, 7.0).reshape(2, 3)
    model.init(signature(x))
    _, _, emitted = model.apply(x, model.weights, model.state, None)
    found = dict(emitted)
    steps = [np.asarray(x) * 2**i for i in range(3)]
    total = sum(s.sum() for s in steps)
    mean = sum(s.mean() * s.sum() for s in steps) / total
    np.testing.assert_allclose(found["pair"], (mean, total), rtol=1e-6)
    rows = np.stack([2 * s[:, 0] for s in steps], axis=1)
    np.testing.assert_allclose(found["per_example/x"], rows, rtol=1e-6)


def test_summaries_and_rows_of_micro_batches():
    layers = (
        tl.PerExample("first", lambda x: x[:, 0]),
        tl.Summary("mean"),
        tl.Summary("rows", lambda x: x[:, 1]),
        tl.Dense(1),
    )
    made = trainer_of(*layers, accumulate=4)
    batch = regression()
    _, stats = made.one_step(batch, KEY)
    np.testing.assert_allclose(stats["forward/mean"], batch[0].mean(), rtol=1e-5)
    np.testing.assert_array_equal(stats["per_example/first"], batch[0][:, 0])
    np.testing.assert_array_equal(stats["forward/rows"], batch[0][:, 1])
    short = tuple(x[:7] for x in batch)
    _, stats = made.one_step(short, KEY)  # Padded to 8 rows.
    np.testing.assert_array_equal(stats["per_example/first"], batch[0][:7, 0])


def test_evaluation_of_one_batch():
    batch = regression()
    model = tl.Serial(tl.Dense(1), tl.Summary("mean"), tl.PerExample("y"))
    model.init(signature(batch[0]), rng=KEY)
    evaluator = Evaluator(model, {"loss": tl.L2Loss()}, Devices(1))
    before = [np.asarray(x).tobytes() for x in jax.tree.leaves(model.state)]
    found = evaluator.batch(batch, model.weights, model.state)
    w, b = (np.float64(p) for p in model.weights[0])
    y = batch[0] @ w + b
    q = np.float64(batch[2])
    loss, weight = found.metrics["loss"]
    np.testing.assert_allclose(
        loss, (q * (y - batch[1]) ** 2).sum() / q.sum(), rtol=1e-5
    )
    np.testing.assert_allclose(weight, q.sum(), rtol=1e-6)
    np.testing.assert_allclose(found.summaries["forward/mean"], y.mean(), rtol=1e-4)
    np.testing.assert_allclose(
        found.per_example["per_example/y"], y, rtol=1e-4, atol=1e-6
    )
    assert [np.asarray(x).tobytes() for x in jax.tree.leaves(model.state)] == before


# --- Batches that weigh nothing, and accumulation -------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batch_that_weighs_nothing(accumulate):
    x, y, q = regression()
    made = trainer_of(tl.Dense(1), accumulate=accumulate)
    before = [np.array(w) for w in jax.tree.leaves(made.weights)]
    loss, stats = made.one_step((x, y, 0 * q), KEY)
    assert (loss, stats["empty_batch"], stats["gradients_l2"]) == (0, 1, 0)
    for a, b in zip(before, jax.tree.leaves(made.weights), strict=True):
        np.testing.assert_array_equal(a, b)
    _, stats = made.one_step((x, y, q), KEY)
    assert stats["empty_batch"] == 0
    np.testing.assert_allclose(stats["loss/weight"], q.sum(), rtol=1e-6)


def test_accumulation_equals_the_whole_batch_and_updates_once():
    batch = regression(24)
    schedule = optax.exponential_decay(0.1, 1, 0.5)
    found = []
    for k in (1, 6):
        model = tl.Serial(tl.Dense(4), tl.Tanh(), tl.Dense(1), tl.L2Loss())
        model.init(signature(batch), rng=KEY)
        chain = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(schedule))
        made = StepTrainer(model, optimizers.FromOptax(chain), 1, accumulate=k)
        for _ in range(3):
            made.one_step(batch, KEY)
        counts = [x for x in jax.tree.leaves(made.slots) if x.dtype == jnp.int32]
        assert counts and all(int(c) == 3 for c in counts)
        found.append(jax.tree.leaves(made.weights))
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_accumulation_needs_the_memory_of_one_micro_batch():
    d, rows, k = 64, 2048, 4

    def temporaries(rows, accumulate):
        x = np.ones((rows, d), np.float32)
        batch = x, x, np.ones((rows, d), np.float32)
        layers = [layer for _ in range(8) for layer in (tl.Dense(d), tl.Tanh())]
        made = trainer_of(*layers, batch=batch, accumulate=accumulate)
        lowered = made.lowered(signature(batch))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    micro, whole = temporaries(rows // k, 1), temporaries(rows, 1)
    assert temporaries(rows, k) <= 1.3 * micro < whole


# --- Structure -----------------------------------------------------------------------


@pytest.mark.parametrize("part", ["weights", "slots"])
def test_update_that_changes_the_structure_is_refused(part):
    class Wrong(StepTrainer):
        def update(self, step, grads, weights, slots, opt_params):
            weights, slots, stats = super().update(
                step, grads, weights, slots, opt_params
            )
            if part == "weights":
                weights = (weights[0][:1], *weights[1:])
            else:
                slots = (*slots, jnp.zeros(3))
            return weights, slots, stats

    model = tl.Serial(tl.Dense(1), tl.L2Loss())
    model.init(signature(regression()), rng=KEY)
    made = Wrong(model, optimizers.Momentum(0.1), n_devices=1)
    with pytest.raises(ValueError, match=f"new {part} do not match the {part}: "):
        made.one_step(regression(), KEY)

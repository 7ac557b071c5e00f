"""Training in half precision, against the golden step, float32, and bits kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import data, models, optimizers, storage, trainer
from retrax import layers as tl
from retrax.errors import ConfigError
from retrax.shapes import signature
from retrax.trainer import (
    DynamicLossScale,
    Evaluator,
    NoLossScale,
    Policy,
    StepTrainer,
    Trainer,
)
from retrax.trainer.precision import as_policy, mixed_precision_step, round_to

KEY = jax.random.key(3)
STRICT = Policy(compute_dtype="bfloat16", strict_rounding=True)


def regression(seed=0, n=8, d=4, k=2):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)).astype(np.float32)
    y = np.tanh(x @ rng.normal(size=(d, k))).astype(np.float32)
    return x, y, np.ones((n, k), np.float32)


def initialised(*layers, batch=None):
    model = tl.Serial(tl.Serial(*layers[:-1]), layers[-1])
    model.init(signature(batch or regression()), rng=jax.random.key(1))
    return model


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def stepped(model, batches, optimizer=None, **options):
    """(trainer, stats of each step)."""
    made = StepTrainer(model, optimizer or optimizers.SGD(0.1), n_devices=1, **options)
    return made, [jax.device_get(made.one_step(b, KEY)[1]) for b in batches]


# --- The policy -----------------------------------------------------------------------


def test_casting_touches_only_floats_of_the_weights_dtype():
    tree = {
        "w": jnp.ones(2),
        "half": jnp.ones(2, jnp.float16),
        "ids": jnp.arange(2),
        "key": jax.random.key(0),
    }
    cast = as_policy("mixed_bfloat16").cast_to_compute(tree)
    changed = [name for name in tree if cast[name].dtype != tree[name].dtype]
    assert changed == ["w"] and cast["w"].dtype == jnp.bfloat16
    back = as_policy("mixed_bfloat16").cast_to_output(cast)
    assert back["w"].dtype == jnp.float32 and back["half"].dtype == jnp.float16


def test_rounding_holds_where_a_compiler_would_leave_casts_out():
    x = np.linspace(1, 2, 97, dtype=np.float32)
    wanted = x.astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(
        jax.jit(round_to, static_argnums=1)(x, jnp.bfloat16), wanted
    )
    grads = jax.jit(jax.grad(lambda x: jnp.sum(round_to(x, jnp.bfloat16) * x)))(x)
    assert not np.array_equal(grads, 2 * x)


def test_layers_see_half_precision_and_losses_do_not():
    seen = {}

    def note(name):
        def look(x):
            seen[name] = str(x.dtype)
            return x

        return look

    def loss(y, targets, weights):
        seen["loss"] = [str(x.dtype) for x in (y, targets, weights)]
        return jnp.mean((y - targets) ** 2 * weights)

    model = initialised(
        tl.Fn("Before", note("first")),
        tl.Dense(2),
        tl.BatchNorm(axis=0),
        tl.Fn("After", note("last")),
        tl.Fn("Loss", loss),
    )
    made, _ = stepped(model, [regression()], precision="mixed_bfloat16")
    assert seen["first"] == seen["last"] == "bfloat16"
    assert seen["loss"] == ["float32"] * 3
    dtypes = {str(x.dtype) for x in jax.tree.leaves((made.weights, made.slots))}
    assert dtypes == {"float32"}
    assert {str(x.dtype) for x in jax.tree.leaves(made.state)} == {"float32", "int32"}


def test_targets_keep_their_dtype_also_without_a_model_of_its_own():
    """A Serial of all layers, as well as one of a model and its loss."""
    seen = []

    def loss(y, targets, weights):
        seen.append([str(x.dtype) for x in (y, targets, weights)])
        return jnp.mean((y - targets) ** 2 * weights)

    model = tl.Serial(tl.Dense(4), tl.Tanh(), tl.Dense(2), tl.Fn("Loss", loss))
    model.init(signature(regression()), rng=jax.random.key(1))
    seen.clear()
    _, stats = stepped(model, [regression()] * 2, precision="mixed_bfloat16")
    assert seen and all(dtypes == ["float32"] * 3 for dtypes in seen)
    assert stats[1]["loss"] < stats[0]["loss"]


def test_evaluation_is_in_the_same_precision():
    x, y, w = regression(n=16)
    model = tl.Dense(2)
    model.init(signature(x), rng=KEY)
    evaluator = Evaluator(model, {"loss": tl.L2Loss()}, precision="mixed_bfloat16")
    found = evaluator.evaluate([(x, y, w)], model.weights, model.state)["loss"]
    kernel, bias = (np.asarray(p, jnp.bfloat16).astype(float) for p in model.weights)
    outputs = x.astype(jnp.bfloat16).astype(float) @ kernel + bias
    exact = np.mean(
        (x @ np.asarray(model.weights[0]) + np.asarray(model.weights[1]) - y) ** 2
    )
    np.testing.assert_allclose(found, np.mean((outputs - y) ** 2), rtol=5e-3)
    assert found != pytest.approx(exact, rel=1e-6)


# --- Against the golden step ----------------------------------------------------------


def test_step_trainer_repeats_the_golden_step():
    model = initialised(tl.Dense(2), tl.L2Loss())
    w, b = (np.asarray(p) for p in model.weights[0][0])
    scale = DynamicLossScale(2.0**10, growth_interval=3)
    batches = [regression(seed) for seed in range(20)]
    made, stats = stepped(model, batches, precision=STRICT, loss_scale=scale)
    params, s, n = {"w": w, "b": b}, np.float32(2.0**10), np.int32(0)
    golden = jax.jit(mixed_precision_step, static_argnums=6)
    for (x, y, _), stat in zip(batches, stats, strict=True):
        out = golden(params, x, y, s, n, np.float32(0.1), 3)
        assert (stat["loss_scale"], stat["good_steps"]) == (s, n)
        np.testing.assert_allclose(stat["loss"], out["loss"], rtol=1e-5)
        params, s, n = out["params"], out["loss_scale"], out["good_steps"]
    found = made.weights[0][0]
    np.testing.assert_allclose(found[0], params["w"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], params["b"], rtol=1e-5, atol=1e-6)


# --- Skipping -------------------------------------------------------------------------


def with_state(dropout=0.2):
    return initialised(
        tl.Dense(8),
        tl.BatchNorm(axis=0),
        tl.Relu(),
        tl.Dropout(dropout),
        tl.Dense(2),
        tl.L2Loss(),
    )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_bad_step_changes_nothing_but_the_scale(accumulate):
    model = with_state()
    made, _ = stepped(
        model,
        [regression(0)],
        optimizers.Adam(0.01),
        precision="mixed_float16",
        loss_scale=DynamicLossScale(2.0**10),
        accumulate=accumulate,
    )
    before = bits((made.weights, made.slots, made.state))
    x, y, w = regression(1)
    x[5, 0] = np.nan
    _, stats = made.one_step((x, y, w), KEY)
    assert not stats["grads_finite"] and int(made.n_skipped) == 1
    assert bits((made.weights, made.slots, made.state)) == before
    assert float(made.loss_scale.loss_scale) == 2.0**9
    _, stats = made.one_step(regression(2), KEY)
    assert stats["grads_finite"] and stats["skipped_steps"] == 1
    assert bits((made.weights, made.slots, made.state)) != before


def test_too_large_a_scale_shrinks_until_training_goes_on():
    batches = [regression()] * 150
    final = {}
    for name, options in {
        "float32": {},
        "float16": dict(
            precision="mixed_float16", loss_scale=DynamicLossScale(2.0**24)
        ),
        "bfloat16": dict(precision="mixed_bfloat16"),
    }.items():
        model = initialised(tl.Dense(16), tl.Tanh(), tl.Dense(2), tl.L2Loss())
        made, stats = stepped(model, batches, **options)
        final[name] = stats[-1]["loss"]
        if name == "float16":
            finite = [bool(s["grads_finite"]) for s in stats]
            n_bad = finite.index(True)
            assert 1 <= n_bad <= 12 and all(finite[n_bad:])
            assert float(made.loss_scale.loss_scale) == 2.0 ** (24 - n_bad)
    assert final["float32"] < 0.05 * 0.3
    assert final["float16"] == pytest.approx(final["float32"], rel=0.05)
    assert final["bfloat16"] == pytest.approx(final["float32"], rel=0.2)


def test_own_gradients_are_not_unscaled():
    """Who overrides gradients and scales nothing gets no division."""

    class Own(StepTrainer):
        def gradients(self, weights, state, rng, batch):
            grad = jax.grad(lambda w: self.loss(w, state, rng, batch)[0])
            loss, aux = self.loss(weights, state, rng, batch)
            return grad(weights), aux._replace(loss=loss)

    found = []
    for cls in (StepTrainer, Own):
        made = cls(
            initialised(tl.Dense(2), tl.L2Loss()),
            optimizers.SGD(0.1),
            n_devices=1,
            loss_scale=DynamicLossScale(256.0),
        )
        made.one_step(regression(), KEY)
        found.append(made.weights[0][0][0])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


# --- Runs -----------------------------------------------------------------------------


class Planted:
    """Batches of a regression, one of them with a NaN."""

    def __init__(self, bad):
        self.bad = bad

    def __call__(self):
        for i in range(40):
            x, y, w = regression(i)
            if i == self.bad:
                x[0, 0] = np.nan
            yield x, y, w


def float16_trainer(folder, bad):
    stream = Planted(bad)
    return Trainer(
        lambda mode: tl.Serial(tl.Dense(8), tl.Relu(), tl.Dense(2)),
        tl.L2Loss(),
        optimizers.Adam,
        lambda step: 0.01,
        data.Inputs(lambda n: stream(), lambda n: stream()),
        output_dir=folder,
        n_devices=1,
        precision="mixed_float16",
        step_options={"loss_scale": DynamicLossScale(2.0**9, growth_interval=4)},
    )


@pytest.mark.parametrize("bad", [2, 7])
def test_resumed_run_equals_a_whole_one_across_a_skip(tmp_path, bad):
    whole = float16_trainer(tmp_path / "whole", bad)
    whole.run(10, eval_frequency=None, eval_steps=1)
    whole.close()
    for steps in (5, 10):
        half = float16_trainer(tmp_path / "half", bad)
        half.run(steps, eval_frequency=None, eval_steps=1)
        half.close()
    one, other = (storage.load(tmp_path / n / "model.pkl") for n in ("whole", "half"))
    assert one["n_skipped"] == other["n_skipped"] == 1
    for part in ("weights", "slots", "loss_scale"):
        assert bits(one[part]) == bits(other[part])
    # Bad at the third step: half of 512, doubled after four; at the eighth: vice versa.
    assert one["loss_scale"]["loss_scale"] == 2.0**9
    assert one["loss_scale"]["good_steps"] == {2: 3, 7: 2}[bad]


def test_checkpoint_without_a_scale_loads(tmp_path):
    run = float16_trainer(tmp_path, None)
    run.run(2, eval_frequency=None, eval_steps=1)
    run.close()
    payload = storage.load(tmp_path / "model.pkl")
    del payload["loss_scale"]
    storage.save(tmp_path / "model.pkl", payload)
    again = float16_trainer(tmp_path, None)
    assert again.step == 2
    assert float(again.step_trainer.loss_scale.loss_scale) == 2.0**9
    again.close()


def test_run_that_only_skips_says_so(tmp_path, capsys):
    stream = [tuple(np.full_like(p, np.nan) for p in regression())] * 60
    run = Trainer(
        lambda mode: tl.Dense(2),
        tl.L2Loss(),
        optimizers.SGD,
        lambda step: 0.01,
        data.Inputs(lambda n: iter(stream), lambda n: iter(stream)),
        output_dir=tmp_path,
        n_devices=1,
        log_every=5,
        precision="mixed_float16",
        step_options={"loss_scale": DynamicLossScale(2.0)},
    )
    run.run(40, eval_frequency=None, eval_steps=1)
    run.close()
    said = capsys.readouterr().out
    assert said.count("steps in a row were skipped") == 1
    assert "loss scale at its least, 1" in said


PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")


def trained(model, loss, inputs, steps, rate, precision):
    """The last evaluation metrics of a run, and how many steps it skipped."""
    run = Trainer(
        model,
        loss,
        optimizers.Adam,
        lambda step: rate,
        inputs,
        n_devices=1,
        precision=precision,
    )
    run.run(steps, eval_frequency=None, eval_steps=4)
    run.close()
    last = {
        m: run.history.get("eval", f"metrics/{m}")[-1][1] for m in ("loss", "accuracy")
    }
    return last["loss"], last["accuracy"], run.step_trainer.n_skipped


def test_digits_are_learned_in_half_precision():
    def model(mode):
        return tl.Serial(
            tl.Dense(64),
            tl.Relu(),
            tl.BatchNorm(axis=0, momentum=0.9, mode=mode),
            tl.Dense(10),
        )

    inputs = data.digits(batch_size=64, flatten=True)
    loss = tl.CategoryCrossEntropy()
    found = {p: trained(model, loss, inputs, 200, 3e-3, p) for p in PRECISIONS}
    assert found["float32"][1] > 0.94
    for name in PRECISIONS[1:]:
        assert found[name][1] == pytest.approx(found["float32"][1], abs=0.015)
        assert found[name][2] < 10


def test_text_is_learned_in_half_precision():
    def model(mode):
        return models.TransformerLM(
            72, 32, 64, n_layers=1, n_heads=2, dropout=0.0, max_len=32, mode=mode
        )

    inputs = data.shakespeare(batch_size=8, length=32)
    loss = tl.WeightedCategoryCrossEntropy()
    found = {p: trained(model, loss, inputs, 40, 1e-2, p) for p in PRECISIONS}
    assert found["float32"][0] < 3.4
    for name in PRECISIONS[1:]:
        assert found[name][0] == pytest.approx(found["float32"][0], rel=0.02)


# --- Bad input ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf16"}, "'float32', 'mixed_bfloat16', 'mixed_float16' or a"),
        ({"loss_scale": 1024.0}, "loss_scale must be a NoLossScale.*got 1024.0"),
    ],
)
def test_unknown_precision_is_refused(options, message):
    model = initialised(tl.Dense(2), tl.L2Loss())
    with pytest.raises(ConfigError, match=message):
        StepTrainer(model, optimizers.SGD(0.1), n_devices=1, **options)


@pytest.mark.parametrize("dtype", ["int8", "float64", "fp8", None])
def test_unknown_compute_dtype_is_refused(dtype):
    with pytest.raises(ConfigError, match="compute_dtype must be one of float32"):
        Policy(compute_dtype=dtype)


def test_float16_without_a_scale_warns():
    model = initialised(tl.Dense(2), tl.L2Loss())
    with pytest.warns(UserWarning, match="gradients below 6e-8 become 0"):
        StepTrainer(
            model,
            optimizers.SGD(0.1),
            n_devices=1,
            precision="mixed_float16",
            loss_scale=NoLossScale(),
        )


# --- Layer by layer -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "global_norm"),
    [("mixed_bfloat16", None), ("mixed_float16", "two_pass")],
)
def test_layer_by_layer_equals_the_plain_step(precision, global_norm):
    def half():
        return tl.ReversibleHalfResidual(tl.LayerNorm(), tl.Dense(4), tl.Tanh())

    def model():
        return initialised(
            tl.Dense(4), tl.Dup(), half(), tl.ReversibleSwap(), half(), tl.Add(),
            tl.Dense(2), tl.L2Loss(),
        )  # fmt: skip

    limit = 0.5 if global_norm else None
    batches = [regression(i) for i in range(6)]
    bad = tuple(np.array(p) for p in regression(9))
    bad[0][0, 0] = np.inf
    batches.insert(3, bad)
    scale = DynamicLossScale(2.0**8, growth_interval=2)
    options = dict(precision=precision, loss_scale=scale)
    plain, stats = stepped(
        model(),
        batches,
        optimizers.SGD(0.1, clip_grad_norm=limit),
        **options,
    )
    blocks, loss = trainer.extract_reversible_blocks(model())
    deep = trainer.ReversibleSerialTrainer(
        blocks,
        loss,
        lambda: optimizers.SGD(0.1, clip_grad_norm=limit),
        n_devices=1,
        global_norm=global_norm,
        **options,
    )
    for batch, stat in zip(batches, stats, strict=True):
        _, own = deep.one_step(batch, KEY)
        assert bool(own["grads_finite"]) == bool(stat["grads_finite"])
        assert float(own["loss_scale"]) == float(stat["loss_scale"])
        if stat["grads_finite"]:
            assert float(own["loss"]) == pytest.approx(float(stat["loss"]), rel=2e-3)
    assert deep.n_skipped == plain.n_skipped == 1
    assert jax.tree.leaves(deep.loss_scale) == jax.tree.leaves(plain.loss_scale)
    one, other = (jax.tree.leaves(t.weights) for t in (deep, plain))
    for a, b in zip(one, other, strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3)

"""train(): from arguments or a gin configuration to a trained model."""

import inspect
import os
import signal

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from retrax import layers as tl
from retrax import optimizers, storage
from retrax.data.arrays import ArrayStream
from retrax.data.inputs import Inputs
from retrax.errors import ConfigError
from retrax.supervised import trainer_lib
from retrax.supervised.callbacks import Callback
from retrax.supervised.training import EvalTask, Loop, TrainTask
from retrax.trainer import Interrupted, Trainer, load_trainer_state

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 5)).astype(np.float32)
Y = RNG.integers(0, 3, 32).astype(np.int32)
Q = RNG.uniform(0, 4, 32).astype(np.float32)


def model(mode="train"):
    return tl.Serial(tl.Dense(3))


def stream():
    return ArrayStream((X, Y, Q), 8, seed=1)


def inputs():
    return Inputs(stream(), ArrayStream((X[:12], Y[:12], Q[:12]), 8, repeat=False))


def train(folder, **changes):
    settings = {
        "model": model,
        "inputs": inputs,
        "optimizer": optimizers.SGD,
        "lr_schedule_fn": lambda: lambda step: 0.1,
        "steps": 6,
        "eval_frequency": 2,
        "eval_steps": 1,
        **changes,
    }
    return trainer_lib.train(folder, **settings)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.fixture(autouse=True)
def one_device():
    with gin.unlock_config():
        gin.bind_parameter("num_devices.value", 1)
    yield
    gin.clear_config()


def test_train_takes_traxs_arguments_in_traxs_order():
    expected = (
        "output_dir model loss_fn inputs optimizer lr_schedule_fn trainer_class steps "
        "checkpoints_at permanent_checkpoints_at eval_steps eval_frequency "
        "permanent_checkpoint_frequency random_seed save_graphs metrics "
        "checkpoint_highest checkpoint_lowest use_loop loss_chunk_size "
        "use_memory_efficient_trainer adasum init_checkpoint callbacks "
        "n_weights_shards additional_train_tasks additional_eval_tasks "
        "additional_eval_streams"
    ).split()
    parameters = inspect.signature(trainer_lib.train).parameters
    assert [name for name in parameters if name in expected] == expected
    defaults = {"steps": 1000, "eval_steps": 10, "eval_frequency": 100}
    assert {name: parameters[name].default for name in defaults} == defaults


def test_train_equals_a_hand_written_loop_and_returns_the_state(tmp_path, capsys):
    state = train(tmp_path)
    _, rng = jax.random.split(jax.random.key(0))
    whole = tl.Serial(model(), tl.WeightedCategoryCrossEntropy())
    weights, _ = whole.init(next(stream()), rng=rng)
    w, b = weights[0][0]

    def loss(weights, x, labels, q):
        scores = x @ weights[0] + weights[1]
        each = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
        return jnp.sum(each * q) / jnp.sum(q)

    weights, batches = (w, b), stream()
    for _ in range(6):
        grads = jax.grad(loss)(weights, *next(batches))
        weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)
    for got, want in zip(state.opt_state.weights[0], weights, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
    assert state.step == 6
    steps = [s for s, _ in state.history.get("eval", "metrics/loss")]
    assert steps == [1, 2, 4, 6]
    loaded = load_trainer_state(tmp_path, model("eval"))
    assert bits(loaded.opt_state.weights) == bits(state.opt_state.weights)
    assert {
        "config.gin",
        "curves.png",
        "eval",
        "metrics.jsonl",
        "model.pkl",
        "train",
    } <= set(names(tmp_path))
    text = capsys.readouterr().out
    for part in (
        "Starting training on 1 device.",
        "Total number of trainable weights: 18",
    ):
        assert part in text
    assert text.rstrip().endswith("Step      6: Training done.")


def test_a_run_that_is_done_says_how_to_train_longer(tmp_path, capsys):
    first = train(tmp_path, steps=3)
    written = (tmp_path / "model.pkl").stat().st_mtime_ns
    capsys.readouterr()
    again = train(tmp_path, steps=3)
    text = capsys.readouterr().out
    assert "This run is done: it has 3 of 3 steps" in text
    assert "--config='train.steps = 6'" in text
    assert bits(again.opt_state.weights) == bits(first.opt_state.weights)
    assert (tmp_path / "model.pkl").stat().st_mtime_ns == written
    assert train(tmp_path, steps=5).step == 5


def test_kept_checkpoints_under_both_of_traxs_names(tmp_path):
    train(tmp_path, checkpoints_at=[2], permanent_checkpoints_at=[3])
    kept = [name for name in names(tmp_path) if name.startswith("model_")]
    assert kept == ["model_2.pkl", "model_3.pkl"]


def test_permanent_checkpoints_come_regularly(tmp_path):
    train(tmp_path, permanent_checkpoint_frequency=2, eval_frequency=None)
    kept = [name for name in names(tmp_path) if name.startswith("model_")]
    assert kept == ["model_2.pkl", "model_4.pkl", "model_6.pkl"]
    last = storage.load(tmp_path / "model_6.pkl")["history"]["eval"]["metrics/loss"]
    assert [step for step, _ in last] == [6]


def test_options_reach_the_trainer(tmp_path):
    train(tmp_path / "first", steps=2)
    made = {}

    class Own(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made["start"] = bits(self.model_weights)
            made["reduce"] = self.step_trainer.reduce.kind
            made["options"] = kwargs
            made["dtype"] = str(self.step_trainer.policy.compute_dtype)

    train(
        tmp_path / "second",
        trainer_class=Own,
        steps=1,
        adasum=True,
        save_graphs=True,
        random_seed=3,
        precision="mixed_bfloat16",
        metrics={"mean": tl.WeightedCategoryAccuracy()},
        checkpoint_highest="mean",
        init_checkpoint=str(tmp_path / "first" / "model.pkl"),
    )
    first = load_trainer_state(tmp_path / "first", model("eval"))
    assert made["start"] == bits(first.opt_state.weights)
    assert made["dtype"] == "bfloat16"
    assert made["reduce"] == "adasum" and made["options"]["random_seed"] == 3
    assert {"forward.txt", "highest_mean.pkl"} <= set(names(tmp_path / "second"))


def test_a_run_is_configured_by_gin_and_reproduced_by_its_config(tmp_path):
    gin.clear_config()
    gin.parse_config(
        """
        num_devices.value = 1
        train.steps = 3
        train.eval_frequency = 2
        train.eval_steps = 1
        train.optimizer = @Adam
        train.lr_schedule_fn = @multifactor
        multifactor.factors = 'constant'
        multifactor.constant = 0.05
        Adam.b1 = 0.8
        """
    )
    first = trainer_lib.train(tmp_path / "first", model=model, inputs=inputs)
    text = (tmp_path / "first" / "config.gin").read_text()
    assert "Adam.b1 = 0.8" in text and "train.steps = 3" in text
    rate = first.history.last("train", "training/learning_rate")
    np.testing.assert_allclose(rate, (3, 0.05))
    np.testing.assert_allclose(first.opt_state.opt_params["b1"], 0.8)
    gin.clear_config()
    gin.parse_config(text)
    second = trainer_lib.train(tmp_path / "second", model=model, inputs=inputs)
    assert bits(second.opt_state.weights) == bits(first.opt_state.weights)


def test_a_signal_ends_the_run_with_its_exit_code(tmp_path):
    class Struck(Trainer):
        def train_step(self, batch):
            super().train_step(batch)
            if self.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="SIGTERM after step 3, saved in") as error:
        train(tmp_path, trainer_class=Struck)
    assert error.value.exit_code == 143
    assert storage.load(tmp_path / "model.pkl")["step"] == 3
    resumed, whole = train(tmp_path), train(None)
    assert bits(resumed.opt_state) == bits(whole.opt_state)
    assert resumed.history == whole.history
    with pytest.raises(Interrupted, match="nothing was saved"):
        train(None, trainer_class=Struck)


def test_a_loop_trains_as_a_trainer_does_and_says_when_it_is_done(tmp_path, capsys):
    state = train(None)
    capsys.readouterr()
    loop = train(tmp_path, use_loop=True)
    assert isinstance(loop, Loop) and loop.step == 6
    assert bits(loop.model.weights) == bits(state.opt_state.weights)
    for name in ("metrics/loss", "metrics/accuracy"):
        assert loop.history.get("eval", name) == state.history.get("eval", name)
    assert bits(load_trainer_state(tmp_path, model("eval")).opt_state.weights) == bits(
        state.opt_state.weights
    )
    text = capsys.readouterr().out
    for part in ("Starting training on 1 device.", "trainable weights: 18", "done."):
        assert part in text
    written = (tmp_path / "model.pkl").stat().st_mtime_ns
    train(tmp_path, use_loop=True)
    assert "This run is done: it has 6 of 6 steps" in capsys.readouterr().out
    assert (tmp_path / "model.pkl").stat().st_mtime_ns == written
    # One format: a Trainer goes on where a Loop ended, and the other way round.
    longer = train(tmp_path, steps=7)
    assert train(tmp_path, steps=8, trainer_class=Loop).step == 8
    assert longer.step == 7


def test_additional_tasks_and_streams_need_a_loop(tmp_path):
    seen = []

    class Steps(Callback):
        def on_step_end(self, step):
            seen.append(step)

    more = {
        "additional_train_tasks": [
            TrainTask(
                stream(),
                tl.WeightedCategoryCrossEntropy(),
                optimizers.SGD(0.2),
                export_prefix="more",
            )
        ],
        "additional_eval_tasks": [
            EvalTask(
                stream(), tl.WeightedCategoryAccuracy(), ["hits"], export_prefix="e"
            )
        ],
        "additional_eval_streams": [trainer_lib.named_stream("named", stream())],
    }
    with pytest.raises(ConfigError, match="additional_train_tasks needs a Loop: set"):
        train(None, **more)
    loop = train(
        None,
        steps=2,
        use_loop=True,
        callbacks=[Steps()],
        permanent_checkpoint_frequency=2,
        **more,
    )
    assert seen == [1, 2] and [t.export_prefix for t in loop.tasks] == [None, "more"]
    assert set(loop.history.metrics_for_mode("eval")) == {
        f"metrics/{name}"
        for name in ("0/loss", "0/accuracy", "named/loss", "named/accuracy", "e/hits")
    }


@pytest.mark.parametrize(
    ("changes", "error", "expected"),
    [
        ({"steps": 0}, ConfigError, "steps must be at least 1, got 0"),
        ({"steps": -5}, ConfigError, "steps must be at least 1, got -5"),
        ({"steps": 2.5}, ConfigError, "steps must be a whole number, got 2.5"),
        ({"steps": "9"}, ConfigError, "steps must be a whole number, got '9'"),
        ({"steps": True}, ConfigError, "steps must be a whole number, got True"),
        ({"steps": None}, ConfigError, "steps must be a whole number, got None"),
        ({"eval_steps": -1}, ConfigError, "eval_steps must be at least 0, got -1"),
        ({"eval_frequency": 1.5}, ConfigError, "eval_frequency must be a whole"),
        (
            {"permanent_checkpoint_frequency": 0},
            ConfigError,
            "must be at least 1, got 0",
        ),
        (
            {"permanent_checkpoint_frequency": 2, "permanent_checkpoints_at": [1]},
            ConfigError,
            "set only one of",
        ),
        ({"checkpoint_highest": "f1"}, ConfigError, "'f1'.*accuracy, loss"),
        ({"optimizer": "adam"}, TypeError, "optimizer must be.*got 'adam'"),
        ({"inputs": 5}, TypeError, "inputs must be data.Inputs, got 5"),
        ({"model": model()}, TypeError, "model must be a function of mode"),
        ({"loss_fn": "loss"}, TypeError, "loss_fn must be a loss layer, got 'loss'"),
        ({"metrics": {"a": 1}}, TypeError, "metric 'a' must be a layer, got 1"),
        ({"n_weights_shards": 2}, ConfigError, "n_weights_shards=2: weights are whole"),
        ({"loss_chunk_size": 8}, ConfigError, "loss_chunk_size needs a Loop"),
        (
            {"use_loop": True, "metrics": {"a": 1}},
            TypeError,
            "a metric must be a layer, got 1",
        ),
    ],
)
def test_a_mistake_is_told_and_nothing_is_written(tmp_path, changes, error, expected):
    folder = tmp_path / "run"
    with pytest.raises(error, match=expected):
        train(folder, **changes)
    assert not folder.exists() or names(folder) == []


def test_too_many_devices_are_told_and_nothing_is_written(tmp_path):
    with gin.unlock_config():
        gin.bind_parameter("num_devices.value", 1000)
    with pytest.raises(ConfigError, match="n_devices=1000 but there are"):
        train(tmp_path / "run")
    assert names(tmp_path / "run") == []


def test_a_directory_that_cannot_be_used_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"file is a file; choose a directory"):
        train(tmp_path / "file")
    for folder in (tmp_path / "file" / "run", "/proc/retrax_run"):
        with pytest.raises(ConfigError, match="cannot be written.*choose a directory"):
            train(folder)
    assert names(tmp_path) == ["file"]

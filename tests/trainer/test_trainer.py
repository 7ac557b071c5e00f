"""Trainer: one run from the first batch to the last checkpoint, in this process."""

import inspect
import io
import json
import os
import pickle
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from retrax import layers as tl
from retrax import optimizers, storage
from retrax.data.arrays import ArrayStream
from retrax.data.inputs import Inputs
from retrax.errors import CheckpointError, ConfigError, DataError
from retrax.trainer import StepTrainer, Trainer, epochs, from_loss, load_trainer_state
from retrax.trainer.default_metrics import default_metrics
from retrax.trainer.run_log import RunLog

RNG = np.random.default_rng(0)
X = RNG.normal(size=(44, 5)).astype(np.float32)
Y = RNG.integers(0, 3, 44).astype(np.int32)
Q = RNG.uniform(0, 4, 44).astype(np.float32)
TRAIN, EVAL = 32, 12  # Rows: four batches of 8; evaluation in batches of 8 and 4.


def model(mode="train"):
    return tl.Serial(tl.Dense(4), tl.Tanh(), tl.Dense(3))


def noisy_model(mode="train"):
    return tl.Serial(
        tl.Dense(4),
        tl.BatchNorm(axis=0, mode=mode),
        tl.Dropout(0.5, mode=mode),
        tl.Dense(3),
    )


def arrays(part, weighted=False):
    rows = slice(TRAIN) if part == "train" else slice(TRAIN, None)
    return tuple(a[rows] for a in ((X, Y, Q) if weighted else (X, Y)))


def train_stream(weighted=False):
    return ArrayStream(arrays("train", weighted), 8, seed=1)


def inputs(weighted=False, train=None):
    return Inputs(
        train or train_stream(weighted),
        ArrayStream(arrays("eval", weighted), 8, shuffle=False, repeat=False),
    )


def make(folder=None, kind=Trainer, **changes):
    """A trainer whose text is in `trainer.text`."""
    stream = io.StringIO()
    settings = {
        "model": model,
        "loss_fn": tl.CategoryCrossEntropy(),
        "optimizer": lambda: optimizers.Adam(0.01),
        "lr_schedule": lambda step: 0.1 / step,
        "inputs": inputs(),
        "output_dir": folder,
        "n_devices": 1,
        "log": RunLog(stream=stream),
        **changes,
    }
    trainer = kind(**settings)
    trainer.text = stream.getvalue
    return trainer


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def all_of(trainer):
    step_trainer = trainer.step_trainer
    return bits((trainer.model_weights, trainer.model_state, step_trainer.slots))


def names(folder):
    return sorted(p.name for p in folder.iterdir() if p.name != "run.lock")


def plain_loss(weights, x, labels):
    (w1, b1), _, (w2, b2) = weights
    scores = jnp.tanh(x @ w1 + b1) @ w2 + b2
    each = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
    return jnp.mean(each)


def close(got, want, tolerance=1e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


# --- Numbers of a run ----------------------------------------------------------------


def test_the_constructor_takes_what_traxs_takes():
    got = list(inspect.signature(Trainer).parameters.values())
    expected = (
        "model loss_fn optimizer lr_schedule inputs output_dir random_seed n_devices "
        "checkpoints_at should_save_checkpoints should_write_summaries metrics "
        "checkpoint_highest checkpoint_lowest init_checkpoint"
    ).split()
    assert [p.name for p in got[: len(expected)]] == expected
    assert all(p.default is None for p in got[5:9] + got[11:15])
    assert all(p.kind is p.KEYWORD_ONLY for p in got[len(expected) :])


def test_a_run_equals_a_hand_written_loop():
    trainer = make(optimizer=optimizers.SGD)
    weights = trainer.model_weights
    trainer.run(6, eval_frequency=4, eval_steps=1)
    stream = train_stream()
    for step in range(1, 7):  # The first batch of the data is in step 1.
        grads = jax.grad(plain_loss)(weights, *next(stream))
        weights = jax.tree.map(lambda w, g, r=0.1 / step: w - r * g, weights, grads)
    close(trainer.model_weights, weights)
    assert trainer.step == 6 and trainer.state.step == 6
    close(trainer.state.opt_state.weights, weights)
    assert trainer.n_devices == 1
    assert trainer.learning_rate == 0.1 / 6


def test_the_schedule_is_called_with_1_2_and_so_on():
    calls = []

    def schedule(step):
        calls.append(step)
        return 0.1

    trainer = make(lr_schedule=schedule)
    trainer.run(5, eval_frequency=None, eval_steps=0)
    assert calls == [1, 2, 3, 4, 5]
    assert all(type(step) is int for step in calls)


def test_history_holds_each_evaluation():
    trainer = make()
    trainer.run(10, eval_frequency=4, eval_steps=None)
    history = trainer.history
    assert history.modes == ["eval", "train"]
    metrics = ["metrics/accuracy", "metrics/loss"]
    assert history.metrics_for_mode("eval") == metrics
    assert history.metrics_for_mode("train") == [*metrics, "training/learning_rate"]
    for mode in ("eval", "train"):
        assert [s for s, _ in history.get(mode, "metrics/loss")] == [1, 4, 8, 10]
    rates = history.get("train", "training/learning_rate")
    assert rates == [(s, 0.1 / s) for s in (1, 4, 8, 10)]

    (w1, b1), _, (w2, b2) = jax.tree.map(np.float64, trainer.model_weights)
    x, labels = arrays("eval")
    scores = np.tanh(np.float64(x) @ w1 + b1) @ w2 + b2
    each = np.log(np.exp(scores).sum(1)) - scores[np.arange(EVAL), labels]
    np.testing.assert_allclose(
        history.last("eval", metrics[1])[1], each.mean(), rtol=1e-6
    )
    hits = (scores.argmax(1) == labels).mean()
    np.testing.assert_allclose(history.last("eval", metrics[0])[1], hits, rtol=1e-6)


def test_evaluating_after_each_step_changes_nothing():
    often, never = (
        make(model=noisy_model, inputs=inputs(weighted), loss_fn=loss)
        for weighted, loss in [(True, tl.WeightedCategoryCrossEntropy())] * 2
    )
    often.run(7, eval_frequency=1, eval_steps=None)
    never.run(7, eval_frequency=None, eval_steps=0)
    assert len(often.history.get("eval", "metrics/loss")) == 7
    assert never.history.modes == []
    assert all_of(often) == all_of(never)
    assert often.train_stream.state() == never.train_stream.state()
    often.evaluate(None)
    values = often.history.get("eval", "metrics/loss")
    assert values[-1] == values[-2]  # The same whole set again.


def test_random_numbers_come_from_the_seed():
    runs = [make(model=noisy_model, random_seed=seed) for seed in (None, 0, 1)]
    for trainer in runs:
        trainer.run(2, eval_frequency=None, eval_steps=0)
    none, zero, one = map(all_of, runs)
    assert none == zero != one


def test_two_trainers_in_one_process_do_not_touch_each_other():
    alone = make(model=noisy_model)
    for _ in range(4):
        alone.train_step(next(alone.train_stream))
    pair = make(model=noisy_model), make(model=noisy_model, random_seed=5)
    for _ in range(4):
        for trainer in pair:
            trainer.train_step(next(trainer.train_stream))
    assert all_of(pair[0]) == all_of(alone)
    assert all_of(pair[1]) != all_of(alone)


def test_epochs_end_after_step_1_and_then_regularly():
    assert list(epochs(10, 0, [1, 3, 4, 4])) == [1, 3, 4, 2]
    assert list(epochs(10, 4, [1, 3, 4, 4])) == [4, 2]
    assert list(epochs(10, 10, [1, 3, 4, 4])) == []


def test_step_options_reach_the_step():
    plain, cut = make(), make(step_options={"accumulate": 3})
    for trainer in (plain, cut):
        trainer.run(3, None, 0)
    close(plain.model_weights, cut.model_weights)


@pytest.mark.parametrize(
    ("loss", "rank", "expected"),
    [
        (tl.L2Loss(), 2, {"loss"}),
        (tl.CategoryCrossEntropy(), 2, {"loss", "accuracy"}),
        (tl.WeightedCategoryCrossEntropy(), 1, {"loss", "accuracy"}),
        (
            tl.WeightedCategoryCrossEntropy(),
            2,
            {"loss", "accuracy", "sequence_accuracy"},
        ),
    ],
)
def test_default_metrics_suit_the_loss_and_the_targets(loss, rank, expected):
    metrics = default_metrics(loss, rank)
    assert set(metrics) == expected and metrics["loss"] is loss
    assert all(m.n_in == loss.n_in for m in metrics.values())


# --- Experiments: what can be overridden ---------------------------------------------


def test_overriding_gradients_gives_label_smoothing_with_a_penalty():
    class Smoothed(Trainer):
        def gradients(self, weights, state, rng, batch):
            def loss(weights, state, rng, batch):
                x, labels = batch
                scores, new_state = self._model_train.pure_fn(
                    x, weights[0], state[0], rng
                )
                targets = 0.9 * jax.nn.one_hot(labels, 3) + 0.1 / 3
                each = optax.softmax_cross_entropy(scores, targets)
                penalty = sum(jnp.sum(w**2) for w in jax.tree.leaves(weights))
                _, aux = self.step_trainer.loss(weights, state, rng, batch)
                aux = aux._replace(metrics={"penalty": penalty})
                return jnp.mean(each) + 0.01 * penalty, aux

            return from_loss(loss, self.step_trainer.reduce)(weights, state, rng, batch)

    trainer = make(kind=Smoothed, optimizer=optimizers.SGD)
    weights = trainer.model_weights
    stream = train_stream()

    def plain(weights, x, labels):
        (w1, b1), _, (w2, b2) = weights
        scores = jnp.tanh(x @ w1 + b1) @ w2 + b2
        log_p = jax.nn.log_softmax(scores)
        own = jnp.take_along_axis(log_p, labels[:, None], 1)[:, 0]
        penalty = sum(jnp.sum(w**2) for w in jax.tree.leaves(weights))
        return jnp.mean(-0.9 * own - 0.1 * log_p.mean(1)) + 0.01 * penalty

    trainer.run(3, None, 0)
    for step in range(1, 4):
        grads = jax.grad(plain)(weights, *next(stream))
        weights = jax.tree.map(lambda w, g, r=0.1 / step: w - r * g, weights, grads)
    close(trainer.model_weights, weights)


def test_overriding_train_step_evaluate_and_log_metrics(tmp_path):
    class Own(Trainer):
        seen, logged = (), ()

        def train_step(self, batch):
            self.seen += (len(batch[0]),)
            super().train_step(tuple(part[:4] for part in batch))

        def evaluate(self, n_eval_steps):
            values = self.evaluation_round([arrays("eval")], None)
            self.log_metrics({"own": 2 * values["loss"]}, self, "eval")

        def log_metrics(self, metrics, summ_writer, log_prefix):
            super().log_metrics(metrics, summ_writer, log_prefix)
            self.logged += ((log_prefix, *metrics),)

        def scalars(self, values, step):
            self.logged += ((step, *values),)

    trainer = make(tmp_path, Own, optimizer=optimizers.SGD)
    weights, stream = trainer.model_weights, train_stream()
    trainer.run(2, eval_frequency=2, eval_steps=1)
    for rate in (0.1, 0.05):
        x, labels = next(stream)
        grads = jax.grad(plain_loss)(weights, x[:4], labels[:4])
        weights = jax.tree.map(lambda w, g, r=rate: w - r * g, weights, grads)
    close(trainer.model_weights, weights)
    assert trainer.seen == (8, 8)
    assert trainer.logged == (
        (1, "metrics/own"),
        ("eval", "own"),
        (2, "metrics/own"),
        ("eval", "own"),
    )
    got = trainer.history.get("eval", "metrics/own")
    assert [step for step, _ in got] == [1, 2]
    close(got[-1][1], 2 * plain_loss(weights, *arrays("eval")))
    assert load_trainer_state(tmp_path, model("eval")).history == trainer.history


def test_the_step_trainer_can_be_replaced():
    class Halved(StepTrainer):
        def update(self, step, grads, weights, slots, opt_params):
            return jax.tree.map(lambda w: w / 2, weights), slots, {}

    class Own(Trainer):
        def make_step_trainer(self, model_with_loss, optimizer, **options):
            return Halved(model_with_loss, optimizer, **options)

    trainer = make(kind=Own)
    before = trainer.model_weights
    trainer.run(2, None, 0)
    close(trainer.model_weights, jax.tree.map(lambda w: w / 4, before))


def test_weights_and_state_can_be_set():
    trainer = make(model=noisy_model, optimizer=optimizers.SGD)
    trainer.train_step(next(trainer.train_stream))
    weights = jax.tree.map(lambda w: 0 * w + 0.5, trainer.model_weights)
    state = jax.tree.map(jnp.ones_like, trainer.model_state)
    trainer.model_weights, trainer.model_state = weights, state
    assert bits(trainer.model_weights) == bits(weights)
    assert bits(trainer.state.model_state) == bits(state)
    trainer.train_step(next(trainer.train_stream))
    assert int(jax.tree.leaves(trainer.model_state)[-1]) == 2
    assert bits(trainer.model_weights) != bits(weights)


# --- Checkpoints ---------------------------------------------------------------------


def test_the_newest_checkpoint_is_the_last_step_with_its_metrics(tmp_path):
    trainer = make(tmp_path)
    trainer.run(10)  # The default evaluates every 100 steps.
    state = load_trainer_state(tmp_path, model("eval"))
    assert state.step == 10 and bits(state.opt_state.weights) == bits(
        trainer.model_weights
    )
    for mode in ("train", "eval"):
        assert state.history.last(mode, "metrics/loss")[0] == 10
    assert state.history == trainer.history


class Scripted(Trainer):
    """Finds these values, whatever the model does."""

    values = {1: 0.2, 2: 0.6, 4: 0.4, 6: 0.6, 8: 0.1, 9: float("nan")}

    def evaluation_round(self, inputs_stream, n_batches=None, branch="eval"):
        return {"loss": self.values[self.step], "accuracy": self.values[self.step]}


def test_the_best_evaluations_are_kept(tmp_path):
    trainer = make(
        tmp_path, Scripted, checkpoint_highest="accuracy", checkpoint_lowest="loss"
    )
    trainer.run(9, eval_frequency=2, eval_steps=1)
    steps = {
        name: storage.load(tmp_path / name)["step"]
        for name in ("model.pkl", "highest_accuracy.pkl", "lowest_loss.pkl")
    }
    # Of equal values the first counts, and NaN never does.
    assert steps == {"model.pkl": 9, "highest_accuracy.pkl": 2, "lowest_loss.pkl": 8}
    best = storage.load(tmp_path / "lowest_loss.pkl")["history"]["eval"]["metrics/loss"]
    assert best[-1] == (8, 0.1)


def test_checkpoints_at_are_kept_with_the_metrics_of_their_step(tmp_path):
    make(tmp_path, checkpoints_at=[3, 4]).run(6, eval_frequency=2, eval_steps=1)
    kept = [name for name in names(tmp_path) if name.startswith("model_")]
    assert kept == ["model_3.pkl", "model_4.pkl"]
    for step, evaluated in ((3, [1, 2]), (4, [1, 2, 4])):
        payload = storage.load(tmp_path / f"model_{step}.pkl")
        assert payload["step"] == step
        steps = [s for s, _ in payload["history"]["eval"]["metrics/loss"]]
        assert steps == evaluated


def test_save_state_writes_where_it_says(tmp_path):
    trainer = make(tmp_path)
    trainer.save_state(keep=True, prefix="mine")
    assert names(tmp_path) == ["mine.pkl", "mine_0.pkl"]
    with pytest.raises(ConfigError, match="no output_dir"):
        make().save_state(keep=False)


def test_what_is_not_wanted_is_not_written(tmp_path):
    trainer = make(
        tmp_path, should_save_checkpoints=False, should_write_summaries=False, log=None
    )
    trainer.run(2, 1, 1)
    assert names(tmp_path) == []


def test_summaries_tell_of_training_and_of_metrics(tmp_path):
    trainer = make(tmp_path, log=None, log_every=2)
    trainer.run(4, eval_frequency=3, eval_steps=1)
    trainer.close()
    lines = [
        json.loads(s) for s in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    losses = {s["step"]: s["training/loss"] for s in lines if "training/loss" in s}
    assert sorted(losses) == [1, 2, 4]
    assert {s["step"] for s in lines if "training/learning_rate" in s} == {1, 2, 4}
    assert [s["step"] for s in lines if s["mode"] == "eval"] == [1, 3, 4]
    stream = train_stream()
    first = plain_loss(make().model_weights, *next(stream))
    np.testing.assert_allclose(losses[1], first, rtol=1e-6)
    for mode in ("train", "eval"):
        assert any("tfevents" in name for name in names(tmp_path / mode))


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    trainer = make(folder, model=noisy_model)
    trainer.run(4, eval_frequency=2, eval_steps=1)
    return folder, all_of(trainer)


@pytest.fixture
def stopped(first_run, tmp_path):
    """(folder, all values) of a run of 4 steps with the noisy model."""
    shutil.copytree(first_run[0], tmp_path / "run")
    return tmp_path / "run", first_run[1]


def test_a_new_trainer_goes_on_bit_for_bit(stopped):
    folder, values = stopped
    trainer = make(folder, model=noisy_model, random_seed=9)  # The file's key counts.
    assert "Continuing from" in trainer.text() and "at step 4" in trainer.text()
    assert trainer.step == 4 and all_of(trainer) == values
    trainer.run(7, eval_frequency=2, eval_steps=1)
    whole = make(model=noisy_model)
    whole.run(7, eval_frequency=2, eval_steps=1)
    assert all_of(trainer) == all_of(whole)
    assert trainer.history == whole.history
    assert trainer.train_stream.state() == whole.train_stream.state()


def test_a_truncated_newest_checkpoint_falls_back_and_says_so(stopped):
    folder, values = stopped
    with open(folder / "model.pkl", "r+b") as file:
        file.truncate(2000)
    trainer = make(folder, model=noisy_model)
    assert "newest checkpoint is damaged" in trainer.text()
    assert trainer.step == 2
    trainer.run(4, eval_frequency=2, eval_steps=1)
    assert all_of(trainer) == values
    assert storage.load(folder / "model.pkl")["step"] == 4


def test_a_run_of_another_model_is_refused_by_path(stopped):
    with pytest.raises(CheckpointError) as error:
        make(stopped[0])
    for text in (
        "cannot continue from",
        "1.BatchNorm/0",
        "2.Dense/0",
        "another output_dir",
    ):
        assert text in str(error.value)


def test_a_run_of_another_optimizer_is_refused(stopped):
    with pytest.raises(CheckpointError, match="saved by Adam, this run uses Momentum"):
        make(stopped[0], model=noisy_model, optimizer=optimizers.Momentum)


def test_a_hostile_checkpoint_is_refused_and_runs_nothing(tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "canary"),)

    (tmp_path / "model.pkl").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointError):
        make(tmp_path)
    assert names(tmp_path) == ["model.pkl"]


def test_two_damaged_checkpoints_end_the_start_and_stay_as_they_are(stopped):
    folder, _ = stopped
    for name in ("model.pkl", "model.previous.pkl"):
        with open(folder / name, "r+b") as file:
            file.truncate(2000)
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        make(folder, model=noisy_model)
    assert (folder / "model.pkl").stat().st_size == 2000


def test_init_checkpoint_takes_the_weights_only(stopped, tmp_path):
    folder, _ = stopped
    saved = load_trainer_state(folder, noisy_model("eval"))
    trainer = make(
        tmp_path / "new",
        model=noisy_model,
        optimizer=optimizers.Momentum,
        init_checkpoint=folder / "model.pkl",
    )
    assert bits(trainer.model_weights) == bits(saved.opt_state.weights)
    assert trainer.step == 0 and trainer.history.modes == []
    assert not any(np.any(x) for x in jax.tree.leaves(trainer.step_trainer.slots))
    assert int(jax.tree.leaves(trainer.model_state)[-1]) == 0
    trainer.run(1, None, 1)
    again = make(
        tmp_path / "new",
        model=noisy_model,
        optimizer=optimizers.Momentum,
        init_checkpoint=folder / "model.pkl",
    )
    assert again.step == 1 and all_of(again) == all_of(trainer)  # Its own run counts.


def test_an_init_checkpoint_that_does_not_fit_is_refused(stopped, tmp_path):
    with pytest.raises(CheckpointError, match="1.BatchNorm/0"):
        make(init_checkpoint=stopped[0] / "model.pkl")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        make(init_checkpoint=tmp_path / "nothing.pkl")


def test_a_new_process_predicts_the_same(stopped, tmp_path):
    folder, _ = stopped
    net = noisy_model("eval")
    state = load_trainer_state(folder, net)
    net.weights, net.state = state.opt_state.weights, state.model_state
    np.save(tmp_path / "x.npy", X)
    code = f"""
import numpy as np
from retrax import layers as tl
from retrax.trainer import load_trainer_state
net = tl.Serial(
    tl.Dense(4),
    tl.BatchNorm(axis=0, mode="eval"),
    tl.Dropout(0.5, mode="eval"),
    tl.Dense(3),
)
state = load_trainer_state({str(folder)!r}, net)
net.weights, net.state = state.opt_state.weights, state.model_state
np.save({str(tmp_path / "y.npy")!r}, net(np.load({str(tmp_path / "x.npy")!r})))
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), net(X))


# --- reset ---------------------------------------------------------------------------


def test_reset_goes_back_to_the_very_beginning():
    trainer = make(model=noisy_model)
    trainer.run(3, 2, 1)
    first, history = all_of(trainer), trainer.history
    trainer.reset(None)
    assert trainer.step == 0 and trainer.history.modes == []
    assert all_of(trainer) == all_of(make(model=noisy_model))
    trainer.run(3, 2, 1)
    assert all_of(trainer) == first and trainer.history == history


def test_reset_undoes_weights_that_were_set():
    trainer = make(model=noisy_model)
    initial = all_of(trainer)
    trainer.model_weights = jax.tree.map(jnp.ones_like, trainer.model_weights)
    trainer.model_state = jax.tree.map(jnp.ones_like, trainer.model_state)
    trainer.reset(None)
    assert all_of(trainer) == initial


def test_reset_goes_back_to_the_checkpoint(stopped):
    folder, values = stopped
    trainer = make(folder, model=noisy_model)
    position = trainer.train_stream.state()
    for _ in range(2):
        trainer.train_step(next(trainer.train_stream))
    trainer.reset(folder)
    assert trainer.step == 4 and all_of(trainer) == values
    assert trainer.train_stream.state() == position


def test_reset_to_another_directory_writes_there(stopped, tmp_path):
    folder, values = stopped
    trainer = make(tmp_path / "one", model=noisy_model, log=None)
    trainer.run(1, None, 1)
    before = names(tmp_path / "one")
    trainer.reset(tmp_path / "two", init_checkpoint=folder / "model.pkl")
    assert trainer.step == 4 and all_of(trainer) == values
    trainer.run(5, None, 1)
    assert names(tmp_path / "one") == before
    assert {"model.pkl", "metrics.jsonl", "curves.png"} <= set(names(tmp_path / "two"))
    none = make(model=noisy_model)
    none.reset(tmp_path / "three")
    none.run(1, None, 1)
    assert "model.pkl" in names(tmp_path / "three")


# --- Runs that end early -------------------------------------------------------------


def finite(n):
    return lambda: (arrays("train") for _ in range(n))


def test_a_run_ends_with_its_data(tmp_path):
    trainer = make(tmp_path, inputs=inputs(train=finite(5)))
    state = trainer.run(9, eval_frequency=3, eval_steps=1)
    assert state.step == 5
    assert "The training data ended after step 5: stopping here." in trainer.text()
    loaded = load_trainer_state(tmp_path, model("eval"))
    assert loaded.step == 5
    assert [s for s, _ in loaded.history.get("eval", "metrics/loss")] == [1, 3, 5]
    again = make(tmp_path, inputs=inputs(train=finite(5)))
    assert again.run(9, eval_frequency=3, eval_steps=1).step == 5
    assert again.history == trainer.history


def test_data_that_end_with_an_evaluation_are_not_evaluated_twice():
    trainer = make(inputs=inputs(train=finite(3)))
    trainer.run(9, eval_frequency=3, eval_steps=1)
    steps = [s for s, _ in trainer.history.get("eval", "metrics/loss")]
    assert trainer.step == 3 and steps == [1, 3]


def failing(n_good):
    def batches():
        for _ in range(n_good):
            yield arrays("train")
        raise OSError("the disk is gone")

    return batches


def test_an_error_in_the_data_saves_the_last_finished_step(tmp_path):
    trainer = make(tmp_path, inputs=inputs(train=failing(5)))
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.run(9, eval_frequency=3, eval_steps=1)
    assert "Stopped by an error; this step is saved" in trainer.text()
    assert storage.load(tmp_path / "model.pkl")["step"] == 5
    again = make(tmp_path, inputs=inputs(train=finite(9)))
    again.run(9, eval_frequency=3, eval_steps=1)
    whole = make(inputs=inputs(train=finite(9)))
    whole.run(9, eval_frequency=3, eval_steps=1)
    assert all_of(again) == all_of(whole) and again.history == whole.history


def test_a_batch_unlike_the_others_is_named():
    def batches():
        yield arrays("train")
        yield Y[:8, None], Y[:8]

    with pytest.raises(
        DataError, match=r"data for step 2: batch 1, part 0: expected float32.*int32"
    ):
        make(inputs=inputs(train=batches)).run(3, None, 0)


def test_batches_of_several_lengths_train():
    rng = np.random.default_rng(3)
    batches = [
        (rng.normal(size=(8, length, 5)).astype(np.float32), Y[:8])
        for length in (4, 6, 4)
    ]

    def mean(mode):
        return tl.Serial(tl.Mean(axis=1), tl.Dense(3))

    trainer = make(model=mean, inputs=Inputs(batches), optimizer=optimizers.SGD)
    trainer.run(3, eval_frequency=None, eval_steps=None)
    assert trainer.step == 3
    values = trainer.history.get("eval", "metrics/loss")
    assert [step for step, _ in values] == [3] and np.isfinite(values[0][1])


def test_an_evaluation_that_fails_is_made_up_after_the_restart(tmp_path):
    class Fails(Trainer):
        def log_metrics(self, metrics, summ_writer, log_prefix):
            if self.step == 4 and log_prefix == "eval":
                raise OSError("no evaluation today")
            super().log_metrics(metrics, summ_writer, log_prefix)

    settings = {"checkpoints_at": [4], "checkpoint_lowest": "loss"}
    trainer = make(tmp_path, Fails, **settings)
    with pytest.raises(OSError, match="no evaluation today"):
        trainer.run(4, eval_frequency=2, eval_steps=1)
    assert storage.load(tmp_path / "model.pkl")["step"] == 4
    again = make(tmp_path, **settings)
    assert again.step == 4 and again.evaluation_due
    again.run(4, eval_frequency=2, eval_steps=1)
    assert not again.evaluation_due
    whole = make()
    whole.run(4, eval_frequency=2, eval_steps=1)
    assert again.history == whole.history and all_of(again) == all_of(whole)
    kept = storage.load(tmp_path / "model_4.pkl")["history"]
    assert kept == whole.history.to_dict()


# --- Files beside checkpoints, and text ----------------------------------------------


def test_gin_and_forward_are_written_as_text(tmp_path):
    trainer = make(tmp_path)
    trainer.save_gin()
    trainer.save_computation_graphs()
    assert names(tmp_path) == ["config.gin", "forward.txt"]
    assert "Trainer" not in names(tmp_path)
    text = (tmp_path / "forward.txt").read_text()
    assert "stablehlo.dot_general" in text and "stablehlo.tanh" in text
    silent = make()
    silent.save_gin()
    silent.save_computation_graphs()


def test_frozen_weights_are_not_counted_as_trainable():
    def frozen(mode):
        return tl.Serial(tl.Freeze(tl.Dense(4)), tl.Dense(3))

    trainer = make(model=frozen)
    trainer.print_n_weights()
    assert "Step      0: Total number of trainable weights: 15\n" in trainer.text()


# --- Mistakes, found before anything is written --------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "expected"),
    [
        (
            {"loss_fn": tl.WeightedCategoryCrossEntropy()},
            DataError,
            r"batches have 2 parts.*WeightedCategoryCrossEntropy_in3 takes 3.*AddLossW",
        ),
        (
            {"inputs": inputs(weighted=True)},
            DataError,
            "batches have 3 parts.*takes 2.*loss with weights",
        ),
        (
            {"checkpoint_highest": "f1"},
            ConfigError,
            "checkpoint_highest='f1' is no metric of this run.*accuracy, loss",
        ),
        ({"checkpoint_lowest": "x"}, ConfigError, "checkpoint_lowest='x'.*loss"),
        ({"n_devices": 99}, ConfigError, "n_devices=99 but there are"),
        ({"optimizer": "adam"}, TypeError, "optimizer must be.*got 'adam'"),
        ({"optimizer": lambda: 3}, TypeError, "optimizer must be"),
        ({"inputs": [arrays("train")]}, TypeError, "inputs must be data.Inputs, got"),
        ({"inputs": lambda: 3}, TypeError, "inputs must be data.Inputs, got 3"),
        ({"model": model()}, TypeError, "model must be a function of mode.*got Serial"),
        ({"model": lambda mode: 3}, TypeError, "must return a layer, got 3"),
        ({"loss_fn": tl.L2Loss}, TypeError, "loss_fn must be a loss layer, got <class"),
        ({"lr_schedule": 0.1}, TypeError, "lr_schedule must be a function.*got 0.1"),
        (
            {"metrics": {"a": tl.CategoryAccuracy}},
            TypeError,
            "metric 'a' must be a layer",
        ),
        ({"step_options": {"accumulate": 0}}, ConfigError, "accumulate must be"),
        ({"step_options": {"reduce": "max"}}, ConfigError, "reduce must be one of"),
    ],
)
def test_a_mistake_is_told_and_nothing_is_written(tmp_path, changes, error, expected):
    with pytest.raises(error, match=expected):
        make(tmp_path / "run", log=None, **changes)
    assert not (tmp_path / "run").exists() or names(tmp_path / "run") == []


def test_an_output_directory_that_cannot_be_used_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder, expected in (
        (tmp_path / "file", "is a file; choose a directory"),
        (tmp_path / "file" / "below", "cannot be written"),
    ):
        with pytest.raises(ConfigError, match=expected):
            make(folder)


def test_a_metric_that_lacks_inputs_is_told_at_the_first_evaluation(tmp_path):
    trainer = make(tmp_path, metrics={"acc": tl.WeightedCategoryAccuracy()})
    with pytest.raises(DataError, match="metric 'acc'.*takes 3 inputs.*AddLossWeights"):
        trainer.run(3, 1, 1)
    assert storage.load(tmp_path / "model.pkl")["step"] == 1

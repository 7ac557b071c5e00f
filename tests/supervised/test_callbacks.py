"""Callbacks: what they see, do and remember, with Trainer and Loop."""

import functools
import importlib.util
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from retrax import layers as tl
from retrax import optimizers, storage
from retrax.data.inputs import Inputs
from retrax.errors import CheckpointError, ConfigError
from retrax.supervised import callbacks as cb
from retrax.supervised.weight_callbacks import _averaged
from retrax.trainer import Trainer
from retrax.trainer.callback import CallbackList, StepValues
from retrax.trainer.run_log import RunLog
from retrax.trainer.thaw import change_trainable

SPEC = importlib.util.spec_from_file_location(
    "loop_runs", Path(__file__).with_name("loop_runs.py")
)
runs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(runs)
X, Y, make, task, eval_task = runs.X, runs.Y, runs.make, runs.task, runs.eval_task
all_of, bits = runs.all_of, runs.bits


class Recorder(cb.Callback):
    """Notes all calls, and counts steps over restarts."""

    def __init__(self):
        self.calls, self.total = [], 0

    def on_run_begin(self):
        self.calls.append("run begins")

    def on_run_end(self):
        self.calls.append("run ends")

    def on_step_begin(self, step):
        self.calls.append(("begin", step, len(self.run.batch[0])))

    def on_step_end(self, step):
        self.total += 1
        self.calls.append(("end", step, round(self.run.values["loss"], 3)))

    def on_eval_end(self, step):
        last = self.run.history.last("eval", "metrics/loss")
        self.calls.append(("eval", step, last[0]))

    def on_checkpoint(self, step, name):
        self.calls.append(("checkpoint", step, name))

    def state(self):
        return {"total": self.total}

    def restore(self, state):
        self.total = state["total"]


def trainer_of(folder=None, **changes):
    return Trainer(
        lambda mode: tl.Dense(3),
        tl.CategoryCrossEntropy(),
        optimizers.SGD,
        lambda step: 0.1,
        Inputs(runs.train_stream(), runs.eval_stream()),
        folder,
        n_devices=1,
        should_write_summaries=False,
        **changes,
    )


def test_trainer_and_loop_call_alike(tmp_path, capsys):
    mine, other = Recorder(), Recorder()
    trainer = trainer_of(tmp_path / "one", callbacks=[mine])
    trainer.run(3, eval_frequency=2, eval_steps=None)
    loop, _ = make(
        eval_tasks=eval_task(),
        eval_at=[1, 2, 3],
        checkpoint_at=[1, 2, 3],
        output_dir=tmp_path / "two",
        callbacks=other,
    )
    loop.run(3)
    assert mine.calls == other.calls
    assert mine.calls[:5] == [
        "run begins",
        ("begin", 1, 8),
        mine.calls[2],
        ("eval", 1, 1),
        ("checkpoint", 1, "model"),
    ]
    assert mine.calls[-1] == "run ends" and mine.total == 3
    # What a Loop saved a Trainer goes on from, with the callback's state.
    assert storage.load(tmp_path / "two" / "model.pkl")["callbacks"] == {
        "Recorder": {"total": 3}
    }
    again = Recorder()
    resumed = trainer_of(tmp_path / "two", callbacks=[again])
    assert resumed.step == 3 and again.total == 3
    assert bits(resumed.model_weights) == bits(loop.model.weights)
    resumed.run(4, None, 0)
    assert again.total == 4
    resumed.reset(None)
    assert again.total == 0
    trainer_of(tmp_path / "two")
    assert (
        "No callback takes what the file holds of Recorder" in capsys.readouterr().out
    )


def test_values_are_read_when_asked_for():
    class Value:
        n_read = 0

        def __float__(self):
            Value.n_read += 1
            return 2.0

    values = StepValues(3, {"loss": Value(), "gradients_l2": Value()})
    assert Value.n_read == 0 and list(values) == ["loss", "gradients_l2"]
    assert values["loss"] == 2.0 and Value.n_read == 1 and values.step == 3


class Scripted(cb.Callback):
    """Stands in for what a metric finds, before the callbacks after it look."""

    def __init__(self, values):
        self.values = values

    def on_eval_end(self, step):
        self.run.record({"metrics/score": self.values[step - 1]})


def scripted(values, callback, **changes):
    return make(
        eval_at=lambda step: True, callbacks=[Scripted(values), callback], **changes
    )


@pytest.mark.parametrize(
    ("mode", "values", "stopped_at"),
    [
        ("min", [5, 4, 4, 3, 3.5, 3, 9, 9], 6),
        ("max", [1, 2, 2, 2, 9, 9, 9, 9], 4),
        ("min", [math.nan, 5, 4, math.nan, math.nan, 1, 1, 1], 5),
        ("min", [8, 7, 6, 5, 4, 3, 2, 1], 8),
    ],
)
def test_early_stopping(mode, values, stopped_at):
    stopping = cb.EarlyStopping("score", patience=2, mode=mode)
    loop, text = scripted(values, stopping)
    loop.run(8)
    assert loop.step == stopped_at
    assert ("Stopped by EarlyStopping: score has" in text()) == (stopped_at < 8)


def test_a_stopped_run_stays_stopped_after_a_restart(tmp_path):
    values = [5, 4, 6, 6, 6, 6]
    loop, _ = scripted(values, cb.EarlyStopping("score", 2), output_dir=tmp_path)
    loop.run(6)
    assert loop.step == 4
    loop.close()
    again, text = scripted(values, cb.EarlyStopping("score", 2), output_dir=tmp_path)
    again.run(6)
    assert again.step == 4 and "better than 4 (step 2) in 2 evaluations" in text()


def test_reduce_on_plateau_lowers_the_rate_of_the_schedule():
    values = [5, 4, 4, 4, 4, 4, 4, 4]
    reduce = cb.ReduceOnPlateau("score", 0.5, patience=2, min_rate=0.02)
    made = task(lr_schedule=lambda step: 0.1)
    loop, text = scripted(values, reduce, tasks=made)
    loop.run(8)
    rates = [r for _, r in loop.history.get("train", "training/learning_rate")]
    np.testing.assert_allclose(rates, [0.1] * 4 + [0.05] * 2 + [0.025] * 2)
    assert "learning rates are multiplied by 0.25 from here on" in text()
    assert reduce.learning_rate(9, 0.04) == 0.02  # Not below min_rate,
    assert reduce.learning_rate(9, 0.01) == 0.01  # but the schedule may be.
    # Without a schedule the optimizer's own rate is lowered.
    loop, _ = scripted(values, cb.ReduceOnPlateau("score", 0.1, patience=2))
    loop.run(5)
    np.testing.assert_allclose(loop._session.learning_rate, 0.01, rtol=1e-6)


def test_a_metric_that_is_not_there_is_told():
    loop, _ = scripted([1] * 3, cb.EarlyStopping("f1"))
    with pytest.raises(ConfigError, match="metric='f1' is no evaluation.*: score"):
        loop.run(3)


def test_frozen_layers_keep_their_bits_and_get_slots_later(tmp_path):
    def model():
        return tl.Serial(tl.Dense(4), tl.Tanh(), tl.Dense(3))

    def loop_of(folder=None):
        return make(
            model(),
            task(optimizer=optimizers.Adam(0.05)),
            output_dir=folder,
            callbacks=cb.FreezeUntil("0.Dense", 4),
            checkpoint_at=[2, 5],
        )

    loop, text = loop_of(tmp_path)
    first = bits(loop.model.weights[0])
    loop.run(3)
    slots = loop.step_trainer.slots
    assert bits(loop.model.weights[0]) == first and len(slots) == 2
    loop.run(1)
    assert "FreezeUntil: Dense_4 trained from step 4 on." in text()
    assert bits(loop.model.weights[0]) != first
    assert len(loop.step_trainer.slots) == 4
    assert loop.model.sublayers[0].trainable
    loop.close()

    # Resuming before or after that step gives the bits of a whole run.
    again, _ = loop_of(tmp_path)
    assert again.step == 4
    again.run(2)
    whole, _ = loop_of()
    whole.run(6)
    assert all_of(again) == all_of(whole)
    again.load_checkpoint(tmp_path, "model.previous.pkl")
    assert again.step == 5 and bits(again.model.weights[0]) != first
    with pytest.raises(ConfigError, match="no layer '0.Dens'.*did you mean 0.Dense"):
        make(model(), callbacks=cb.FreezeUntil(["0.Dens"], 4))
    with pytest.raises(ConfigError, match="chooses none.*0.Dense, 2.Dense"):
        make(model(), callbacks=cb.FreezeUntil(lambda path: False, 4))


def set_trainable(layer):
    layer.trainable = True


def test_old_slots_are_kept_when_layers_thaw():
    for optimizer in (
        optimizers.Momentum(0.1),
        optimizers.FromOptax(optax.adam(0.1)),
    ):
        model = tl.Serial(tl.Dense(4), tl.Tanh(), tl.Dense(3))
        model.sublayers[0].trainable = False
        loop, _ = make(model, task(optimizer=optimizer))
        loop.run(2)
        trainer = loop.step_trainer
        old = [np.asarray(x) for x in jax.tree.leaves(trainer.slots)]
        change_trainable(
            [trainer], functools.partial(set_trainable, model.sublayers[0])
        )
        new = [np.asarray(x) for x in jax.tree.leaves(trainer.slots)]
        kept = [x for x in new if any(np.array_equal(x, y) for y in old)]
        fresh = [x for x in new if x.shape in ((5, 4), (4,))]
        assert len(kept) == len(old) and not any(np.any(x) for x in fresh)
        loop.run(1)
        assert any(np.any(x) for x in jax.tree.leaves(trainer.slots))


def test_the_moving_average_is_evaluated_and_saved(tmp_path):
    ema = cb.ModelEMA(decay=0.5)
    seen = []

    class Seen(cb.Callback):
        def on_step_end(self, step):
            seen.append([np.float64(w) for w in self.run.step_trainer.weights[0]])

    def loop_of(ema, folder=None):
        return make(
            eval_tasks=eval_task(),
            eval_at=[3, 4],
            checkpoint_high_metric="ema_accuracy",
            callbacks=[ema, Seen()],
            output_dir=folder,
        )

    loop, _ = loop_of(ema, tmp_path)
    loop.run(3)
    want = seen[0]
    for n, weights in enumerate(seen[1:], 1):
        d = min(0.5, (1 + n) / (10 + n))
        want = [d * a + (1 - d) * w for a, w in zip(want, weights, strict=True)]
    for got, value in zip(ema.weights, want, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-6)
    scores = X[32:] @ want[0] + want[1]
    each = np.log(np.exp(scores).sum(1)) - scores[np.arange(12), Y[32:]]
    np.testing.assert_allclose(
        loop.history.last("eval", "metrics/ema_loss"), (3, each.mean()), rtol=1e-5
    )
    loop.close()
    assert (tmp_path / "highest_ema_accuracy.pkl").exists()
    assert bits(cb.load_ema(tmp_path, tl.Dense(3))) == bits(ema.weights)
    resumed, whole = cb.ModelEMA(decay=0.5), cb.ModelEMA(decay=0.5)
    for average, folder, n in ((resumed, tmp_path, 1), (whole, None, 4)):
        loop, _ = loop_of(average, folder)
        loop.run(n)
        loop.close()
    assert bits(resumed.weights) == bits(whole.weights)
    make(output_dir=tmp_path / "plain")[0].run(1)
    with pytest.raises(CheckpointError, match="no averaged weights of ModelEMA"):
        cb.load_ema(tmp_path / "plain", tl.Dense(3))


def test_a_time_limit_ends_the_run_saved_before_it(tmp_path):
    clock = iter(np.arange(0.0, 1000.0, 1.0))  # A second for each look.
    limit = cb.TimeLimit(12, margin=2, clock=lambda: next(clock))
    loop, text = make(callbacks=limit, output_dir=tmp_path)
    loop.run(100)
    # Step n ends at second 2 n; 2 longest steps of 1 second, and the margin: 8 >= 8.
    assert loop.step == 4 and storage.load(tmp_path / "model.pkl")["step"] == 4
    assert "Stopped by TimeLimit: 8.0 of 12 seconds" in text()
    loop.close()
    again, _ = make(output_dir=tmp_path)
    again.run(2)
    whole, _ = make()
    whole.run(6)
    assert all_of(again) == all_of(whole)


def bad_batches(*bad):
    for i in range(1, 20):
        x = X[:8] * (np.nan if i in bad else 1)
        yield x.astype(np.float32), Y[:8]


def test_nan_ends_or_is_skipped_and_reported():
    loop, text = make(tasks=task(lambda: bad_batches(3)), callbacks=cb.StopOnNaN())
    good = make(tasks=task(lambda: bad_batches()))[0]
    good.run(2)
    loop.run(9)
    assert loop.step == 4  # The values of step 3 are read after step 4.
    assert "a gradient is not finite: step 3 was skipped (loss nan)" in text()
    assert "Stopped by StopOnNaN" in text()
    loop, text = make(
        tasks=task(lambda: bad_batches(3, 5, 6, 7)), callbacks=cb.SkipNaN(2)
    )
    loop.run(4)
    assert text().count("was skipped") == 1 and loop.step == 4
    loop.run(9)
    assert "3 steps in a row, up to step 7" in text() and loop.step == 8
    with pytest.raises(ConfigError, match="StopOnNaN needs skip_nonfinite=True"):
        make(callbacks=cb.StopOnNaN(), step_options={"skip_nonfinite": False})


def test_update_ratio_and_gradient_noise_against_numpy(tmp_path):
    lines = tmp_path / "metrics.jsonl"
    loop, _ = make(
        callbacks=[cb.UpdateRatio(every=2), cb.GradientNoise(every=2)],
        output_dir=tmp_path,
        log=RunLog(tmp_path, tensorboard=False),
    )
    loop.run(1)
    old = [np.float64(w) for w in loop.model.weights]
    loop.run(1)
    new = [np.float64(w) for w in loop.model.weights]
    loop.close()
    values = {}
    for line in lines.read_text().splitlines():
        entry = json.loads(line)
        if entry["step"] == 2:
            values |= entry
    for i in (0, 1):
        want = np.linalg.norm(new[i] - old[i]) / np.linalg.norm(old[i])
        np.testing.assert_allclose(
            values[f"training/update_ratio/{i}"], want, rtol=1e-3
        )

    def gradient(x, labels):
        scores = x @ old[0] + old[1]
        p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        d = (p - np.eye(3)[labels]) / len(x)
        return np.concatenate([(x.T @ d).ravel(), d.sum(0)])

    stream = runs.train_stream()
    next(stream)
    x, labels = next(stream)
    halves = [gradient(np.float64(x[s]), labels[s]) for s in np.s_[:4, 4:]]
    small = np.mean([g @ g for g in halves])
    big = np.mean(halves, 0) @ np.mean(halves, 0)
    signal, noise = 2 * big - small, 8 * (small - big)
    np.testing.assert_allclose(values["training/gradient_noise"], noise, rtol=1e-3)
    np.testing.assert_allclose(
        values["training/gradient_signal"], signal, rtol=1e-3, atol=1e-6
    )


def test_a_profile_is_written(tmp_path):
    loop, _ = make(callbacks=cb.Profile(2, 2, tmp_path / "trace"))
    loop.run(3)
    assert [p for p in (tmp_path / "trace").rglob("*") if p.is_file()]
    with pytest.raises(ConfigError, match="give a folder"):
        make(callbacks=cb.Profile(2, 2))


@pytest.mark.parametrize(
    ("given", "error", "expected"),
    [
        (5, TypeError, "callbacks"),
        ([5], TypeError, "callbacks must be Callback objects, or functions.*got 5"),
        ([cb.EarlyStopping], TypeError, r"make an instance of it, EarlyStopping\("),
        ([lambda loop: 3], TypeError, "callbacks must be Callback objects"),
    ],
)
def test_what_is_no_callback_is_told(given, error, expected):
    with pytest.raises(error, match=expected):
        CallbackList(given, type("Run", (), {"owner": None})())


@pytest.mark.parametrize(
    ("call", "error", "expected"),
    [
        (lambda: cb.EarlyStopping(mode="up"), ConfigError, "'min' or 'max', got 'up'"),
        (lambda: cb.EarlyStopping(patience=0), ConfigError, "at least 1, got 0"),
        (lambda: cb.ReduceOnPlateau(factor=2), ConfigError, r"in \(0, 1\), got 2"),
        (lambda: cb.TimeLimit(-1), ConfigError, "seconds must be above 0"),
        (lambda: cb.ModelEMA(1.0), ConfigError, r"decay must be in \(0, 1\)"),
        (lambda: cb.FreezeUntil("0", 1), ConfigError, "at least 2, got 1"),
        (lambda: cb.Profile(5, 4), ConfigError, "last must be at least 5, got 4"),
        (lambda: cb.UpdateRatio(1.5), TypeError, "every must be a whole number"),
        (lambda: cb.GradientNoise(decay=1), ConfigError, "decay must be in"),
    ],
)
def test_a_mistake_is_told(call, error, expected):
    with pytest.raises(error, match=expected):
        call()


def test_a_callback_belongs_to_one_run():
    stopping = cb.EarlyStopping()
    make(callbacks=stopping)
    with pytest.raises(ConfigError, match="watches another run already"):
        make(callbacks=stopping)


def test_averages_stay_in_the_dtype_of_the_weights():
    (got,), _ = _averaged(
        (jnp.zeros(2, jnp.bfloat16),),
        (jnp.float32(0.5), (jnp.ones(2, jnp.bfloat16),)),
        (),
    )
    assert got.dtype == jnp.bfloat16 and got.tolist() == [0.5, 0.5]

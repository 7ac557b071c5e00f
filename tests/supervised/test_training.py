"""Loop: tasks, schedules, resuming; numbers against hand-written loops."""

import functools
import importlib.util
import inspect
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from retrax import layers as tl
from retrax import optimizers, storage
from retrax.data.arrays import ArrayStream
from retrax.errors import CheckpointError, ConfigError, DataError
from retrax.supervised.callbacks import Callback, TrainingStepCallback
from retrax.supervised.training import EvalTask, Loop, TrainTask
from retrax.trainer import (
    Interrupted,
    ReversibleSerialTrainer,
    StepTrainer,
    load_trainer_state,
)

SPEC = importlib.util.spec_from_file_location(
    "loop_runs", Path(__file__).with_name("loop_runs.py")
)
runs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(runs)
X, Y, make, task, eval_task = runs.X, runs.Y, runs.make, runs.task, runs.eval_task
all_of, bits, names = runs.all_of, runs.bits, runs.names


def sgd(weights, batches, rates):
    """Trains a Dense layer by hand; returns (weights, losses)."""

    def loss(weights, x, labels):
        scores = x @ weights[0] + weights[1]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, labels))

    step, losses = jax.jit(jax.value_and_grad(loss)), []
    for batch, rate in zip(batches, rates, strict=True):
        value, grads = step(weights, *batch)
        losses.append(float(value))
        weights = jax.tree.map(lambda w, g, r=rate: w - r * g, weights, grads)
    return weights, losses


def close(got, want, tolerance=1e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


# --- Numbers -------------------------------------------------------------------------


def test_signatures_are_traxs():
    expected = (
        "self model tasks eval_model eval_tasks output_dir checkpoint_at "
        "checkpoint_low_metric checkpoint_high_metric permanent_checkpoint_at eval_at "
        "which_task n_devices random_seed loss_chunk_size use_memory_efficient_trainer "
        "adasum callbacks"
    ).split()
    assert (
        list(inspect.signature(Loop.__init__).parameters)[: len(expected)] == expected
    )
    assert (
        list(inspect.signature(TrainTask.__init__).parameters)
        == (
            "self labeled_data loss_layer optimizer lr_schedule n_steps_per_checkpoint "
            "n_steps_per_permanent_checkpoint loss_name sample_batch export_prefix"
        ).split()
    )
    assert (
        list(inspect.signature(EvalTask.__init__).parameters)
        == (
            "self labeled_data metrics metric_names n_eval_batches sample_batch "
            "export_prefix"
        ).split()
    )


def test_a_bare_layer_trains_as_a_hand_written_loop_does():
    # From a plain iterator, whose first batch is looked at and trained on.
    batches = [next(stream) for stream in [runs.train_stream()] for _ in range(6)]
    loop, text = make(
        tasks=task(iter(batches), lr_schedule=lambda step: 0.3 / step),
        eval_tasks=eval_task(),
        eval_at=[2, 5],
    )
    start = loop.model.weights
    rates = [0.3 / step for step in range(1, 6)]
    weights, losses = sgd(start, batches[:5], rates)
    loop.run(3)
    loop.run(2)
    close(loop.model.weights, weights)
    assert loop.step == 5 and loop.n_devices == 1 and loop.is_chief
    history = loop.history
    name = "metrics/CategoryCrossEntropy"
    assert [step for step, _ in history.get("train", name)] == [2, 5]
    means = [value for _, value in history.get("train", name)]
    np.testing.assert_allclose(means, [np.mean(losses[:2]), np.mean(losses[2:])], 1e-6)
    np.testing.assert_allclose(
        history.get("train", "training/learning_rate"), [(2, 0.15), (5, 0.06)]
    )
    w, b = (np.float64(x) for x in weights)
    scores = np.float64(X[32:]) @ w + b  # 12 rows: a batch of 8, and one of 4.
    each = np.log(np.exp(scores).sum(1)) - scores[np.arange(12), Y[32:]]
    np.testing.assert_allclose(
        history.last("eval", "metrics/loss"), (5, each.mean()), rtol=1e-6
    )
    hits = (scores.argmax(1) == Y[32:]).mean()
    np.testing.assert_allclose(history.last("eval", "metrics/accuracy"), (5, hits))
    for line in (
        "Step      5: train CategoryCrossEntropy | ",
        "Step      5: eval  loss     | ",
    ):
        assert line in text()
    # The data ends: so does the run.
    loop.run(10)
    assert loop.step == 6
    assert "The training data ended after step 6: stopping here." in text()


def test_tasks_take_turns_on_shared_weights_with_slots_of_their_own():
    # The second task's optimizer counts its own steps: Adam corrects its bias so.
    tasks = [
        task(runs.train_stream(1), export_prefix="plain"),
        task(
            runs.train_stream(2),
            optimizers.Adam(0.02, weight_decay_rate=0.0, eps=1e-8),
            export_prefix="adam",
        ),
    ]
    loop, _ = make(tasks=tasks, which_task=lambda step: int(step % 3 == 0), eval_at=[6])
    weights = loop.model.weights
    tx = optax.adam(0.02, eps=1e-8)
    state = tx.init(weights)
    streams = runs.train_stream(1), runs.train_stream(2)
    for step in range(1, 8):
        batch = next(streams[int(step % 3 == 0)])
        if step % 3:
            weights, _ = sgd(weights, [batch], [0.1])
        else:
            moved, _ = sgd(weights, [batch], [1.0])
            grads = jax.tree.map(jnp.subtract, weights, moved)
            updates, state = tx.update(grads, state)
            weights = optax.apply_updates(weights, updates)
    loop.run(7)
    close(loop.model.weights, weights, 1e-5)
    assert loop.history.metrics_for_mode("train") == [
        "metrics/adam/CategoryCrossEntropy",
        "metrics/plain/CategoryCrossEntropy",
        "training/learning_rate",
    ]
    default, _ = make(tasks=[task(), task()])
    chosen = []
    for step in (1, 2, 3):
        default._tasks.choose(step)
        chosen.append(default._tasks.index)
    assert chosen == [1, 0, 1]


def test_evaluating_more_often_changes_no_weights():
    def loop(**changes):
        model = tl.Serial(tl.Dropout(0.5, mode="train"), tl.Dense(3))
        tasks = [task(optimizer=optimizers.Momentum(0.1))]
        made, _ = make(model, tasks, eval_tasks=[eval_task(), None], **changes)
        made.run(6)
        return made

    often, never = loop(eval_at=lambda step: True), loop()
    assert len(often.history.get("eval", "metrics/loss")) == 6
    assert never.history.modes == []
    assert all_of(often) == all_of(never)
    # The same set, wholly, each time; with the model in mode 'train', its dropout too.
    often.run_evals()
    values = often.history.get("eval", "metrics/loss")
    assert values[-1] == values[-2]


def test_eval_data_of_any_kind_is_the_same_each_time():
    batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 40, 8)]
    sources = {
        "list": batches,
        "function": lambda: iter(batches),
        "iterator": iter(batches),
        "stream": ArrayStream((X[:40], Y[:40]), 8, shuffle=False),
    }
    for source in sources.values():
        made = eval_task(source, n_eval_batches=2)
        for _ in range(2):
            got = [batch[0] for batch in made.batches()]
            np.testing.assert_array_equal(np.concatenate(got), X[:16])
    whole = eval_task(iter(batches))
    for _ in range(2):
        assert len(list(whole.batches())) == 5
    again = eval_task(sources["list"], n_eval_batches=99)
    assert len(list(again.batches())) == 5


def test_a_weighted_mean_over_batches():
    # Field note H3: weights 2 and 6, means of the batches 0 and 1 -> 0.75.
    x = np.zeros((2, 3), np.float32)
    labels = np.array([1, 0], np.int32)  # Scores are equal: argmax is 0.
    batches = [
        (x, np.array([1, 1], np.int32), np.ones(2, np.float32)),
        (x, 0 * labels, 3 * np.ones(2, np.float32)),
    ]
    stream = [(X[:2, :3], Y[:2], np.ones(2, np.float32))]
    loop, _ = make(
        tl.Fn("Same", lambda x: x),
        TrainTask(stream, tl.WeightedCategoryCrossEntropy(), optimizers.SGD(0.1)),
        eval_tasks=EvalTask(
            batches, tl.WeightedCategoryAccuracy(), n_eval_batches=None
        ),
    )
    loop.run_evals()
    name = "metrics/WeightedCategoryAccuracy"
    assert loop.history.get("eval", name) == [(0, 0.75)]


def test_the_eval_model_and_its_weights():
    model, evaluated = runs.noisy("train"), runs.noisy("eval")
    tasks = [eval_task(export_prefix="one"), eval_task(runs.train_stream().take(2))]
    loop, _ = make(
        model, eval_model=evaluated, eval_tasks=tasks, eval_at=[2], random_seed=3
    )
    assert loop.eval_model is evaluated and loop.eval_tasks == tasks
    assert bits(evaluated.weights) == bits(model.weights)
    loop.run(2)
    assert bits((evaluated.weights, evaluated.state)) == bits(
        (model.weights, model.state)
    )
    scores = evaluated(X[32:])
    want = -np.asarray(jax.nn.log_softmax(scores))[np.arange(12), Y[32:]].mean()
    history = loop.history
    assert set(history.metrics_for_mode("eval")) == {
        f"metrics/{task}/{metric}"
        for task in ("one", "1")
        for metric in ("loss", "accuracy")
    }
    np.testing.assert_allclose(
        history.last("eval", "metrics/one/loss")[1], want, rtol=1e-5
    )
    ones = jax.tree.map(jnp.ones_like, model.weights)
    loop.update_weights_and_state(weights=ones)
    assert bits(model.weights) == bits(evaluated.weights) == bits(ones)
    data = jax.random.key_data
    assert bits(data(loop.new_rng())) != bits(data(loop.new_rng()))


def test_weights_that_are_there_are_kept():
    dense = tl.Dense(3)
    dense.init(runs.train_stream().peek()[0], rng=jax.random.key(7))
    before = bits(dense.weights)
    loop, _ = make(dense)
    assert bits(loop.model.weights) == before
    other, _ = make()
    assert bits(other.model.weights) != before


# --- Checkpoints ---------------------------------------------------------------------


def two_tasks(folder, model=None, **changes):
    """Dropout, BatchNorm, two tasks, one of them on a generator."""
    wide = {"x": (X + 1).astype(np.float32)}

    def batches():
        stream = runs.train_stream(3, (wide["x"], Y))
        while True:
            yield next(stream)

    return make(
        model or runs.noisy(),
        [
            task(runs.train_stream(2), optimizers.Adam(0.01)),
            task(batches, optimizers.Momentum(0.05), lr_schedule=lambda s: 0.1 / s),
        ],
        eval_tasks=eval_task(),
        eval_model=runs.noisy("eval"),
        output_dir=folder,
        eval_at=lambda step: step in (2, 5, 8),
        checkpoint_at=lambda step: step == 4,
        permanent_checkpoint_at=[3],
        checkpoint_low_metric="loss",
        random_seed=7,
        **changes,
    )


@pytest.fixture(scope="module")
def half_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("half")
    loop, _ = two_tasks(folder)
    loop.run(5)
    loop.close()
    return folder


def test_run_2n_is_run_n_and_run_n_in_a_new_loop(half_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(half_run, folder)
    loop, text = two_tasks(folder)
    assert loop.step == 5 and "Continuing from" in text()
    assert "Replaying 3 batches of the training data of task '1'" in text()
    losses = []
    whole, _ = two_tasks(None, callbacks=Watch(losses))
    whole.run(10)
    resumed = []
    loop._session.callbacks = type(loop._session.callbacks)(
        Watch(resumed), loop._session
    )
    loop.run(5)
    assert all_of(loop) == all_of(whole)
    assert loop.history == whole.history
    assert [s for s, _ in loop.history.get("eval", "metrics/loss")] == [2, 5, 8]
    # The loss of each step depends on its examples and its dropout mask.
    assert resumed == losses[5:] and len(set(losses)) == 10
    keys = loop.new_rng(), whole.new_rng()
    assert bits(jax.random.key_data(keys[0])) == bits(jax.random.key_data(keys[1]))
    one, other = loop._tasks.streams, whole._tasks.streams
    assert [s.state() for s in one] == [s.state() for s in other]


class Watch(Callback):
    def __init__(self, losses):
        self.losses = losses

    def on_step_end(self, step):
        self.losses.append(self.run.values["loss"])


def test_files_of_a_run(half_run):
    found = names(half_run)
    assert {"model.pkl", "model_3.pkl", "lowest_loss.pkl", "config.gin"} <= set(found)
    payload = storage.load(half_run / "model.pkl")
    assert payload["step"] == 5  # The last step, whatever checkpoint_at says.
    assert payload["kind"] == "run" and len(payload["tasks"]) == 1
    best = storage.load(half_run / "lowest_loss.pkl")
    values = dict(payload["history"]["eval"]["metrics/loss"])
    assert best["step"] == min(values, key=values.get)
    state = load_trainer_state(half_run, runs.noisy("eval"))
    assert state.step == 5
    kept = storage.load(half_run / "model_3.pkl")
    assert kept["step"] == 3


def test_save_and_load_by_name(half_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(half_run, folder)
    loop, _ = two_tasks(None, resume_data="restart")
    loop.load_checkpoint(folder, "model_3.pkl")
    assert loop.step == 3
    loop.load_checkpoint(folder)
    assert loop.step == 5
    before = all_of(loop)
    with pytest.raises(ConfigError, match="no output_dir"):
        loop.save_checkpoint()
    with pytest.raises(ConfigError, match="no output_dir"):
        loop.load_checkpoint()
    with pytest.raises(FileNotFoundError):
        loop.load_checkpoint(folder, "model_9.pkl")
    loop._session.move_to(folder)
    loop.save_checkpoint("mine")
    loop.save_checkpoint()
    assert storage.load(folder / "mine.pkl")["step"] == 5
    assert all_of(loop) == before


def test_a_checkpoint_of_another_loop_is_refused(half_run):
    with pytest.raises(CheckpointError, match="with 2 training tasks, this loop has 1"):
        make(runs.noisy(), output_dir=half_run)
    with pytest.raises(CheckpointError, match="plain generator.*resume_data='replay'"):
        two_tasks(half_run, resume_data="error")
    loop, text = two_tasks(half_run, resume_data="restart")
    assert "begins anew" in text() and loop._tasks.streams[1].state()["batches"] == 0
    assert loop._tasks.streams[0].state()["position"] > 0


def test_a_signal_saves_the_step_and_its_evaluation_is_made_up(tmp_path):
    class Struck(Loop):
        def train_step(self, batch):
            super().train_step(batch)
            if self.step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    settings = {
        "eval_tasks": eval_task(),
        "eval_at": 2,
        "output_dir": tmp_path,
        "checkpoint_high_metric": "accuracy",
    }
    loop, _ = make(kind=Struck, **settings)
    with pytest.raises(Interrupted, match="SIGTERM after step 4, saved in") as error:
        loop.run(6)
    assert error.value.exit_code == 143
    assert storage.load(tmp_path / "model.pkl")["step"] == 4
    again, _ = make(**settings)
    assert again.step == 4 and again.evaluation_due
    again.run(2)
    assert [s for s, _ in again.history.get("eval", "metrics/loss")] == [1, 2, 4, 6]
    whole, _ = make(**{**settings, "output_dir": None})
    whole.run(6)
    assert again.history == whole.history and all_of(again) == all_of(whole)


def test_the_step_trainer_can_be_replaced():
    class Halved(StepTrainer):
        def update(self, step, grads, weights, slots, opt_params):
            return jax.tree.map(lambda w: w / 2, weights), slots, {}

    class Own(Loop):
        def make_step_trainer(self, model_with_loss, optimizer, **options):
            return Halved(model_with_loss, optimizer, **options)

    loop, _ = make(kind=Own)
    before = loop.model.weights
    loop.run(2)
    close(loop.model.weights, jax.tree.map(lambda w: w / 4, before))


def test_layer_by_layer_trains_as_a_whole_does_and_resumes(tmp_path):
    def trained(n_steps, **changes):
        half = tl.ReversibleHalfResidual(tl.Dense(4), tl.Dropout(0.3))
        model = tl.Serial(
            tl.Dense(4), tl.Dup(), half, tl.ReversibleSwap(), tl.Add(), tl.Dense(3)
        )
        tasks = task(optimizer=optimizers.Adam(0.01))
        loop, _ = make(model, tasks, eval_tasks=eval_task(), **changes)
        loop.run(n_steps)
        return loop

    whole = trained(6)
    deep = {"use_memory_efficient_trainer": True, "output_dir": tmp_path / "run"}
    trained(3, **deep, loss_chunk_size=3)
    layers = trained(3, **deep, loss_chunk_size=3)
    assert isinstance(layers.step_trainer, ReversibleSerialTrainer)
    assert layers.step == 6
    close(layers.model.weights, whole.model.weights, 1e-5)
    saved = load_trainer_state(tmp_path / "run", whole.model)
    close(saved.opt_state.weights, whole.model.weights, 1e-5)
    layers.run_evals()
    whole.run_evals()
    got, want = (x.history.get("eval", "metrics/loss") for x in (layers, whole))
    assert got[-1][0] == want[-1][0] == 6
    close(got[-1][1], want[-1][1], 1e-5)


def test_private_names_that_course_checkers_read():
    source, schedule = runs.train_stream(), lambda step: 0.1
    made = task(source, lr_schedule=schedule)
    assert made._labeled_data is source and made._lr_schedule is schedule
    assert str(made._loss_layer) == "CategoryCrossEntropy_in2"
    assert [m.name for m in eval_task()._metrics] == [
        "CategoryCrossEntropy",
        "CategoryAccuracy",
    ]
    assert len(made.sample_batch) == 2 and made.learning_rate(3) == 0.1
    batch = made.next_batch()
    np.testing.assert_array_equal(batch[0], made.sample_batch[0])


def test_two_devices_train_as_one_does(tmp_path):
    script = Path(__file__).with_name("two_devices_run.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", script, tmp_path],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")
            + " --xla_force_host_platform_device_count=2",
        },
    )
    assert done.returncode == 0 and "equal" in done.stdout, done.stderr[-3000:]


# --- Mistakes ------------------------------------------------------------------------

loss, adam = tl.CategoryCrossEntropy(), optimizers.Adam(0.01)
accuracy = tl.CategoryAccuracy()


@pytest.mark.parametrize(
    ("call", "error", "expected"),
    [
        (lambda: Loop(tl.Dense(3), task), TypeError, "tasks must be a TrainTask.*task"),
        (lambda: Loop(tl.Dense(3), []), ConfigError, "tasks is empty"),
        (
            lambda: Loop(tl.Dense(3), [(X, Y)]),
            TypeError,
            r"(?s)tasks must be a TrainTask or a list of them.*TrainTask\(labeled_data",
        ),
        (
            lambda: Loop(tl.Dense(3), eval_task()),
            TypeError,
            "this one is no TrainTask",
        ),
        (
            lambda: Loop(tl.Dense(3), task(), eval_tasks=len),
            TypeError,
            "eval_tasks must be an EvalTask|eval_tasks must be a EvalTask",
        ),
        (
            lambda: Loop(tl.Dense(3), task(), eval_tasks=[], eval_task=eval_task()),
            ConfigError,
            "not both",
        ),
        (lambda: Loop(tl.Dense, task()), TypeError, "model must be a layer.*Call it"),
        (
            lambda: Loop(tl.Dense(3), task(), checkpoint_low_metric="f1"),
            ConfigError,
            "checkpoint_low_metric='f1' is no metric of this run",
        ),
        (
            lambda: Loop(
                tl.Dense(3), task(), None, eval_task(), checkpoint_high_metric="f1"
            ),
            ConfigError,
            "checkpoint_high_metric='f1'.*accuracy, loss",
        ),
        (
            lambda: Loop(tl.Dense(3), task(), eval_model=tl.Dense(4)),
            ConfigError,
            r"eval_model has not the weights of the model: 0: expected.*\(5, 3\)",
        ),
        (
            lambda: Loop(tl.Dense(3), task(), eval_at="often"),
            TypeError,
            "eval_at must be a function of the step, a number of steps or a list",
        ),
        (
            lambda: Loop(tl.Dense(3), task(), eval_at=0),
            ConfigError,
            "at least 1, got 0",
        ),
        (lambda: Loop(tl.Dense(3), task(), which_task=1), TypeError, "which_task must"),
        (
            lambda: Loop(tl.Dense(3), task(), loss_chunk_size=64),
            ConfigError,
            "loss_chunk_size=64.*use_memory_efficient_trainer=True",
        ),
        (
            lambda: Loop(tl.Dense(3), task(), resume_data="never"),
            ConfigError,
            "resume_data must be one of.*'never'",
        ),
        (
            lambda: Loop(
                tl.Dense(3),
                [task(export_prefix="a"), task(export_prefix="a")],
            ),
            ConfigError,
            r"different export_prefixes, got \['a', 'a'\]",
        ),
        (
            lambda: TrainTask(5, loss, adam),
            TypeError,
            "labeled_data: as_stream cannot read batches from int 5",
        ),
        (lambda: TrainTask([], loss, adam), DataError, "the training data is empty"),
        (lambda: TrainTask(iter(()), loss, adam), DataError, "holds no batch"),
        (
            lambda: TrainTask([(X, Y)], tl.CategoryCrossEntropy, adam),
            TypeError,
            r"loss_layer must be a loss layer.*Make an instance: CategoryCross",
        ),
        (lambda: TrainTask([(X, Y)], loss, "adam"), TypeError, "optimizer must be an"),
        (
            lambda: TrainTask([(X, Y)], loss, adam, 0.1),
            TypeError,
            "lr_schedule must be a function of the step, got 0.1",
        ),
        (
            lambda: TrainTask([(X, Y)], loss, adam, None, -1),
            ConfigError,
            "n_steps_per_checkpoint must be at least 1, got -1",
        ),
        (
            lambda: TrainTask([(X, Y)], loss, adam, export_prefix="../x"),
            ConfigError,
            "export_prefix must be a folder name",
        ),
        (lambda: EvalTask([], [accuracy]), DataError, "the evaluation data is empty"),
        (
            lambda: EvalTask([(X, Y)], [tl.CategoryAccuracy]),
            TypeError,
            r"a metric must be a layer.*Make an instance: CategoryAccuracy\(\)",
        ),
        (
            lambda: EvalTask([(X, Y)], tl.CategoryAccuracy),
            TypeError,
            "metrics must be a list of metric layers.*Make an instance",
        ),
        (lambda: EvalTask([(X, Y)], []), ConfigError, "metrics is empty"),
        (
            lambda: EvalTask([(X, Y)], [accuracy], ["a", "b"]),
            ConfigError,
            r"1 metrics \(CategoryAccuracy\) but 2 metric_names \(a, b\)",
        ),
        (
            lambda: EvalTask([(X, Y)], [accuracy, tl.CategoryAccuracy()]),
            ConfigError,
            "metric names must differ",
        ),
        (
            lambda: EvalTask([(X, Y)], [accuracy], n_eval_batches=1.5),
            TypeError,
            "n_eval_batches must be a whole number, got 1.5",
        ),
        (
            lambda: EvalTask(runs.train_stream(), [accuracy], n_eval_batches=None),
            ConfigError,
            "never ends",
        ),
        (
            lambda: Loop(
                tl.Dense(3),
                task(),
                eval_tasks=EvalTask([(X, Y)], tl.WeightedCategoryAccuracy()),
            ),
            DataError,
            "WeightedCategoryAccuracy.*takes 3 inputs.*AddLossWeights",
        ),
        (
            lambda: Loop(tl.Dense(3), task([(X, Y, runs.Q)])),
            DataError,
            "batches have 3 parts.*takes 2",
        ),
    ],
)
def test_a_mistake_is_told(call, error, expected):
    with pytest.raises(error, match=expected):
        call()


def test_mistakes_that_show_when_running():
    wrong = [(X[:8], Y[:8]), (X[:8], Y[:8]), (X[:8], X[:8, 0])]
    loop, _ = make(tasks=task(wrong), which_task=lambda step: 0)
    for n, error, expected in (
        (-1, ConfigError, "n_steps must be at least 0, got -1"),
        (2.5, TypeError, "n_steps must be a whole number, got 2.5"),
        ("9", TypeError, "n_steps must be a whole number, got '9'"),
        (True, TypeError, "n_steps must be a whole number, got True"),
    ):
        with pytest.raises(error, match=expected):
            loop.run(n)
    assert loop.step == 0
    text = "data for step 3: batch 2, part 1: expected int32.*got float32"
    with pytest.raises(DataError, match=text):
        loop.run(5)
    assert loop.step == 2
    loop._tasks._which_task = lambda step: 4
    with pytest.raises(
        ConfigError, match=r"which_task\(3\) returned 4.*1 tasks, 0 to 0"
    ):
        loop.run(1)


def test_trax_callbacks_are_made_of_the_loop():
    class Steps(TrainingStepCallback):
        def __init__(self, loop, seen, every=1):
            super().__init__(loop)
            self._seen, self._every = seen, every

        def call_at(self, step):
            return step % self._every == 0

        def on_step_begin(self, step):
            self._seen.append(("begin", step, self._loop.step))

        def on_step_end(self, step):
            self._seen.append(("end", step, self._loop.step))

    seen = []
    loop, _ = make(callbacks=[functools.partial(Steps, seen=seen, every=2)])
    loop.run(3)
    assert seen == [("begin", 2, 1), ("end", 2, 2)]

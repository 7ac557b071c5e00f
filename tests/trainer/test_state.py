"""What goes into a checkpoint and comes back, and what is refused."""

import io
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from retrax import layers as tl
from retrax import optimizers, storage
from retrax.errors import CheckpointError
from retrax.shapes import ShapeDtype, signature
from retrax.trainer import StepTrainer, Trainer, load_trainer_state
from retrax.trainer.run_log import RunLog
from retrax.trainer.state import (
    pack_key,
    pack_signature,
    restore_step_trainer,
    step_trainer_payload,
    unpack_key,
    unpack_signature,
)

RNG = jax.random.key(3)
X = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
Y = (np.arange(8) % 3).astype(np.int32)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def stepper(optimizer=None, seed=0, frozen=False, n_units=4):
    first = tl.Dense(n_units)
    first.trainable = not frozen
    model = tl.Serial(first, tl.BatchNorm(axis=0), tl.Dense(3))
    whole = tl.Serial(model, tl.CategoryCrossEntropy())
    whole.init(signature((X, Y)), rng=jax.random.key(seed))
    return StepTrainer(whole, optimizer or optimizers.Adam(0.01), n_devices=1)


@pytest.mark.parametrize("key", [jax.random.key(7), jax.random.PRNGKey(7)])
def test_keys_go_through_plain_containers(key):
    back = unpack_key(pack_key(key))
    assert back.dtype == key.dtype
    draws = jax.random.uniform(back, (3,)), jax.random.uniform(key, (3,))
    np.testing.assert_array_equal(*draws)


def test_a_key_of_another_kind_keeps_its_kind():
    key = jax.random.key(7, impl="rbg")
    assert pack_key(key)["impl"] == "rbg"
    assert unpack_key(pack_key(key)).dtype == key.dtype


def test_signatures_go_through_plain_containers():
    sig = (ShapeDtype((2, 3)), ShapeDtype((2,), np.int32), ShapeDtype((), jnp.bfloat16))
    packed = pack_signature(sig)
    assert packed[:2] == [((2, 3), "float32"), ((2,), "int32")]
    assert unpack_signature(packed) == sig


@pytest.mark.parametrize(
    "make",
    [
        lambda: optimizers.Adam(0.01),
        lambda: optimizers.Momentum(0.01),
        lambda: optimizers.SGD(0.01),
        lambda: optimizers.Adafactor(0.01),
        lambda: optimizers.SM3(0.01),
        lambda: optimizers.FromOptax(optax.adamw(0.01)),
    ],
    ids=["Adam", "Momentum", "SGD", "Adafactor", "SM3", "FromOptax"],
)
def test_a_step_trainer_goes_on_bit_for_bit_after_a_round_trip(make, tmp_path):
    one = stepper(make())
    one.one_step((X, Y), RNG)
    one.one_step((X * np.nan, Y), RNG)
    storage.save(tmp_path / "one.pkl", step_trainer_payload(one))
    two = stepper(make(), seed=1)
    two.one_step((X, Y), RNG)  # It has slots of its own, and a compiled step.
    restore_step_trainer(two, storage.load(tmp_path / "one.pkl"))
    assert two.n_skipped == 1
    for trainer in (one, two):
        trainer.one_step((X, Y), RNG, 3)
    assert bits((one.weights, one.state, one.slots)) == bits(
        (two.weights, two.state, two.slots)
    )


def test_saved_values_are_copies():
    trainer = stepper()
    payload = step_trainer_payload(trainer)
    before = {k: v.copy() for k, v in payload["weights"].items()}
    trainer.one_step((X, Y), RNG)
    assert set(before) == {
        f"{i}/{j}" for i in ("0.Dense", "2.Dense") for j in (0, 1)
    } | {
        "1.BatchNorm/0",
        "1.BatchNorm/1",
    }
    for path, array in before.items():
        np.testing.assert_array_equal(payload["weights"][path], array)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (lambda: stepper(n_units=6), r"0.Dense/0: got \(5, 4\), wanted \(5, 6\)"),
        (lambda: stepper(optimizers.Momentum(0.1)), "saved by Adam, .* uses Momentum"),
        (lambda: stepper(frozen=True), "slots do not fit"),
    ],
    ids=["model", "optimizer", "frozen"],
)
def test_what_belongs_to_another_run_is_refused_and_changes_nothing(other, expected):
    payload = step_trainer_payload(stepper())
    trainer = other()
    before = bits((trainer.weights, trainer.state, trainer.slots))
    with pytest.raises(CheckpointError, match=expected):
        restore_step_trainer(trainer, payload)
    assert bits((trainer.weights, trainer.state, trainer.slots)) == before


def test_slots_of_other_trainable_weights_of_the_same_shape_are_refused():
    def square(frozen):
        layers = [tl.Dense(5), tl.Dense(5)]
        layers[frozen].trainable = False
        model = tl.Serial(tl.Serial(layers), tl.CategoryCrossEntropy())
        model.init(signature((X, Y)), rng=RNG)
        return StepTrainer(model, optimizers.Adam(0.1), n_devices=1)

    with pytest.raises(
        CheckpointError, match="other weights are trainable now.*0.Dense"
    ):
        restore_step_trainer(square(0), step_trainer_payload(square(1)))


# --- load_trainer_state -------------------------------------------------------------


def model(mode="train"):
    return tl.Serial(
        tl.Dense(4),
        tl.BatchNorm(axis=0, mode=mode),
        tl.Dropout(0.5, mode=mode),
        tl.Dense(3),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(directory, trainer) of a run of three steps."""
    from retrax.data.inputs import Inputs

    folder = tmp_path_factory.mktemp("run")
    trainer = Trainer(
        model,
        tl.CategoryCrossEntropy(),
        optimizers.Adam,
        lambda step: 0.1,
        Inputs(lambda: iter([(X, Y)] * 3)),
        folder,
        n_devices=1,
        should_write_summaries=False,
        log=RunLog(stream=io.StringIO()),
    )
    trainer.run(3, eval_frequency=2, eval_steps=1)
    return folder, trainer


@pytest.mark.parametrize("initialised", [False, True])
def test_a_run_is_read_for_evaluation(run, initialised):
    folder, trainer = run
    net = model("eval")
    if initialised:
        net.init(signature(X), rng=jax.random.key(9))
    before = bits((net.weights, net.state))
    state = load_trainer_state(folder, net)
    assert bits((net.weights, net.state)) == before
    assert state.step == 3 and state.history == trainer.history
    assert [s for s, _ in state.history.get("eval", "metrics/loss")] == [1, 2, 3]
    assert bits(state.opt_state.weights) == bits(trainer.model_weights)
    assert bits(state.opt_state.slots) == bits(trainer.step_trainer.slots)
    assert set(state.opt_state.opt_params) == set(trainer.step_trainer.opt_params)
    net.weights, net.state = state.opt_state.weights, state.model_state

    # What the network computes, by hand in float64.
    (w1, b1), (bias, scale), _, (w2, b2) = jax.tree.map(
        np.float64, trainer.model_weights
    )
    mean, var, _ = jax.tree.map(np.float64, trainer.model_state[1])
    h = np.float64(X) @ w1 + b1
    h = (h - mean) / np.sqrt(var + 1e-5) * scale + bias
    np.testing.assert_allclose(net(X), h @ w2 + b2, atol=1e-5)


def test_another_file_can_be_read(run, tmp_path):
    folder, _ = run
    state = load_trainer_state(
        tmp_path, model("eval"), folder / storage.previous_path("model.pkl")
    )
    assert state.step == 2


def test_a_run_that_is_not_there_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_trainer_state(tmp_path, model("eval"))


def test_a_run_of_another_model_is_refused_by_path(run):
    other = tl.Serial(tl.Dense(4), tl.Dense(3))
    with pytest.raises(CheckpointError) as error:
        load_trainer_state(run[0], other)
    for text in (
        "1.Dense/0",
        "1.BatchNorm/0",
        "3.Dense/1",
        "missing from the checkpoint",
    ):
        assert text in str(error.value)


def test_parts_of_a_run_can_be_read_under_other_names(run):
    folder, trainer = run
    other = tl.Serial(tl.Dense(4), tl.Dense(7))
    state = load_trainer_state(
        folder, other, strict=False, rename=lambda p: p if p.startswith("0.") else None
    )
    assert bits(state.opt_state.weights[0]) == bits(trainer.model_weights[0])
    assert state.opt_state.weights[1][0].shape == (4, 7)


def test_a_file_of_save_to_file_is_no_run(tmp_path):
    net = model("eval")
    net.init(signature(X), rng=RNG)
    net.save_to_file(tmp_path / "model.pkl")
    with pytest.raises(
        CheckpointError, match="'layer', not the state of a run.*init_from"
    ):
        load_trainer_state(tmp_path, net)


class Hostile:
    def __init__(self, canary):
        self._canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self._canary),)


def test_a_hostile_file_is_refused_and_runs_nothing(tmp_path):
    canary = tmp_path / "canary"
    content = pickle.dumps(Hostile(canary))
    (tmp_path / "model.pkl").write_bytes(content)
    with pytest.raises(CheckpointError):
        load_trainer_state(tmp_path, model("eval"))
    assert not canary.exists()
    pickle.loads(content)  # The file would have done harm.
    assert canary.exists()


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_both_files_damaged_tells_of_both(run, tmp_path, damage):
    for name in ("model.pkl", "model.previous.pkl"):
        content = bytearray((run[0] / name).read_bytes())
        if damage == "flip":
            content[-100] ^= 1
        size = {"cut": len(content) // 2, "flip": len(content), "empty": 0}[damage]
        (tmp_path / name).write_bytes(content[:size])
    with pytest.raises(CheckpointError) as error:
        load_trainer_state(tmp_path, model("eval"))
    assert "model.pkl" in str(error.value) and "model.previous.pkl" in str(error.value)


def test_a_damaged_newest_file_falls_back(run, tmp_path):
    for name in ("model.pkl", "model.previous.pkl"):
        (tmp_path / name).write_bytes((run[0] / name).read_bytes())
    with open(tmp_path / "model.pkl", "r+b") as file:
        file.truncate(1000)
    assert load_trainer_state(tmp_path, model("eval")).step == 2

"""save_to_file and init_from_file: weights by path, whole or not at all."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax import optimizers, storage
from retrax.data.inputs import Inputs
from retrax.errors import CheckpointError
from retrax.shapes import ShapeDtype, signature
from retrax.trainer import Trainer
from retrax.trainer.run_log import RunLog

X = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
SIGNATURE = signature(X)


def net(n_out=3, mode="train"):
    return tl.Serial(tl.Dense(4), tl.BatchNorm(axis=0, mode=mode), tl.Dense(n_out))


def made(layer, seed=0):
    layer.init(SIGNATURE, rng=jax.random.key(seed))
    return layer


def used(seed=0):
    """An initialised network whose state has changed."""
    layer = made(net(), seed)
    layer(X)
    return layer


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def test_a_round_trip_restores_weights_and_state(tmp_path):
    layer = used()
    layer.save_to_file(tmp_path / "net.pkl")
    other = net(mode="eval")
    weights, state = other.init_from_file(tmp_path / "net.pkl")
    assert bits(weights) == bits(other.weights) == bits(layer.weights)
    assert bits(state) == bits(other.state) == bits(layer.state)

    (w1, b1), (bias, scale), (w2, b2) = jax.tree.map(np.float64, layer.weights)
    mean, var, n_batches = jax.tree.map(np.float64, layer.state[1])
    assert n_batches == 1
    h = (np.float64(X) @ w1 + b1 - mean) / np.sqrt(var + 1e-5) * scale + bias
    np.testing.assert_allclose(other(X), h @ w2 + b2, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_and_odd_shapes_stay_as_they_are(tmp_path, dtype):
    class Odd(tl.Layer):
        def init_weights_and_state(self, input_signature):
            self.weights = {
                "a": jnp.full((), 1.5, dtype),
                "b": [jnp.ones((0, 3), dtype), jnp.arange(3).astype(dtype)],
            }
            self.state = (jnp.array([True, False]), jnp.arange(2, dtype="uint16"))

        def forward(self, x):
            return x

    layer = made(tl.Serial(Odd(), tl.Dense(2)))
    layer.save_to_file(tmp_path / "odd.pkl")
    other = tl.Serial(Odd(), tl.Dense(2))
    other.init_from_file(tmp_path / "odd.pkl")
    assert jax.tree.structure(other.weights) == jax.tree.structure(layer.weights)
    for a, b in zip(
        jax.tree.leaves((layer.weights, layer.state)),
        jax.tree.leaves((other.weights, other.state)),
        strict=True,
    ):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("initialised", [False, True])
def test_weights_only_takes_the_initial_state(tmp_path, initialised):
    layer = used()
    layer.save_to_file(tmp_path / "net.pkl", weights_only=True)
    other = used(1) if initialised else net()
    other.init_from_file(tmp_path / "net.pkl", weights_only=True)
    assert bits(other.weights) == bits(layer.weights)
    assert bits(other.state) == bits(made(net()).state)


def test_a_signature_may_be_given_on_either_side(tmp_path):
    layer = made(tl.Dense(2))
    layer.save_to_file(tmp_path / "a.pkl", input_signature=ShapeDtype((9, 5)))
    assert storage.load(tmp_path / "a.pkl")["input_signature"] == [((9, 5), "float32")]
    other = tl.Dense(2)
    other.init_from_file(tmp_path / "a.pkl", input_signature=SIGNATURE)
    assert bits(other.weights) == bits(layer.weights)


def without_signature(layer, path):
    payload_path = path.with_name("with.pkl")
    layer.save_to_file(payload_path)
    payload = storage.load(payload_path)
    del payload["input_signature"]
    storage.save(path, payload)


def test_a_file_without_signature_needs_one_or_an_initialised_layer(tmp_path):
    layer = used()
    without_signature(layer, tmp_path / "bare.pkl")
    fresh = net()
    with pytest.raises(CheckpointError, match=r"pass input_signature="):
        fresh.init_from_file(tmp_path / "bare.pkl")
    assert jax.tree.leaves(fresh.weights) == []
    for other, options in (
        (used(1), {}),
        (net(), {"input_signature": SIGNATURE}),
    ):
        other.init_from_file(tmp_path / "bare.pkl", **options)
        assert bits((other.weights, other.state)) == bits((layer.weights, layer.state))


def test_a_file_with_weights_only_must_be_loaded_so(tmp_path):
    used().save_to_file(tmp_path / "net.pkl", weights_only=True)
    layer = used(1)
    before = bits((layer.weights, layer.state))
    with pytest.raises(
        CheckpointError, match="saved with weights_only=True; load it so"
    ):
        layer.init_from_file(tmp_path / "net.pkl")
    assert bits((layer.weights, layer.state)) == before


def test_fine_tuning_takes_what_matches_and_new_weights_for_the_rest(tmp_path):
    layer = used()
    layer.save_to_file(tmp_path / "net.pkl")
    other = net(n_out=7)
    with pytest.raises(
        CheckpointError, match=r"2.Dense/0: got \(4, 3\), wanted \(4, 7\)"
    ):
        other.init_from_file(tmp_path / "net.pkl")
    other.init_from_file(tmp_path / "net.pkl", strict=False)
    assert bits(other.weights[:2]) == bits(layer.weights[:2])
    assert other.weights[2][0].shape == (4, 7) and np.any(other.weights[2][0])


def test_a_model_can_be_loaded_into_a_part_of_another(tmp_path):
    layer = used()
    layer.save_to_file(tmp_path / "net.pkl")
    other = tl.Serial(tl.Serial(net(), name="body"), tl.Dense(2, name="head"))
    rename = {"": "0.body/0.Serial"}
    other.init_from_file(
        tmp_path / "net.pkl",
        input_signature=SIGNATURE,
        strict=False,
        rename=rename,
    )
    assert bits(other.weights[0][0]) == bits(layer.weights)
    assert bits(other.state[0][0]) == bits(layer.state)
    assert other.weights[1][0].shape == (3, 2)


def test_another_model_is_refused_with_all_differences_and_changes_nothing(tmp_path):
    used().save_to_file(tmp_path / "net.pkl")
    other = made(tl.Serial(tl.Dense(6), tl.Dense(3)), 1)
    before = bits(other.weights)
    with pytest.raises(CheckpointError) as error:
        other.init_from_file(tmp_path / "net.pkl")
    text = str(error.value)
    for part in (
        "missing from the checkpoint",
        "1.Dense/1",
        "in the checkpoint only",
        "1.BatchNorm/0",
        "2.Dense/1",
        "0.Dense/0: got (5, 4), wanted (5, 6)",
    ):
        assert part in text
    assert bits(other.weights) == before


def test_two_layers_of_the_same_shape_in_other_order_are_an_error(tmp_path):
    def pair(*names):
        return tl.Serial([tl.Dense(5, name=name) for name in names])

    made(pair("query", "key")).save_to_file(tmp_path / "pair.pkl")
    with pytest.raises(CheckpointError) as error:
        pair("key", "query").init_from_file(tmp_path / "pair.pkl")
    for path in ("0.key/0", "1.query/0", "0.query/0", "1.key/0"):
        assert path in str(error.value)


def test_a_shared_layer_is_saved_once_and_stays_tied(tmp_path):
    def tied():
        shared = tl.Dense(5)
        return tl.Serial(shared, tl.Relu(), shared)

    layer = made(tied())
    layer.save_to_file(tmp_path / "tied.pkl")
    assert list(storage.load(tmp_path / "tied.pkl")["weights"]) == [
        "0.Dense/0",
        "0.Dense/1",
    ]
    other = tied()
    other.init_from_file(tmp_path / "tied.pkl")
    w, b = np.float64(layer.weights[0][0]), np.float64(layer.weights[0][1])
    expected = np.maximum(np.float64(X) @ w + b, 0) @ w + b
    np.testing.assert_allclose(other(X), expected, atol=1e-5)
    new = (jnp.zeros((5, 5)), jnp.ones(5))
    other.sublayers[0].weights = new
    np.testing.assert_array_equal(other(X), np.ones((6, 5)))
    assert bits(other.sublayers[2].weights) == bits(new)


def test_a_trainers_checkpoint_is_read_as_well(tmp_path):
    labels = (np.arange(6) % 3).astype(np.int32)
    trainer = Trainer(
        lambda mode: net(mode=mode),
        tl.CategoryCrossEntropy(),
        optimizers.Adam,
        lambda step: 0.1,
        Inputs(lambda: iter([(X, labels)] * 2)),
        tmp_path,
        n_devices=1,
        should_write_summaries=False,
        log=RunLog(stream=io.StringIO()),
    )
    trainer.run(2, None, 1)
    layer = net(mode="eval")
    layer.init_from_file(tmp_path / "model.pkl")
    assert bits(layer.weights) == bits(trainer.model_weights)
    assert bits(layer.state) == bits(trainer.model_state)
    only_weights = net(mode="eval")
    only_weights.init_from_file(tmp_path / "model.pkl", weights_only=True)
    assert bits(only_weights.weights) == bits(trainer.model_weights)
    assert int(only_weights.state[1][2]) == 0


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_file_is_refused_and_changes_nothing(tmp_path, damage):
    used().save_to_file(tmp_path / "net.pkl")
    content = bytearray((tmp_path / "net.pkl").read_bytes())
    content[-50] ^= 4
    (tmp_path / "net.pkl").write_bytes(content if damage == "flip" else content[:-60])
    layer = used(1)
    before = bits((layer.weights, layer.state))
    with pytest.raises(
        CheckpointError, match="net.pkl (is cut short|has been altered)"
    ):
        layer.init_from_file(tmp_path / "net.pkl")
    assert bits((layer.weights, layer.state)) == before


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        net().init_from_file(tmp_path / "nothing.pkl", input_signature=SIGNATURE)


def test_a_file_of_something_else_is_refused(tmp_path):
    storage.save(tmp_path / "other.pkl", {"kind": "history"})
    with pytest.raises(CheckpointError, match="holds no weights.*'history'"):
        net().init_from_file(tmp_path / "other.pkl", input_signature=SIGNATURE)

"""Recurrent models: weights, and the errors of wrong sizes."""

import jax
import numpy as np
import pytest

from retrax import layers as tl
from retrax import models
from retrax.shapes import ShapeDtype

D, V = 8, 11
LSTM = (2 * D) * (4 * D) + 4 * D
GRU = (2 * D) * (3 * D) + 3 * D
IDS = ShapeDtype((2, 5), np.int32)


def n_weights(model, sig):
    weights, _ = model.weights_and_state_signature(sig)
    return sum(int(np.prod(w.shape)) for w in jax.tree.leaves(weights))


@pytest.mark.parametrize("scan_layers", [False, True])
def test_weights_of_grulm(scan_layers):
    model = models.GRULM(V, d_model=D, n_layers=3, scan_layers=scan_layers)
    assert n_weights(model, IDS) == V * D + 3 * GRU + (D * V + V)


@pytest.mark.parametrize("n_layers", [1, 2, 3])
def test_weights_of_rnnlm(n_layers):
    model = models.RNNLM(V, d_model=D, n_layers=n_layers)
    assert n_weights(model, IDS) == V * D + n_layers * LSTM + (D * V + V)


def test_weights_of_the_translator():
    model = models.LSTMSeq2SeqAttn(V, 13, D, n_encoder_layers=3, n_decoder_layers=1)
    attention = 4 * (D * D + D)
    expected = V * D + 3 * LSTM + 13 * D + LSTM + attention + LSTM + (D * 13 + 13)
    assert n_weights(model, (IDS, IDS)) == expected
    assert (model.n_in, model.n_out) == (2, 2)


def test_translator_gives_log_probabilities():
    model = models.LSTMSeq2SeqAttn(V, V, D, mode="eval")
    source = np.array([[5, 6, 7]], np.int32)
    target = np.array([[7, 6, 5, 4]], np.int32)
    model.init((source, target), rng=jax.random.key(0))
    f = jax.jit(lambda x: model.pure_fn(x, model.weights, model.state, None)[0])
    log_probabilities, same = f((source, target))
    assert log_probabilities.shape == (1, 4, V)
    np.testing.assert_allclose(np.exp(log_probabilities).sum(-1), 1, atol=1e-5)
    np.testing.assert_array_equal(same, target)


def test_rnnlm_of_one_lstm_is_the_layer():
    """The cell in RNNLM's own loop computes what `LSTM` does."""
    ids = np.array([[5, 6, 7, 8], [1, 2, 3, 4]], np.int32)
    model = models.RNNLM(V, d_model=D, n_layers=1, mode="eval")
    model.init(ids, rng=jax.random.key(0))
    plain = tl.Serial(
        tl.ShiftRight(), tl.Embedding(V, D), tl.LSTM(D, mode="eval"), tl.Dense(V)
    )
    plain.init(ids)
    for layer, weights in zip(
        [plain.sublayers[1], plain.sublayers[2], plain.sublayers[3]],
        np_blocks(model),
        strict=True,
    ):
        structure = jax.tree.structure(layer.weights)
        layer.weights = jax.tree.unflatten(structure, weights)
    np.testing.assert_allclose(model(ids), plain(ids), atol=1e-6)


def np_blocks(model):
    """Leaves of embedding, cell and last dense layer."""
    groups = [jax.tree.leaves(w) for w in model.weights]
    return [g for g in groups if g]


def test_errors_name_numbers():
    with pytest.raises(ValueError, match="n_layers.*0"):
        models.RNNLM(V, n_layers=0)
    with pytest.raises(ValueError, match="10.*n_heads=4"):
        models.LSTMSeq2SeqAttn(V, V, 10, n_attention_heads=4)

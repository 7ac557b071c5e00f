"""Transformers: weights, structure, masks and that one learns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from retrax import layers as tl
from retrax import models
from retrax.errors import LayerError
from retrax.shapes import ShapeDtype

D, F, V = 8, 16, 11
SMALL = dict(d_model=D, d_ff=F, n_heads=2, max_len=16)
ATTENTION = 4 * (D * D + D)
FEED_FORWARD = (D * F + F) + (F * D + D)
NORM = 2 * D
ENCODER_BLOCK = DECODER_BLOCK = ATTENTION + FEED_FORWARD + 2 * NORM
ENCODER_DECODER_BLOCK = 2 * ATTENTION + FEED_FORWARD + 3 * NORM

IDS = ShapeDtype((2, 5), np.int32)

# As Trax prints it, but without the Serial that Trax puts around each function, and
# with heads split inside of attention.
ONE_BLOCK_LM = """\
Serial[
  ShiftRight(1)
  Embedding_11_8
  Dropout
  PositionalEncoding
  Serial[
    Branch_out2[
      None
      Serial[
        LayerNorm
        Serial[
          Branch_out3[
            Dense_8
            Dense_8
            Dense_8
          ]
          DotProductCausalAttention_in3
          Dense_8
        ]
        Dropout
      ]
    ]
    Add_in2
  ]
  Serial[
    Branch_out2[
      None
      Serial[
        LayerNorm
        Dense_16
        Relu
        Dropout
        Dense_8
        Dropout
      ]
    ]
    Add_in2
  ]
  LayerNorm
  Dense_11
]"""


def n_weights(model, sig):
    weights, _ = model.weights_and_state_signature(sig)
    return sum(int(np.prod(w.shape)) for w in jax.tree.leaves(weights))


@pytest.mark.parametrize("scan_layers", [False, True])
def test_weights_of_the_language_model(scan_layers):
    model = models.TransformerLM(V, n_layers=3, scan_layers=scan_layers, **SMALL)
    expected = V * D + 3 * DECODER_BLOCK + NORM + (D * V + V)
    assert n_weights(model, IDS) == expected


def test_weights_of_the_encoder():
    model = models.TransformerEncoder(V, n_classes=4, n_layers=3, **SMALL)
    expected = V * D + 3 * ENCODER_BLOCK + NORM + (D * 4 + 4)
    assert n_weights(model, IDS) == expected


def test_weights_of_the_decoder_for_vectors():
    model = models.TransformerDecoder(None, n_layers=3, **SMALL)
    expected = (6 * D + D) + 3 * DECODER_BLOCK + NORM
    assert n_weights(model, ShapeDtype((2, 5, 6))) == expected


@pytest.mark.parametrize("out_vocab, n_out", [(None, V), (13, 13)])
def test_weights_of_the_encoder_decoder(out_vocab, n_out):
    model = models.Transformer(
        V, out_vocab, n_encoder_layers=2, n_decoder_layers=3, **SMALL
    )
    embeddings = V * D if out_vocab is None else V * D + 13 * D
    expected = (
        embeddings
        + 2 * ENCODER_BLOCK
        + 3 * ENCODER_DECODER_BLOCK
        + 2 * NORM
        + (D * n_out + n_out)
    )
    assert n_weights(model, (IDS, IDS)) == expected


def test_structure_is_that_of_trax():
    assert str(models.TransformerLM(V, n_layers=1, **SMALL)) == ONE_BLOCK_LM


@pytest.mark.parametrize(
    "name, n",  # What Trax 1.4.1 has with two blocks.
    [("TransformerLM", 10), ("TransformerEncoder", 12), ("TransformerDecoder", 8)],
)
@pytest.mark.parametrize("mode", ["train", "eval", "predict"])
def test_number_of_sublayers_is_that_of_trax(name, n, mode):
    model = getattr(models, name)(V, n_layers=2, mode=mode, **SMALL)
    assert len(model.sublayers) == n
    assert (model.n_in, model.n_out) == (1, 1)


@pytest.mark.parametrize("mode", ["train", "eval", "predict"])
def test_encoder_decoder_is_built_as_in_trax(mode):
    model = models.Transformer(
        V, n_encoder_layers=2, n_decoder_layers=2, mode=mode, **SMALL
    )
    assert len(model.sublayers) == 18
    assert (model.n_in, model.n_out) == (2, 2)


@pytest.mark.parametrize("model_fn", ["Transformer", "LSTMSeq2SeqAttn"])
def test_padding_of_the_source_changes_nothing(model_fn):
    if model_fn == "Transformer":
        model = models.Transformer(
            V, n_encoder_layers=1, n_decoder_layers=1, mode="eval", **SMALL
        )
    else:
        model = models.LSTMSeq2SeqAttn(V, V, d_model=D, mode="eval")
    source = np.array([[5, 6, 7, 0], [3, 4, 0, 0]], np.int32)
    target = np.array([[7, 6, 5], [4, 3, 1]], np.int32)
    model.init((source, target), rng=jax.random.key(0))
    f = jax.jit(lambda x: model.pure_fn(x, model.weights, model.state, None)[0])
    logits, same = f((source, target))
    longer, _ = f((np.pad(source, ((0, 0), (0, 3))), target))
    np.testing.assert_allclose(logits, longer, atol=1e-6)
    np.testing.assert_array_equal(same, target)
    other = np.where(source == 5, 8, source)
    changed, _ = f((other, target))
    by_row = np.abs(logits - changed).max(axis=(1, 2))
    assert by_row[0] > 1e-4 and by_row[1] == 0


def test_predict_runs_the_encoder_once():
    model = models.Transformer(
        V, n_encoder_layers=1, n_decoder_layers=1, mode="predict", **SMALL
    )
    source = np.array([[5, 6, 7, 0]], np.int32)
    other = np.array([[6, 7, 5, 0]], np.int32)
    ids = np.array([[0]], np.int32)
    model.init((source, ids), rng=jax.random.key(0))
    f = jax.jit(lambda x, state: model.pure_fn(x, model.weights, state, None))
    (first, _), state = f((source, ids), model.state)
    # The encoder's output is kept: only the mask is made anew, which is the same.
    (same, _), _ = f((source, ids + 4), state)
    (of_other, _), _ = f((other, ids + 4), state)
    np.testing.assert_array_equal(of_other, same)
    fresh = tl.initial_state(model, state)
    (again, _), _ = f((source, ids), fresh)
    (of_other, _), _ = f((other, ids), fresh)
    np.testing.assert_array_equal(again, first)
    assert np.abs(of_other - first).max() > 1e-4


def test_errors_name_numbers():
    with pytest.raises(ValueError, match="-1"):
        models.TransformerLM(V, n_layers=-1, **SMALL)
    with pytest.raises(ValueError, match="10.*n_heads=4"):
        models.TransformerLM(V, d_model=10, n_heads=4)
    model = models.TransformerLM(V, n_layers=1, **SMALL)
    with pytest.raises(LayerError, match="max_len=16.*17"):
        model.init(ShapeDtype((2, 17), np.int32))


def test_two_blocks_learn_a_batch_by_heart():
    model = models.TransformerLM(
        V, d_model=32, d_ff=64, n_layers=2, n_heads=4, max_len=16, dropout=0.0
    )
    ids = np.random.default_rng(0).integers(0, V, (4, 16)).astype(np.int32)
    ids[:, 0] = [3, 4, 5, 6]
    # Which row it is shows in the first id only, which nobody can know before.
    least = np.log(4) / 16
    loss_layer = tl.Serial(model, tl.WeightedCategoryCrossEntropy())
    loss_layer.init((ids, ids, np.ones(ids.shape, np.float32)), rng=jax.random.key(0))
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(weights, slots):
        def loss(weights):
            batch = (ids, ids, jnp.ones(ids.shape))
            return loss_layer.pure_fn(batch, weights, loss_layer.state, None)[0]

        value, grads = jax.value_and_grad(loss)(weights)
        updates, slots = optimizer.update(grads, slots)
        return optax.apply_updates(weights, updates), slots, value

    weights = loss_layer.weights
    slots = optimizer.init(weights)
    losses = []
    for _ in range(150):
        weights, slots, value = step(weights, slots)
        losses.append(float(value))
    assert losses[0] > 2.0
    assert least - 1e-4 < losses[-1] < least + 0.01

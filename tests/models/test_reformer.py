"""Reformers: masks, reversing against keeping, layer by layer, decoding, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax import models, optimizers
from retrax.layers.running import memory_context
from retrax.shapes import ShapeDtype, signature
from retrax.supervised.decoding import autoregressive_sample
from retrax.trainer import ReversibleSerialTrainer

D, F, V, B, LENGTH = 8, 16, 11, 2, 16
KEY = jax.random.key(3)
HEADS = dict(n_heads=2, d_attention_key=4, d_attention_value=4)
LM = dict(vocab_size=V, d_model=D, d_ff=F, n_layers=2, max_len=LENGTH, **HEADS)
ENC_DEC = dict(
    input_vocab_size=V,
    d_model=D,
    d_ff=F,
    n_heads=2,
    n_encoder_layers=1,
    n_decoder_layers=1,
    max_len=LENGTH,
)
LSH = functools.partial(tl.LSHSelfAttention, chunk_len=4, n_buckets=4)
LOSS = tl.WeightedCategoryCrossEntropy()
MODERN = dict(d_model=D, d_ff=F, n_layers=2, n_heads=2, reversible=True)

LANGUAGE_MODELS = {
    "plain": functools.partial(models.ReformerLM, **LM),
    "lsh": functools.partial(models.ReformerLM, attention_type=LSH, **LM),
    "axial": functools.partial(
        models.ReformerLM, pos_axial_shape=(4, 4), ff_chunk_size=8, **LM
    ),
    "shorten": functools.partial(
        models.ReformerShortenLM, shorten_factor=4, d_embedding=6, **LM
    ),
    "modern": functools.partial(models.DecoderLM, V, max_len=LENGTH, **MODERN),
}


@pytest.fixture(scope="module", autouse=True)
def _compile_fast():
    """Most of the time here goes into compiling."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def ids_of(seed=0, length=LENGTH, low=2):
    return np.random.default_rng(seed).integers(low, V, (B, length)).astype(np.int32)


def started(model, x):
    model.weights, model.state = jax.jit(lambda key: model.init(x, rng=key))(KEY)
    return model


def run(model, x):
    fn = jax.jit(lambda x, w: model.pure_fn(x, w, model.state, None)[0])
    return np.asarray(fn(x, model.weights))


def n_weights(model, sig):
    weights, _ = model.weights_and_state_signature(sig)
    return sum(int(np.prod(w.shape)) for w in jax.tree.leaves(weights))


# --- Language models ----------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in LANGUAGE_MODELS if n != "plain"])
def test_logits_see_earlier_ids_only(name):
    model = started(LANGUAGE_MODELS[name](mode="eval"), ids_of())
    ids, t = ids_of(), 9
    changed = ids.copy()
    changed[:, t] = (changed[:, t] - 1) % (V - 2) + 2
    both = run(model, np.concatenate([ids, changed]))
    difference = np.abs(both[:B] - both[B:]).max(-1)
    assert both.shape == (2 * B, LENGTH, V)
    # Hashes of later ids change the order of sums, so not all bits are equal.
    assert np.all(difference[:, : t + 1] < 2e-6)
    assert np.all(difference[:, t + 1] > 1e-5)
    if name == "shorten":  # The last group may be shorter.
        part = run(model, np.concatenate([ids, changed])[:, :13])
        np.testing.assert_allclose(part, both[:, :13], rtol=1e-5, atol=1e-5)


def test_weights_are_those_of_the_paper_s_block():
    attention = 3 * D * D + D * D  # q, k, v and the output, for 2 heads of size 4.
    block = attention + (2 * D * F + D + F) + 2 * 2 * D
    expected = V * D + 2 * block + 2 * (2 * D) + (2 * D * V + V)
    sig = ShapeDtype((B, LENGTH), np.int32)
    for scan_layers in (False, True):
        model = models.ReformerLM(scan_layers=scan_layers, **LM)
        assert n_weights(model, sig) == expected
    lsh = LANGUAGE_MODELS["lsh"](mode="train")  # Keys are the queries.
    assert n_weights(lsh, sig) == expected - 2 * D * D
    axial = LANGUAGE_MODELS["axial"](mode="train")
    assert n_weights(axial, sig) == expected + (4 + 4) * D // 2
    sru = models.ReformerLM(ff_use_sru=1, **LM)
    unit = D * 3 * D + 3 * D
    assert n_weights(sru, sig) == expected + 2 * (unit - (2 * D * F + D + F))


def by_hand(x, weights):
    """The two blocks of DecoderLM(reversible=True) on two streams, in a plain loop."""
    (halves, embedding), last = weights[:2], weights[2]
    x1 = x2 = embedding[x]
    for f, g in halves:
        y1 = x1 + f(x2)
        y2 = x2 + g(y1)
        x1, x2 = y1, y2
    return last(x1 + x2)


def test_blocks_are_those_of_the_equations():
    """y1 = x1 + Attention(x2), y2 = x2 + FeedForward(y1), written out."""
    model = started(LANGUAGE_MODELS["modern"](mode="eval"), ids_of())
    halves, others = [], []
    values = zip(model.sublayers, model.weights, strict=True)
    for layer, w in values:
        is_half = isinstance(layer, tl.ReversibleHalfResidual)
        (halves if is_half else others).append((layer, w))
    assert len(halves) == 4

    @jax.jit
    def both(ids):
        def residual(layer, w):
            inner = layer.sublayers[0]
            return lambda x: inner.pure_fn(x, w[0], layer.state[0], None)[0]

        fs = [residual(*pair) for pair in halves]
        (_, embedding), norm, last = others[1], others[-2], others[-1]

        def end(x):
            y, _ = norm[0].pure_fn(x, norm[1], (), None)
            return last[0].pure_fn(y, last[1], (), None)[0]

        shifted = jnp.pad(ids, ((0, 0), (1, 0)))[:, :-1]
        expected = by_hand(
            shifted, (zip(fs[::2], fs[1::2], strict=True), embedding, end)
        )
        return expected, model.pure_fn(ids, model.weights, model.state, None)[0]

    expected, got = both(ids_of())
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_gradients_by_reversing_are_those_of_keeping():
    """In float64, with hashes of the key, where rounding leaves nothing of note."""
    options = {"dropout": 0.0, "scan_layers": True}
    with jax.enable_x64(True):
        model = tl.Serial(
            LANGUAGE_MODELS["lsh"](mode="train", **options), tl.CategoryCrossEntropy()
        )
        ids = ids_of()
        key = jax.random.key(3)
        weights, state = jax.jit(lambda k: model.init((ids, ids), rng=k))(key)
        weights = jax.tree.map(lambda w: jnp.asarray(w, jnp.float64), weights)

        def gradient(mode):
            def loss(w):
                with memory_context(mode):
                    return model.pure_fn((ids, ids), w, state, key)[0]

            return jax.jit(jax.grad(loss))(weights)

        plain, reversed_ = map(jax.tree.leaves, map(gradient, ("plain", "reversible")))
        largest = max(float(jnp.abs(g).max()) for g in plain)
        assert largest > 1e-3 and plain[0].dtype == jnp.float64
        for a, b in zip(plain, reversed_, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-9 * largest)


def test_layer_by_layer_trains_it():
    """The first loss against NumPy's, of the model's logits."""
    ids = ids_of()
    lm = models.ReformerLM(dropout=0.0, scan_layers=True, **LM)
    model = started(tl.Serial(lm, LOSS), (ids, ids, np.ones(ids.shape, np.float32)))
    logits = run(lm, ids).astype(np.float64)
    right = np.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
    expected = np.mean(np.log(np.exp(logits).sum(-1)) - right)
    batch = (ids, ids, np.ones(ids.shape, np.float32))
    trainer = ReversibleSerialTrainer.from_model(model, optimizers.SGD(0.5), 1)
    losses = [float(trainer.one_step(batch, KEY)[0]) for _ in range(4)]
    np.testing.assert_allclose(losses[0], expected, rtol=1e-5)
    assert losses[-1] < losses[0] - 0.1
    kinds = [unit.kind for unit in trainer.units]
    assert kinds.count("reversible") == 2 and kinds[-1] == "loss"


@pytest.mark.parametrize("name", ["lsh", "modern", "shorten"])
def test_predict_goes_on_as_eval_does(name):
    """In two parts; in mode 'predict' nothing is shifted, so 0 comes first."""
    model = started(LANGUAGE_MODELS[name](mode="eval"), ids_of())
    predict = LANGUAGE_MODELS[name](mode="predict")
    started(predict, ShapeDtype((B, 1), np.int32))
    step = jax.jit(lambda x, w, s: predict.pure_fn(x, w, s, None))
    shifted = np.pad(ids_of(), ((0, 0), (1, 0)))[:, :-1]
    first, state = step(shifted[:, :6], model.weights, predict.state)
    second, _ = step(shifted[:, 6:], model.weights, state)
    together = np.concatenate([first, second], axis=1)
    np.testing.assert_allclose(together, run(model, ids_of()), rtol=1e-4, atol=1e-5)


def test_sampling_in_predict_is_that_of_eval():
    trained = started(LANGUAGE_MODELS["plain"](mode="eval"), ids_of())
    predict = LANGUAGE_MODELS["plain"](mode="predict")
    started(predict, ShapeDtype((B, 1), np.int32)).weights = trained.weights
    prompt = ids_of(1, 3)
    options = dict(temperature=0.0, eos_id=None, max_length=6)
    expected = autoregressive_sample(
        trained, prompt, eval_mode=True, eval_min_length=LENGTH, **options
    )
    np.testing.assert_array_equal(
        autoregressive_sample(predict, prompt, **options), expected
    )


# --- From one sequence to another ---------------------------------------------------


def other(ids):
    return 2 + (ids - 1) % (V - 2)


@functools.partial(jax.jit, static_argnums=0)
def compiled(model, x, weights):
    return model.pure_fn(x, weights, model.state, None)[0]


def run_all(model, x):
    return [np.asarray(y) for y in compiled(model, x, model.weights)]


def pair():
    source, target = ids_of(0, 6), ids_of(1, 5)
    source[0, 4:] = 0
    return source, target


@pytest.mark.parametrize("kind", [models.Reformer, models.Reformer2])
def test_encoder_decoder_sees_the_source_without_padding_and_earlier_targets(kind):
    source, target = pair()
    model = started(kind(mode="eval", output_vocab_size=V, **ENC_DEC), pair())
    later, first = target.copy(), source.copy()
    later[:, 3] = other(later[:, 3])
    first[:, 0] = other(first[:, 0])
    sources = np.concatenate([source, source, first])
    logits, same = run_all(model, (sources, np.concatenate([target, later, target])))
    np.testing.assert_array_equal(same[:B], target)
    assert logits.shape == (3 * B, 5, V)
    one, with_later, with_first = np.split(logits, 3)
    difference = np.abs(one - with_later).max(-1)
    assert np.all(difference[:, :4] < 2e-6) and np.all(difference[:, 4] > 1e-5)
    assert np.all(np.abs(one - with_first).max(-1) > 1e-5)
    # Row 0 has two ids of padding; without them, and alone, it is the same.
    alone, _ = run_all(model, (source[:1, :4], target[:1]))
    np.testing.assert_allclose(alone[0], one[0], rtol=1e-5, atol=1e-5)
    # Mode 'predict' chooses what 'eval' would.
    predict = kind(mode="predict", output_vocab_size=V, **ENC_DEC)
    started(predict, (source, source[:, :1])).weights = model.weights
    options = dict(temperature=0.0, eos_id=None, max_length=5)
    sample = autoregressive_sample(predict, source, B, **options)
    logits, _ = run_all(model, (sources, np.concatenate([sample] * 3)))
    np.testing.assert_array_equal(np.argmax(logits[:B], axis=-1), sample)


@pytest.mark.parametrize("attention", [tl.SelfAttention, LSH])
def test_sources_of_several_lengths_are_decoded_as_eval_does(attention):
    """The logits, in calls of two and three targets; then of another sequence."""
    make = functools.partial(
        models.Reformer2, encoder_decoder_attention_type=attention, **ENC_DEC
    )
    model, predict = started(make(mode="eval"), pair()), make(mode="predict")
    started(predict, (pair()[0], pair()[1][:, :1])).weights = model.weights
    for source, target in (pair(), [ids[::-1] for ids in pair()]):
        wanted, _ = run_all(model, (source, target))
        shifted = np.pad(target, ((0, 0), (1, 0)))[:, :-1]
        state, parts = predict.state, []
        for part in (shifted[:, :2], shifted[:, 2:]):
            step = jax.jit(lambda x, w, s: predict.pure_fn(x, w, s, None))
            (logits, _), state = step((source, part), model.weights, state)
            parts.append(logits)
        together = np.concatenate(parts, axis=1)
        np.testing.assert_allclose(together, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [models.Reformer, models.Reformer2])
def test_encoder_decoder_trains_with_other_attention(kind):
    """Shapes of the gradients of all weights, dropout and chunks among it."""
    options = {"encoder_decoder_attention_type": LSH, "attention_chunk_size": 1}
    if kind is models.Reformer:
        options = {"attention_type": LSH, "pos_type": "sin-cos"}
    model = tl.Serial(kind(ff_chunk_size=2, **options, **ENC_DEC), LOSS)
    batch = (*pair(), np.ones((B, 5), np.float32))
    sig = signature(batch)

    def gradient(key):
        weights, state = model.init(sig, rng=key)

        def loss(w):
            return model.pure_fn(batch, w, state, key)[0]

        return weights, jax.value_and_grad(loss)(weights)

    weights, (loss, grads) = jax.eval_shape(gradient, KEY)
    assert loss.shape == ()
    shapes = [w.shape for w in jax.tree.leaves(weights)]
    assert [g.shape for g in jax.tree.leaves(grads)] == shapes
    assert len(shapes) > 20


# --- Bad input ----------------------------------------------------------------------


def test_bad_input_says_what_to_change():
    with pytest.raises(ValueError, match="pos_type must be one of .*'fixed'"):
        models.ReformerLM(pos_type="fixed", **LM)
    with pytest.raises(ValueError, match=r"at least max_len=16 places, got \(3, 5\)"):
        models.ReformerLM(pos_axial_shape=(3, 5), **LM)
    with pytest.raises(ValueError, match=r"the sum 8, got \(4, 5\)"):
        models.ReformerLM(pos_axial_shape=(4, 4), pos_d_axial_embs=(4, 5), **LM)
    with pytest.raises(ValueError, match="shorten_factor must be at least 1, got 0"):
        models.ReformerShortenLM(shorten_factor=0, **LM)
    with pytest.raises(ValueError, match="n_heads=3 has to divide d_model=8"):
        models.Reformer(**{**ENC_DEC, "n_heads": 3})
    with pytest.raises(ValueError, match="remat=True"):
        models.DecoderLM(V, remat=True, scan_layers=True, **MODERN)

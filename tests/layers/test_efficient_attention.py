"""SelfAttention and EncDecAttention against NumPy's float64; axial positions."""

import jax
import numpy as np
import pytest

from retrax import layers as tl
from retrax.errors import LayerError

KEY = jax.random.key(5)
B, LENGTH, D, HEADS, D_QK, D_V = 2, 7, 5, 2, 4, 3
SIZES = dict(n_heads=HEADS, d_qk=D_QK, d_v=D_V, mode="eval")


@pytest.fixture(scope="module", autouse=True)
def _compile_fast():
    """Most of the time here goes into compiling."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def started(layer, x):
    """Initialises in one compiled piece; returns (weights, state)."""
    layer.weights, layer.state = jax.jit(lambda key: layer.init(x, rng=key))(KEY)
    return layer.weights, layer.state


def arrays(seed=0, length=LENGTH):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(B, length, D)).astype(np.float32)
    mask = rng.uniform(size=(B, length)) < 0.7
    mask[0, 0] = False
    return x, mask


def by_loops(x, source, weights, allowed, share_qk, bias):
    """allowed: (batch, queries, keys); weights as the layer has them."""
    matrices = [np.asarray(w, np.float64) for w in (weights[::2] if bias else weights)]
    biases = [np.asarray(w, np.float64) for w in weights[1::2]] if bias else [0] * 4
    *first, last = zip(matrices, biases, strict=False)
    sources = [x, source] if share_qk else [x, source, source]
    parts = [s @ w + b for s, (w, b) in zip(sources, first, strict=True)]
    y = np.zeros((*x.shape[:2], HEADS * D_V))
    for i, t, h in np.ndindex(B, x.shape[1], HEADS):
        q = parts[0][i, :, h * D_QK : (h + 1) * D_QK]
        v = parts[-1][i, :, h * D_V : (h + 1) * D_V]
        if share_qk:
            k = q / np.sqrt((q**2).mean(-1, keepdims=True) + 1e-6)
        else:
            k = parts[1][i, :, h * D_QK : (h + 1) * D_QK]
        seen = list(np.flatnonzero(allowed[i, t]))
        if share_qk and seen != [t]:
            seen = [s for s in seen if s != t]
        if seen:
            scores = np.exp(k[seen] @ q[t] / np.sqrt(D_QK))
            y[i, t, h * D_V : (h + 1) * D_V] = scores @ v[seen] / scores.sum()
    return y @ last[0] + last[1]


CASES = [
    dict(),
    dict(causal=True, masked=True, bias=True),
    dict(causal=True, share_qk=True, masked=True),
    dict(share_qk=True, chunk_len=3, n_chunks_before=1, n_chunks_after=1),
    dict(causal=True, chunk_len=2, n_chunks_before=1, n_parallel_heads=3),
    dict(masked=True, chunk_len=9),
]


@pytest.mark.parametrize("given", CASES, ids=str)
def test_self_attention_is_a_loop(given):
    x, mask = arrays()
    layer = tl.SelfAttention(**SIZES, **given)
    inputs = (x, mask) if layer.n_in == 2 else x
    weights, _ = started(layer, inputs)
    if given.get("bias"):
        weights = tuple(w + 0.1 if w.ndim == 1 else w for w in weights)
    at = np.arange(LENGTH)
    allowed = np.ones((B, LENGTH, LENGTH), bool)
    if given.get("causal"):
        allowed &= at <= at[:, None]
    if "chunk_len" in given:
        ago = at[:, None] // given["chunk_len"] - at // given["chunk_len"]
        allowed &= ago <= given.get("n_chunks_before", 0)
        allowed &= ago >= -given.get("n_chunks_after", 0)
    if given.get("masked"):
        allowed &= mask[:, None]
    shares, bias = given.get("share_qk", False), given.get("bias", False)
    expected = by_loops(x, x, weights, allowed, shares, bias)
    y, _ = jax.jit(layer.pure_fn)(inputs, weights, (), None)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_attention_to_another_sequence_is_a_loop():
    x, _ = arrays(length=4)
    source, mask = arrays(1)
    layer = tl.EncDecAttention(**SIZES)
    weights, _ = started(layer, (x, source, mask))
    allowed = np.broadcast_to(mask[:, None], (B, 4, LENGTH))
    expected = by_loops(x, source, weights, allowed, False, False)
    y, _ = jax.jit(layer.pure_fn)((x, source, mask), weights, (), None)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert tl.EncDecAttention(masked=False).n_in == 2


@pytest.mark.parametrize(
    "given", [dict(share_qk=True), dict(chunk_len=2, n_chunks_before=1)], ids=str
)
def test_predict_is_eval(given):
    x, _ = arrays()
    given = dict(causal=True, **given)
    layer = tl.SelfAttention(**SIZES, **given)
    weights, _ = started(layer, x)
    expected = jax.jit(lambda x: layer.pure_fn(x, weights, (), None)[0])(x)
    predict = tl.SelfAttention(
        **SIZES | dict(mode="predict"), predict_mem_len=LENGTH, **given
    )
    _, state = started(predict, x[:, :1])
    step = jax.jit(predict.pure_fn)
    ys, at = [], 0
    for n in (3, 1, 1, 1, 1):
        y, state = step(x[:, at : at + n], weights, state, None)
        ys.append(y)
        at += n
    np.testing.assert_allclose(np.concatenate(ys, 1), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(LayerError, match="predict_mem_len=7"):
        predict.pure_fn(x[:, :1], weights, state, None)
    with pytest.raises(LayerError, match="a batch of 1 in mode 'predict'"):
        predict.pure_fn(x[:1], weights, predict.state, None)


def test_dropout_drops_in_training_only():
    """With chance 1/2, values of one are kept twice as large, or lost."""
    x = np.ones((4, 64, D), np.float32)
    layer = tl.SelfAttention(1, D_QK, D_V, attention_dropout=0.5, output_dropout=0.25)
    weights, _ = started(layer, x)
    y = np.asarray(jax.jit(layer.pure_fn)(x, weights, (), jax.random.key(1))[0])
    assert abs(np.mean(y == 0) - 0.25) < 0.05
    still = tl.SelfAttention(1, D_QK, D_V, attention_dropout=0.5, mode="eval")
    plain = np.asarray(jax.jit(still.pure_fn)(x, weights, (), None)[0])
    mean = y.mean((0, 1)) / plain.mean((0, 1))
    np.testing.assert_allclose(mean, 1, atol=0.15)
    with pytest.raises(LayerError, match="needs a random key in mode 'train'"):
        layer.pure_fn(x, weights, (), None)


@pytest.mark.parametrize(
    "given, text",
    [
        (dict(n_chunks_before=1), "give chunk_len as well"),
        (dict(chunk_len=2, causal=True, n_chunks_after=1), "n_chunks_after=1; use 0"),
        (dict(mode="predict"), "needs causal=True and masked=False"),
        (dict(predict_mem_len=0), "predict_mem_len must be at least 1"),
        (dict(output_dropout=-1.0), "output_dropout must be in"),
    ],
)
def test_mistakes(given, text):
    with pytest.raises(ValueError, match=text):
        tl.SelfAttention(**given)


def test_vectors_of_another_shape():
    with pytest.raises(LayerError, match=r"\(batch, length, d\), got \(2, 3\)"):
        tl.SelfAttention().init(np.ones((2, 3)))


# --- Axial positions ----------------------------------------------------------------


def test_axial_positions_join_coordinates():
    layer = tl.AxialPositionalEncoding(shape=(2, 3, 2), d_embs=(1, 2, 3))
    x = np.random.default_rng(0).normal(size=(2, 10, 6)).astype(np.float32)
    weights, _ = started(layer, x)
    y = np.asarray(jax.jit(layer.pure_fn)(x, weights, (), KEY)[0])
    weights = [np.asarray(w) for w in weights]
    for t, place in enumerate(list(np.ndindex(2, 3, 2))[:10]):
        vector = np.concatenate([w[i] for w, i in zip(weights, place, strict=True)])
        np.testing.assert_allclose(y[:, t], x[:, t] + vector, rtol=1e-5, atol=1e-6)
    predict = tl.AxialPositionalEncoding((2, 3, 2), (1, 2, 3), mode="predict")
    state, ys = started(predict, x[:, :1])[1], []
    weights = tuple(weights)
    step = jax.jit(predict.pure_fn)
    for at, n in ((0, 5), (5, 5)):
        part, state = step(x[:, at : at + n], weights, state, None)
        ys.append(part)
    np.testing.assert_allclose(np.concatenate(ys, 1), y, rtol=1e-6, atol=1e-6)
    with pytest.raises(LayerError, match=r"prod\(shape\)=12"):
        predict.pure_fn(x[:, :3], weights, state, None)


def test_axial_mistakes():
    with pytest.raises(ValueError, match=r"shape=\(2, 3\) and d_embs=\(4,\)"):
        tl.AxialPositionalEncoding((2, 3), (4,))
    layer = tl.AxialPositionalEncoding((2, 3), (1, 2))
    with pytest.raises(LayerError, match="sum 3, but inputs have 4 features"):
        layer.init(np.ones((1, 6, 4), np.float32))
    with pytest.raises(LayerError, match="6 places, but the inputs have length 7"):
        jax.eval_shape(layer.pure_fn, np.ones((1, 7, 3)), (0, 0), (), KEY)

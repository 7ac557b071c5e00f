"""Positional encodings, rotary positions and position biases, against formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax.errors import LayerError

KEY = jax.random.key(8)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def sinusoids(length, d, start=0):
    table = np.zeros((length, d))
    for t in range(length):
        for i in range(d):
            angle = (start + t) / 10000 ** (2 * (i // 2) / d)
            table[t, i] = math.sin(angle) if i % 2 == 0 else math.cos(angle)
    return table


# --- Added to embeddings ------------------------------------------------------------


@pytest.mark.parametrize("d", [6, 5])
@pytest.mark.parametrize("kind", ["sinusoidal", "trainable"])
def test_sinusoids(kind, d):
    x = normal(2, 7, d)
    layer = tl.PositionalEncoding(max_len=20, kind=kind)
    weights, state = layer.init(x, rng=KEY)
    n_weights = 20 * d if kind == "trainable" else 0
    assert sum(w.size for w in jax.tree.leaves(weights)) == n_weights and state == ()
    np.testing.assert_allclose(layer(x), x + sinusoids(7, d), rtol=1e-5, atol=1e-6)
    unbounded = tl.SinCosPositionalEncoding(mode="eval")
    np.testing.assert_allclose(unbounded(x), x + sinusoids(7, d), rtol=1e-4, atol=1e-5)


def test_learned_positions_are_weights():
    x = normal(2, 3, 4)
    layer = tl.PositionalEncoding(max_len=5, kind="learned", use_bfloat16=True)
    table, _ = layer.init(x, rng=KEY)
    assert table.shape == (5, 4) and table.dtype == jnp.bfloat16
    y = layer.pure_fn(x, normal(5, 4, seed=1), (), None)[0]
    np.testing.assert_allclose(y, x + normal(5, 4, seed=1)[:3], rtol=1e-6)
    wide = tl.PositionalEncoding(max_len=200, kind="learned")
    table, _ = wide.init(normal(1, 3, 64), rng=KEY)
    np.testing.assert_allclose(np.std(table), 0.02, rtol=0.05)


def test_narrow_positions_are_widened_by_a_matrix():
    x = normal(2, 3, 4)
    layer = tl.PositionalEncoding(max_len=5, d_feature=2)
    (table, matrix), _ = layer.init(x, rng=KEY)
    assert table == () and matrix.shape == (2, 4)
    expected = x + sinusoids(3, 2) @ np.asarray(matrix, np.float64)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)


def starts(layer, length=4, n=200):
    """Where the layer starts, for n keys."""
    d, top = 6, 40
    x = np.zeros((1, length, d), np.float32)
    layer.init(x)
    run = jax.jit(lambda k: layer.pure_fn(x, layer.weights, layer.state, k)[0])
    table, found = sinusoids(top + length, d), []
    for key in jax.random.split(KEY, n):
        y = np.asarray(run(key))[0]
        distances = [np.abs(table[s : s + length] - y).max() for s in range(top)]
        assert min(distances) < 1e-4
        found.append(int(np.argmin(distances)))
    return found


def test_random_starts():
    found = starts(
        tl.PositionalEncoding(30, start_from_zero_prob=0.5, max_offset_to_add=20)
    )
    assert max(found) <= 20 and len(set(found)) > 15
    assert 0.35 < np.mean(np.array(found) == 0) < 0.7
    found = starts(tl.SinCosPositionalEncoding(add_offset=20))
    assert max(found) <= 19 and len(set(found)) > 15
    assert 0.35 < np.mean(np.array(found) == 0) < 0.7


def test_random_starts_are_for_training_only():
    kwargs = dict(start_from_zero_prob=0.0, max_offset_to_add=9, mode="eval")
    assert set(starts(tl.PositionalEncoding(30, **kwargs), n=3)) == {0}
    layer = tl.SinCosPositionalEncoding(start_from_zero_one_in=10**6, mode="eval")
    assert set(starts(layer, n=3)) == {0}


def test_dropout_drops_features_of_all_positions_together():
    layer = tl.PositionalEncoding(max_len=50, dropout=0.5)
    x = np.zeros((2, 50, 400), np.float32)
    layer.init(x)
    y = np.asarray(layer(x, rng=KEY))
    kept = np.any(y != 0, axis=(0, 1))
    expected = np.where(kept, 2 * sinusoids(50, 400), 0)
    np.testing.assert_allclose(y[0], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(y[0], y[1])
    assert 0.35 < np.mean(kept) < 0.65
    single = tl.PositionalEncoding(max_len=50, dropout=0.5, dropout_broadcast_dims=())
    y = np.asarray(single(x, rng=KEY))
    assert np.all(np.any(y[0] != 0, axis=0))
    with pytest.raises(LayerError, match="needs a random key in mode 'train'"):
        layer.pure_fn(x, (), (), None)


@pytest.mark.parametrize(
    ("make", "length", "text"),
    [
        (lambda: tl.PositionalEncoding(5), 6, "max_len=5 .*length 6"),
        (
            lambda: tl.PositionalEncoding(
                5, start_from_zero_prob=0.1, max_offset_to_add=3
            ),
            3,
            "max_len=5 .*length 3 and start at up to 3",
        ),
    ],
)
def test_too_long(make, length, text):
    x = normal(1, length, 4)
    with pytest.raises(LayerError, match=text):
        tl.Serial(make(), tl.Dense(2)).init(x)


def test_bad_arguments():
    with pytest.raises(ValueError, match="kind must be one of .*'sinus'"):
        tl.PositionalEncoding(kind="sinus")
    with pytest.raises(ValueError, match="max_offset_to_add=7"):
        tl.PositionalEncoding(max_len=7, max_offset_to_add=7)
    with pytest.raises(ValueError, match="got -1 and 2"):
        tl.SinCosPositionalEncoding(add_offset=-1)
    with pytest.raises(LayerError, match=r"\(..., length, d_feature\), got \(3,\)"):
        tl.PositionalEncoding().init(normal(3))


# --- Rotary -------------------------------------------------------------------------


def turned(x, positions, base, pairs):
    """Multiplies each pair of features, as a complex number, by exp(i angle)."""
    y = np.array(x, np.float64)
    d = 2 * len(pairs)
    for t, position in enumerate(positions):
        for i, (a, b) in enumerate(pairs):
            z = (x[:, t, ..., a] + 1j * x[:, t, ..., b]) * np.exp(
                1j * position * base ** (-2 * i / d)
            )
            y[:, t, ..., a], y[:, t, ..., b] = z.real, z.imag
    return y


@pytest.mark.parametrize("shape", [(2, 5, 6), (2, 5, 3, 6)])
@pytest.mark.parametrize(
    ("kwargs", "pairs"),
    [
        (dict(), [(0, 3), (1, 4), (2, 5)]),
        (dict(interleaved=True), [(0, 1), (2, 3), (4, 5)]),
        (dict(fraction=0.7, base=50.0), [(0, 2), (1, 3)]),
    ],
)
def test_rotary_turns_pairs(kwargs, pairs, shape):
    x = normal(*shape)
    expected = turned(x, range(5), kwargs.get("base", 10000.0), pairs)
    layer = tl.RotaryPositions(**kwargs)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-4, atol=1e-6)
    later = layer.turn(x, 7 + jnp.arange(5))
    expected = turned(x, range(7, 12), kwargs.get("base", 10000.0), pairs)
    np.testing.assert_allclose(later, expected, rtol=1e-4, atol=1e-5)


def test_rotate_is_the_interleaved_form():
    x = normal(2, 5, 4)
    expected = turned(x, range(5), 10000.0, [(0, 1), (2, 3)])
    for y in (tl.Rotate()(x), tl.rotate(x)):
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-6)


def test_rotary_scores_depend_on_distances_only():
    layer = tl.RotaryPositions()
    q, k = normal(1, 4, 1, 8), normal(1, 4, 1, 8, seed=1)

    def scores(shift):
        at = shift + jnp.arange(4)
        return jnp.einsum("bqhd,bkhd->bhqk", layer.turn(q, at), layer.turn(k, at))

    np.testing.assert_allclose(scores(0), scores(30), rtol=1e-3, atol=1e-4)


def test_rotary_errors():
    with pytest.raises(LayerError, match="turns pairs of features, but there are 5"):
        tl.RotaryPositions()(normal(1, 2, 5))
    with pytest.raises(LayerError, match=r"there are 3 of them per head"):
        tl.CausalAttention(6, 2, rotary=True).init(normal(1, 2, 6))
    with pytest.raises(ValueError, match=r"got 1.0 and 2"):
        tl.RotaryPositions(base=1.0, fraction=2)


# --- Biases -------------------------------------------------------------------------


def t5_bucket(behind, n_buckets, max_distance, bidirectional):
    """The buckets of the paper, for one distance, in Python's floats."""
    first = 0
    if bidirectional:
        n_buckets //= 2
        if behind < 0:
            first = n_buckets
        behind = abs(behind)
    behind = max(behind, 0)
    exact = n_buckets // 2
    if behind < exact:
        return first + behind
    share = math.log(behind / exact) / math.log(max_distance / exact)
    return first + min(exact + int(share * (n_buckets - exact) + 1e-9), n_buckets - 1)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (6, 9)])
def test_relative_bias_is_that_of_t5(n_buckets, max_distance, bidirectional):
    layer = tl.RelativePositionBias(2, n_buckets, max_distance, bidirectional)
    queries, keys = np.array([0, 5, 150, 299]), np.arange(300)
    table = np.arange(n_buckets)[:, None] + np.array([0.0, 1000.0])
    got = np.asarray(layer.pure_fn((queries, keys), jnp.asarray(table), (), None)[0])
    expected = np.array(
        [
            [t5_bucket(q - k, n_buckets, max_distance, bidirectional) for k in keys]
            for q in queries
        ]
    )
    # At the borders between buckets float32 and float64 may differ.
    differ = got[0] != expected
    assert np.mean(differ) < 0.01 and np.all(np.abs(got[0] - expected) <= 1)
    np.testing.assert_array_equal(got[1], got[0] + 1000)
    assert got.shape == (2, 4, 300)


@pytest.mark.parametrize(
    ("n_heads", "slopes"),
    [
        (1, [2**-8]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
    ],
)
def test_alibi_slopes(n_heads, slopes):
    layer = tl.AlibiBias(n_heads)
    got = layer((np.array([2, 5]), np.arange(4)))
    distance = np.array([[2, 1, 0, 1], [5, 4, 3, 2]])
    np.testing.assert_allclose(got, -np.array(slopes)[:, None, None] * distance)


def test_biases_reach_attention():
    x, mask = normal(1, 4, 4), np.ones((1, 1, 1, 4))
    layer = tl.Attention(4, 2, position_bias=tl.AlibiBias(2), mode="viz")
    layer.init((x, mask), rng=KEY)
    weights = jax.tree.map(jnp.zeros_like, layer.weights)  # All scores are the bias.
    _, state = layer.pure_fn((x, mask), weights, layer.state, None)
    layer.state = state
    (shown,) = tl.attention_weights(layer).values()
    for h, slope in enumerate([2**-4, 2**-8]):
        exps = np.exp(-slope * np.abs(np.arange(4)[:, None] - np.arange(4)))
        expected = exps / exps.sum(-1, keepdims=True)
        np.testing.assert_allclose(shown[0, h], expected, rtol=1e-5)


def test_bad_biases():
    with pytest.raises(ValueError, match="n_buckets=2, max_distance=128"):
        tl.RelativePositionBias(2, n_buckets=2, bidirectional=True)
    with pytest.raises(ValueError, match="max_distance=3"):
        tl.RelativePositionBias(2, n_buckets=8, max_distance=3)
    with pytest.raises(ValueError, match="at least 1 head, got 0"):
        tl.AlibiBias(0)

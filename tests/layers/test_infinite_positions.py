"""Unbounded positions against formulas in float64, and their statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax.errors import LayerError
from retrax.shapes import ShapeDtype

KEY = jax.random.key(8)


@pytest.fixture(scope="module", autouse=True)
def _compile_fast():
    """Most of the time here goes into compiling."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def adder(layer, length, d):
    """A function from a key to what the layer adds to zeros, (length, d) float64."""
    x = np.zeros((1, length, d), np.float32)

    @jax.jit
    def run(key):
        weights, state = layer.init(x, rng=KEY)
        return layer.pure_fn(x, weights, state, key)[0][0]

    return lambda seed: np.asarray(run(jax.random.key(seed)), np.float64)


def cosines(layer, length, d):
    return adder(layer, length, d)(0)


def frequencies(drift, d):
    n = (d + 1) // 2
    if d > 2:
        drift = drift ** (n / (d // 2))
    return np.geomspace(0.5, 0.5 * drift**2, n)


def cycles_of(waves):
    """The phase of each wave in cycles, from its two features."""
    # Feature 2i + 1 is a quarter cycle ahead: cos(a + pi / 2) = -sin(a).
    return np.arctan2(-waves[:, 1::2], waves[:, 0::2]) / (2 * np.pi)


def wrapped(cycles):
    return (cycles + 0.5) % 1 - 0.5


def still(**kwargs):
    """An encoding of waves alone, nearly without a walk, none at a fine drift."""
    return tl.InfinitePositionalEncoding(
        affine=False, transform="none", mode="eval", **kwargs
    )


@pytest.mark.parametrize("d", [2, 6, 8])
def test_waves_turn_at_their_frequencies(d):
    drift, n = 0.05, 300
    waves = cosines(still(drift=drift), n, d)
    np.testing.assert_allclose(waves[:, 0::2] ** 2 + waves[:, 1::2] ** 2, 1, atol=1e-4)
    turned = np.diff(cycles_of(waves), axis=0) - frequencies(drift, d)
    walk = 4 * wrapped(turned)  # What is left are the steps of the walk.
    limit = np.sqrt(3 * drift)
    assert np.abs(walk).max() < limit + 1e-3 and np.abs(walk).max() > 0.9 * limit
    np.testing.assert_allclose(np.mean(walk**2), drift, rtol=0.15)
    assert abs(np.mean(walk)) < 4 * np.sqrt(drift / walk.size)
    neighbours = np.mean(walk[1:] * walk[:-1]) / drift
    assert abs(neighbours) < 4 / np.sqrt(walk.size)


def test_late_positions_keep_their_phase():
    """A hundred thousand positions on, in float32, without a walk to speak of."""
    d, drift, start = 6, 1e-9, 100_000
    layer = tl.InfinitePositionalEncoding(
        drift=drift, affine=False, transform="none", mode="predict"
    )
    x = np.zeros((1, 8, d), np.float32)
    _, (_, walk) = layer.init(x, rng=KEY)
    y, _ = layer.pure_fn(x, (), (jnp.int32(start), walk), None)
    t = np.arange(start, start + 8)[:, None]
    expected = np.cos(2 * np.pi * (t * frequencies(drift, d) % 1))
    np.testing.assert_allclose(y[0, :, 0::2], expected, atol=2e-3)


def test_an_odd_number_of_features():
    seven, drift = cosines(still(drift=0.05), 50, 7), 0.05
    turned = np.diff(cycles_of(seven[:, :6]), axis=0) - frequencies(drift, 7)[:3]
    assert np.abs(4 * wrapped(turned)).max() < np.sqrt(3 * drift) + 1e-3
    assert np.ptp(seven[:, 6]) > 0.01


def test_phases_are_random_in_training_only():
    def of(mode):
        return adder(tl.InfinitePositionalEncoding(transform="none", mode=mode), 4, 6)

    train, evaluate, plain = of("train"), of("eval"), cosines(still(), 4, 6)
    assert np.abs(train(0) - train(1)).max() > 0.1
    np.testing.assert_array_equal(train(1), train(1))
    np.testing.assert_array_equal(evaluate(0), evaluate(1))
    assert np.abs(evaluate(0) - plain).max() > 0.1


def test_a_feature_has_one_phase_at_all_positions():
    waves = adder(tl.InfinitePositionalEncoding(drift=1e-9, transform="none"), 5, 2)
    for seed in range(3):
        wave = waves(seed)[:, 0]  # Of half a cycle per position.
        np.testing.assert_allclose(wave[::2], wave[0], atol=1e-3)
        np.testing.assert_allclose(wave[1::2], -wave[0], atol=1e-3)


@pytest.mark.parametrize("transform", ["any", "diag"])
def test_maps(transform):
    x, plain = np.zeros((1, 5, 6), np.float32), cosines(still(), 5, 6)
    layer = tl.InfinitePositionalEncoding(
        affine=False, transform=transform, mode="eval"
    )

    @jax.jit
    def run(key):
        weights, _ = layer.init(x, rng=key)
        return weights, layer.pure_fn(x, weights, (), None)[0][0]

    w, y = run(KEY)
    w = np.asarray(w, np.float64)
    if transform == "any":
        np.testing.assert_allclose(w @ w.T, np.eye(6), atol=1e-5)
        expected = plain @ w
    else:
        expected = plain * np.log1p(np.exp(w))
    np.testing.assert_allclose(y, expected, atol=1e-5)


def bins(t, length):
    return [1 / (1 + t // length), t % length / length, t // length % 2]


def test_time_bins():
    expected = [bins(t, 3) for t in range(8)]
    x = np.random.default_rng(0).normal(size=(2, 8, 5)).astype(np.float32)
    layer = tl.TimeBinPositionalEncoding(3)
    layer.init(x)
    y = layer(x)
    np.testing.assert_array_equal(y[..., :2], x[..., :2])
    for row in y:
        np.testing.assert_allclose(row[:, 2:], expected, rtol=1e-6)
    both = cosines(still(time_bin_length=3), 8, 5)
    np.testing.assert_allclose(both[:, 2:], expected, rtol=1e-6)
    np.testing.assert_allclose(both[:, :2], cosines(still(), 8, 5)[:, :2], atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda mode: tl.InfinitePositionalEncoding(mode=mode),
        lambda mode: tl.InfinitePositionalEncoding(
            drift=0.5, transform="diag", time_bin_length=4, mode=mode
        ),
        lambda mode: tl.TimeBinPositionalEncoding(4, mode=mode),
    ],
)
def test_predict_goes_on_as_eval_does(make):
    x = np.random.default_rng(1).normal(size=(2, 12, 7)).astype(np.float32)
    whole, predict = make("eval"), make("predict")

    @jax.jit
    def start(key):
        weights, state = whole.init(x, rng=key)
        own = predict.init(ShapeDtype((2, 1, 7)), rng=key)[1]
        return weights, own, whole.pure_fn(x, weights, state, None)[0]

    weights, state, expected = start(KEY)
    run = jax.jit(predict.pure_fn)
    for _ in range(2):
        ys = []
        for part in (x[:, :5], *(x[:, i : i + 1] for i in range(5, 12))):
            y, state = run(part, weights, state, None)
            ys.append(y)
        np.testing.assert_allclose(np.concatenate(ys, 1), expected, atol=1e-4)
        state = tl.initial_state(predict, state)


def test_mistakes():
    with pytest.raises(ValueError, match="transform must be one of .*'all'"):
        tl.InfinitePositionalEncoding(transform="all")
    with pytest.raises(ValueError, match=r"drift must be in \(0, 1\], got 2"):
        tl.InfinitePositionalEncoding(drift=2)
    with pytest.raises(ValueError, match="time_bin_length of at least 1 .*got 0"):
        tl.TimeBinPositionalEncoding(0)
    with pytest.raises(LayerError, match=r"d_feature of at least 3, got \(1, 4, 2\)"):
        tl.TimeBinPositionalEncoding(2).init(ShapeDtype((1, 4, 2)))
    layer = tl.InfinitePositionalEncoding(transform="none")
    x = jax.ShapeDtypeStruct((1, 2, 4), np.float32)
    with pytest.raises(LayerError, match="needs a random key in mode 'train'"):
        jax.eval_shape(lambda x: layer.pure_fn(x, (), (), None), x)

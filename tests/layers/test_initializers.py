"""Initial weights: their variances against the formulas, with fixed keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl

KEY = jax.random.key(7)

# Name, variance as a function of (fan_in, fan_out), and whether values are uniform.
FAN_CASES = [
    (tl.GlorotNormalInitializer(), lambda i, o: 2 / (i + o), False),
    (tl.GlorotUniformInitializer(), lambda i, o: 2 / (i + o), True),
    (tl.GlorotUniformInitializer(scale=3.0), lambda i, o: 6 / (i + o), True),
    (tl.LeCunNormalInitializer(), lambda i, o: 1 / i, False),
    (tl.LeCunUniformInitializer(), lambda i, o: 1 / i, True),
    (tl.KaimingNormalInitializer(), lambda i, o: 2 / i, False),
    (tl.KaimingUniformInitializer(), lambda i, o: 2 / i, True),
    (tl.KaimingUniformInitializer(param=1.0), lambda i, o: 2**0.5 / i, True),
    (
        tl.ScaledInitializer(-1, -2, 2.0, "fan_out", "normal"),
        lambda i, o: 2 / o,
        False,
    ),
    (
        tl.ScaledInitializer(-1, -2, 1.0, "fan_in", "truncated_normal"),
        lambda i, o: 1 / i,
        False,
    ),
]


def check_variance(w, variance, is_uniform):
    n = w.size
    # The variance of n samples deviates by sqrt((kurtosis - 1) / n), kurtosis <= 3.
    tolerance = 5 * np.sqrt(2 / n)
    assert np.var(w) == pytest.approx(variance, rel=tolerance)
    assert abs(np.mean(w)) < 5 * np.sqrt(variance / n)
    if is_uniform:
        limit = np.sqrt(3 * variance)
        assert 0.999 * limit < np.max(np.abs(w)) <= limit * (1 + 1e-6)
    else:
        assert np.max(np.abs(w)) > 1.1 * np.sqrt(3 * variance)


@pytest.mark.parametrize("case", FAN_CASES)
def test_matrices_have_the_variance_of_their_fans(case):
    init, variance, is_uniform = case
    w = np.asarray(init((300, 100), KEY), np.float64)
    assert w.shape == (300, 100)
    check_variance(w, variance(300, 100), is_uniform)


@pytest.mark.parametrize("case", FAN_CASES)
def test_fans_of_convolutions_include_the_kernel_area(case):
    init, variance, is_uniform = case
    w = np.asarray(init((3, 5, 40, 20), KEY), np.float64)
    check_variance(w, variance(15 * 40, 15 * 20), is_uniform)


@pytest.mark.parametrize(
    "make, variance",
    [
        (tl.GlorotNormalInitializer, 2 / 60),
        (tl.GlorotUniformInitializer, 2 / 60),
        (tl.LeCunNormalInitializer, 1 / 40),
        (tl.LeCunUniformInitializer, 1 / 40),
        (tl.KaimingNormalInitializer, 2 / 40),
        (tl.KaimingUniformInitializer, 2 / 40),
    ],
)
def test_traxs_fans_without_the_area_are_an_option(make, variance):
    w = np.asarray(make(receptive_field=False)((3, 5, 40, 20), KEY), np.float64)
    check_variance(w, variance, "Uniform" in make.__name__)


def test_axes_that_are_named_nonreceptive_do_not_count():
    init = tl.LeCunUniformInitializer()
    w = np.asarray(init((30, 3, 40, 20), KEY, nonreceptive_dims=0), np.float64)
    check_variance(w, 1 / 120, True)
    w = np.asarray(init((30, 3, 40, 20), KEY, nonreceptive_dims=[0, 1]), np.float64)
    check_variance(w, 1 / 40, True)


def test_axes_of_features_can_be_given():
    init = tl.LeCunUniformInitializer(out_dim=0, in_dim=1)
    check_variance(np.asarray(init((50, 200), KEY), np.float64), 1 / 200, True)


def test_vectors_take_their_size_as_fan():
    w = np.asarray(tl.LeCunUniformInitializer()((10_000,), KEY), np.float64)
    check_variance(w, 1 / 10_000, True)
    assert tl.GlorotUniformInitializer()((), KEY).shape == ()


def test_truncated_values_stay_within_two_deviations():
    init = tl.ScaledInitializer(-1, -2, 1.0, "fan_in", "truncated_normal")
    w = np.asarray(init((100, 300), KEY))
    # 2 / 0.8796 deviations, after the variance is restored.
    assert np.max(np.abs(w)) <= 2 / 0.87962566 * 0.1 * (1 + 1e-6)


@pytest.mark.parametrize(
    "args, text",
    [
        ((-1, -2, 0.0, "fan_in", "normal"), "positive"),
        ((-1, -2, 1.0, "fan", "normal"), "got 'fan'"),
        ((-1, -2, 1.0, "fan_in", "gauss"), "got 'gauss'"),
    ],
)
def test_scaled_initializer_refuses_what_it_does_not_know(args, text):
    with pytest.raises(ValueError, match=text):
        tl.ScaledInitializer(*args)


def test_fans_need_two_axes():
    with pytest.raises(ValueError, match="the same axis"):
        tl.GlorotNormalInitializer(out_dim=-1, in_dim=1)((3, 4), KEY)


def test_random_normal_and_uniform_have_the_scale_given():
    w = np.asarray(tl.RandomNormalInitializer(0.5)((100, 200), KEY), np.float64)
    check_variance(w, 0.25, False)
    w = np.asarray(tl.RandomUniformInitializer(2.0)((100, 200), KEY), np.float64)
    check_variance(w, 4 / 3, True)


@pytest.mark.parametrize("shape", [(20, 8), (8, 20), (4, 5, 8), (2, 2, 8)])
def test_orthogonal_matrices_are_orthogonal(shape):
    w = np.asarray(tl.OrthogonalInitializer(3.0)(shape, KEY), np.float64)
    assert w.shape == shape
    w = w.reshape(-1, shape[-1]) / 3.0
    product = w.T @ w if w.shape[0] >= w.shape[1] else w @ w.T
    np.testing.assert_allclose(product, np.eye(len(product)), atol=1e-5)


def test_orthogonal_matrices_have_no_preferred_sign():
    keys = jax.random.split(KEY, 200)
    first = [tl.OrthogonalInitializer()((2, 2), k)[0, 0] for k in keys]
    # QR alone gives a diagonal of one sign; 200 coins fall within 5 deviations.
    assert abs(np.sum(np.asarray(first) > 0) - 100) < 36


def test_orthogonal_refuses_vectors():
    with pytest.raises(ValueError, match=r"two axes, got \(3,\)"):
        tl.OrthogonalInitializer()((3,), KEY)


def test_atari_kernels_are_bounded_by_their_fan():
    w = np.asarray(tl.AtariConvInit((8, 8, 4, 32), KEY), np.float64)
    check_variance(w, 1 / (3 * 256), True)
    assert tl.AtariConvInit((2, 2, 1, 1), KEY, jnp.float16).dtype == jnp.float16
    with pytest.raises(ValueError, match="height, width"):
        tl.AtariConvInit((3, 4), KEY)


def test_values_depend_on_the_key_only():
    init = tl.GlorotUniformInitializer()
    np.testing.assert_array_equal(init((3, 4), KEY), init((3, 4), KEY))
    assert (init((3, 4), KEY) != init((3, 4), jax.random.key(8))).any()


def test_initializer_from_file_loads_the_array(tmp_path):
    path = str(tmp_path / "w.npy")
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.save(path, array)
    np.testing.assert_array_equal(tl.InitializerFromFile(path)((2, 3), KEY), array)
    layer = tl.Embedding(2, 3, kernel_initializer=tl.InitializerFromFile(path))
    weights, _ = layer.init(np.zeros(1, np.int32))
    np.testing.assert_array_equal(weights, array)


def test_initializer_from_file_refuses_other_shapes_and_pickles(tmp_path):
    path = str(tmp_path / "w.npy")
    np.save(path, np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"\(2, 3\) but the layer needs \(3, 2\)"):
        tl.InitializerFromFile(path)((3, 2), KEY)
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        tl.InitializerFromFile(path)((1,), KEY)

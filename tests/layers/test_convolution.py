"""Convolutions against loops written out in NumPy, and against lax."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax.errors import LayerError
from retrax.layers import causal_convolution, convolution, deconvolution
from retrax.shapes import ShapeDtype, signature

KEY = jax.random.key(3)
NORMAL = tl.RandomNormalInitializer(1.0)
NCHW = ("NCHW", "OIHW", "NCHW")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def make(layer, x):
    layer.init(signature(x), rng=KEY)
    return layer


def close(got, wanted):
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


# --- The oracles --------------------------------------------------------------------


def convolve(x, w, b, strides, pads, dilation, groups=1):
    """One output at a time. x: (batch, sizes..., d_in), w: (sizes..., d_in/g, n)."""
    n = len(strides)
    x = np.pad(x.astype(np.float64), [(0, 0), *pads, (0, 0)])
    group_in, group_out = w.shape[-2], w.shape[-1] // groups
    sizes = [
        (x.shape[1 + i] - ((w.shape[i] - 1) * dilation[i] + 1)) // strides[i] + 1
        for i in range(n)
    ]
    y = np.zeros((x.shape[0], *sizes, w.shape[-1]))
    for place in itertools.product(*map(range, sizes)):
        for item in itertools.product(*map(range, w.shape[:n])):
            at = [place[i] * strides[i] + item[i] * dilation[i] for i in range(n)]
            seen = x[(slice(None), *at)]
            for g in range(groups):
                ins = slice(g * group_in, (g + 1) * group_in)
                outs = slice(g * group_out, (g + 1) * group_out)
                y[(slice(None), *place, outs)] += seen[:, ins] @ w[item][:, outs]
    return y + b


def same_pads(size, window, stride):
    """Outputs of size ceil(size / stride); an odd zero goes behind."""
    total = max((-(-size // stride) - 1) * stride + window - size, 0)
    return total // 2, total - total // 2


def scatter(x, w, b, strides, dilation):
    """Adds each input, times the kernel, to a canvas; one axis after another."""
    n = len(strides)
    windows = [(w.shape[i] - 1) * dilation[i] + 1 for i in range(n)]
    sizes = [
        x.shape[1 + i] * strides[i] + max(windows[i] - strides[i], 0) for i in range(n)
    ]
    y = np.zeros((x.shape[0], *sizes, w.shape[-1]))
    for place in itertools.product(*map(range, x.shape[1:-1])):
        for item in itertools.product(*map(range, w.shape[:n])):
            at = [
                place[i] * strides[i] + (windows[i] - 1) - item[i] * dilation[i]
                for i in range(n)
            ]
            y[(slice(None), *at)] += x[(slice(None), *place)] @ w[item]
    return y + b


# --- Conv ---------------------------------------------------------------------------


@pytest.mark.parametrize("size, kernel, strides, dilation, groups, pads", [
    ((5, 6), (3, 3), (1, 1), (1, 1), 1, "VALID"),
    ((5, 6), (3, 2), (2, 1), (1, 1), 1, "SAME"),
    ((7, 6), (2, 3), (1, 2), (3, 2), 1, "VALID"),
    ((7, 6), (2, 3), (2, 3), (1, 2), 2, "SAME"),
    ((4, 5), (3, 3), (1, 1), (1, 1), 4, ((0, 2), (1, 0))),
    ((4, 3, 3), (2, 2, 3), (1, 2, 1), (2, 1, 1), 2, "SAME"),
])  # fmt: skip
def test_conv_is_the_loop(size, kernel, strides, dilation, groups, pads):
    x = normal(2, *size, 4)
    spatial = "HWD"[: len(size)]
    numbers = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
    layer = convolution.Conv(
        8,
        kernel,
        strides,
        pads,
        dimension_numbers=numbers,
        kernel_initializer=NORMAL,
        bias_initializer=NORMAL,
        rhs_dilation=dilation,
        groups=groups,
    )
    make(layer, x)
    w, b = (np.asarray(a, np.float64) for a in layer.weights)
    assert w.shape == (*kernel, 4 // groups, 8) and b.shape == (8,)
    windows = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    if pads == "SAME":
        pads = [same_pads(*each) for each in zip(size, windows, strides, strict=True)]
    elif pads == "VALID":
        pads = [(0, 0)] * len(size)
    close(layer(x), convolve(x, w, b, strides, pads, dilation, groups))


def test_conv_takes_other_orders_of_axes():
    x = normal(2, 5, 6, 4)
    layer = make(
        convolution.Conv(
            3, (3, 2), 2, "SAME", NCHW, bias_initializer=NORMAL, rhs_dilation=(1, 2)
        ),
        x.transpose(0, 3, 1, 2),
    )
    w, b = layer.weights
    assert w.shape == (3, 4, 3, 2) and b.shape == (3, 1, 1)
    wanted = jax.lax.conv_general_dilated(
        x,
        w.transpose(2, 3, 1, 0),
        (2, 2),
        "SAME",
        rhs_dilation=(1, 2),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    ) + np.reshape(b, 3)
    close(layer(x.transpose(0, 3, 1, 2)), np.asarray(wanted).transpose(0, 3, 1, 2))


def test_sizes_go_in_the_order_of_the_kernel():
    x = normal(2, 7, 6, 4)
    wanted = make(convolution.Conv(3, (3, 1), (2, 1)), x)(x)
    turned = ("NWHC", "HWIO", "NWHC")
    layer = make(convolution.Conv(3, (3, 1), (2, 1), "VALID", turned), x)
    got = layer(x.transpose(0, 2, 1, 3))
    close(got, np.asarray(wanted).transpose(0, 2, 1, 3))


def test_conv_without_bias_holds_the_bare_kernel():
    x = normal(2, 5, 6, 4)
    layer = make(convolution.Conv(3, 1, use_bias=False), x)
    assert layer.weights.shape == (1, 1, 4, 3)
    close(layer(x), x @ np.asarray(layer.weights)[0, 0])


def test_further_leading_axes_are_batch():
    x = normal(2, 3, 5, 6, 4)
    layer = make(convolution.Conv(3, 2, bias_initializer=NORMAL), x)
    assert layer.weights[0].shape == (2, 2, 4, 3)
    got = layer(x)
    assert got.shape == (2, 3, 4, 5, 3)
    for i in range(2):
        close(got[i], layer(x[i]))


@pytest.mark.parametrize("stride, dilation, groups", [(1, 1, 1), (2, 1, 2), (1, 2, 4)])
def test_conv1d_is_the_loop(stride, dilation, groups):
    x = normal(2, 9, 4)
    layer = convolution.Conv1d(
        8, 3, stride, bias_initializer=NORMAL, rhs_dilation=dilation, groups=groups
    )
    w, b = (np.asarray(a, np.float64) for a in make(layer, x).weights)
    close(layer(x), convolve(x, w, b, [stride], [(0, 0)], [dilation], groups))


@pytest.mark.parametrize("multiplier", [1, 3])
def test_depthwise_conv_is_one_convolution_for_each_channel(multiplier):
    x = normal(2, 6, 5, 4)
    layer = make(
        convolution.DepthwiseConv(
            (3, 2), multiplier, (2, 1), "SAME", bias_initializer=NORMAL
        ),
        x,
    )
    w, b = (np.asarray(a, np.float64) for a in layer.weights)
    assert w.shape == (3, 2, 1, 4 * multiplier)
    pads = [same_pads(6, 3, 2), same_pads(5, 2, 1)]
    parts = []
    for c in range(4):
        own = slice(c * multiplier, (c + 1) * multiplier)
        one = x[..., c : c + 1], w[..., own], b[own]
        parts.append(convolve(*one, (2, 1), pads, (1, 1)))
    close(layer(x), np.concatenate(parts, axis=-1))


@pytest.mark.parametrize("x_dtype", [jnp.bfloat16, jnp.float32, jnp.int32])
@pytest.mark.parametrize("w_dtype", [jnp.bfloat16, jnp.float32])
def test_dtypes_promote_as_in_dense(x_dtype, w_dtype):
    x = jnp.asarray(10 * normal(2, 5, 4), x_dtype)
    layer = make(convolution.Conv1d(3, 2), np.asarray(x, np.float32))
    exact = layer(x.astype(jnp.float32))
    layer.weights = jax.tree.map(lambda w: w.astype(w_dtype), layer.weights)
    y = layer(x)
    assert y.dtype == jnp.promote_types(x_dtype, w_dtype)
    np.testing.assert_allclose(np.asarray(y, np.float32), exact, rtol=0.05, atol=0.3)


# --- Initial weights ----------------------------------------------------------------


def test_initial_kernels_have_the_variance_of_their_fans():
    def variance(layer, d_in):
        w, _ = layer.init(ShapeDtype((1, 9, 9, d_in)), rng=KEY)[0]
        return np.var(np.asarray(w))

    plain = variance(convolution.Conv(64, (5, 5)), 32)
    np.testing.assert_allclose(plain, 2 / (25 * (32 + 64)), rtol=0.05)
    # Each of 4 groups has 8 inputs and 16 outputs.
    grouped = variance(convolution.Conv(64, (5, 5), groups=4), 32)
    np.testing.assert_allclose(grouped, 2 / (25 * (8 + 16)), rtol=0.05)
    depthwise = variance(convolution.DepthwiseConv((5, 5)), 500)
    np.testing.assert_allclose(depthwise, 2 / (25 * 2), rtol=0.05)
    as_trax = tl.GlorotNormalInitializer(receptive_field=False)
    trax = variance(convolution.Conv(64, (5, 5), kernel_initializer=as_trax), 32)
    np.testing.assert_allclose(trax, 2 / (32 + 64), rtol=0.05)
    turned = convolution.Conv(64, (5, 5), dimension_numbers=NCHW)
    w, b = turned.init(ShapeDtype((1, 32, 9, 9)), rng=KEY)[0]
    np.testing.assert_allclose(np.var(w), 2 / (25 * (32 + 64)), rtol=0.05)
    assert 0 < np.max(np.abs(b)) < 1e-5
    causal = causal_convolution.CausalDepthwiseConv(4)
    w = causal.init(ShapeDtype((1, 9, 900)), rng=KEY)[0]
    np.testing.assert_allclose(np.var(w), 1 / 4, rtol=0.05)


# --- ConvTranspose ------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("dilation", [1, 2])
def test_conv_transpose_scatters(kernel, stride, dilation):
    x = normal(2, 4, 3, 5)
    layer = deconvolution.ConvTranspose(
        3, (kernel, 2), (stride, 1), rhs_dilation=(dilation, 1), bias_initializer=NORMAL
    )
    w, b = (np.asarray(a, np.float64) for a in make(layer, x).weights)
    assert w.shape == (kernel, 2, 5, 3)
    close(layer(x), scatter(x, w, b, (stride, 1), (dilation, 1)))


@pytest.mark.parametrize("kernel, stride", [(3, 2), (4, 2), (1, 3), (5, 1)])
def test_conv_transpose_same_is_the_middle_of_valid(kernel, stride):
    x = normal(2, 4, 5)
    numbers = ("NWC", "WIO", "NWC")
    layer = deconvolution.ConvTranspose(
        3, kernel, stride, "SAME", dimension_numbers=numbers, bias_initializer=NORMAL
    )
    w, b = (np.asarray(a, np.float64) for a in make(layer, x).weights)
    y = scatter(x, w, b, (stride,), (1,))
    # The convention of jax.lax: the zeros around the spread inputs are cut evenly.
    cut = 0 if stride > kernel - 1 else kernel - 1 - -(-(kernel + stride - 2) // 2)
    close(layer(x), y[:, cut : cut + 4 * stride])


# --- Causal -------------------------------------------------------------------------


def causal_depthwise(kernel, mode="train"):
    return causal_convolution.CausalDepthwiseConv(kernel, mode=mode)


def causal(kernel, mode="train", dilation=1):
    return causal_convolution.CausalConv(
        3, kernel, bias_initializer=NORMAL, rhs_dilation=dilation, mode=mode
    )


@pytest.mark.parametrize("kernel, dilation", [(1, 1), (3, 1), (3, 2), (9, 1)])
def test_causal_conv_is_the_loop(kernel, dilation):
    x = normal(2, 6, 4)
    layer = make(causal(kernel, dilation=dilation), x)
    w, b = (np.asarray(a, np.float64) for a in layer.weights)
    wanted = np.zeros((2, 6, 3)) + b
    for t in range(6):
        for i in range(kernel):
            past = t - (kernel - 1 - i) * dilation
            if past >= 0:
                wanted[:, t] += x[:, past] @ w[i]
    close(layer(x), wanted)


@pytest.mark.parametrize("kernel", [1, 3, 9])
def test_causal_depthwise_conv_is_the_loop(kernel):
    x = normal(2, 6, 4)
    layer = make(causal_depthwise(kernel), x)
    w = np.asarray(layer.weights, np.float64)
    assert w.shape == (kernel, 4)
    wanted = np.zeros((2, 6, 4))
    for t in range(6):
        for i in range(min(kernel, t + 1)):
            wanted[:, t] += x[:, t - i] * w[i]
    close(layer(x), wanted)


CAUSAL = {
    "conv": causal,
    "dilated": lambda kernel, mode="train": causal(kernel, mode, dilation=2),
    "depthwise": causal_depthwise,
    "repeat": lambda kernel, mode="train": tl.Repeat(
        lambda: [causal_depthwise(kernel, mode), tl.Tanh()], 2
    ),
}


@pytest.mark.parametrize("kind", CAUSAL)
@pytest.mark.parametrize("kernel", [1, 3])
def test_predict_mode_gives_what_eval_mode_gives(kind, kernel):
    x = normal(2, 7, 3)
    whole = make(CAUSAL[kind](kernel, "eval"), x)
    model = CAUSAL[kind](kernel, "predict")
    _, state = model.init(ShapeDtype((2, 1, 3)))
    model.weights = whole.weights
    run = jax.jit(model.pure_fn)

    def in_parts(state):
        ys = []
        for a, b in [(0, 4), (4, 5), (5, 6), (6, 7)]:
            y, state = run(x[:, a:b], model.weights, state, None)
            ys.append(y)
        return np.concatenate(ys, axis=1), state

    got, used = in_parts(state)
    close(got, np.asarray(whole(x)))
    again, _ = in_parts(used)
    assert (np.max(np.abs(again - got)) > 1e-3) == (kernel > 1)
    model.state = used
    model.reset_state()
    np.testing.assert_array_equal(in_parts(model.state)[0], got)


def test_bfloat16_depthwise_weights():
    layer = causal_convolution.CausalDepthwiseConv(use_bfloat16=True)
    assert make(layer, normal(2, 5, 3)).weights.dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", [causal, causal_depthwise])
def test_predict_mode_keeps_half_precision(kind):
    layer = make(kind(3, "predict"), normal(2, 1, 4))
    x = normal(2, 3, 4).astype(jnp.bfloat16)
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), layer.weights)
    y, state = layer.pure_fn(x, weights, layer.state, None)
    assert (y.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)


# --- Errors -------------------------------------------------------------------------


def fails(layer, shape, match):
    with pytest.raises(LayerError, match=match):
        layer.init(ShapeDtype(shape))


def test_bad_input_is_named():
    conv, conv1d = convolution.Conv, convolution.Conv1d
    fails(conv(8, 3, groups=3), (1, 5, 5, 4), "groups=3 .* 4 channels and 8 filters")
    fails(conv(9, 3, groups=2), (1, 5, 5, 4), "groups=2 .* 4 channels and 9 filters")
    fails(conv(8, 3), (5, 5, 4), r"4 axes, NHWC, got the shape \(5, 5, 4\)")
    nchw = conv(8, 3, dimension_numbers=("HWCN", "HWIO", "HWCN"))
    fails(nchw, (2, 5, 5, 4, 3), r"4 axes, HWCN, .* \(2, 5, 5, 4, 3\)")
    fails(conv1d(8, 3, rhs_dilation=3), (1, 6, 4), "window of 7 .* size 6 .* axis W")
    fails(conv1d(8, 6, padding=[(1, 1)]), (1, 3, 4), r"window of 6 .* 3 .* \(1, 1\)")
    fails(causal(3), (2, 3, 4, 5), r"\(batch, length, d_in\).*\(2, 3, 4, 5\)")
    fails(causal_depthwise(3), (3, 4), r"\(batch, length, d_in\).*\(3, 4\)")
    for kind in causal, causal_depthwise:
        model = make(kind(3, "predict"), normal(2, 1, 4))
        with pytest.raises(LayerError, match="batches of 2 with 4 channels, got 5"):
            model(normal(5, 1, 4))


def test_bad_arguments_are_named():
    conv = convolution.Conv
    with pytest.raises(ValueError, match=r"kernel_size .* 2 spatial axes .* \(3,\)"):
        conv(8, (3,))
    with pytest.raises(ValueError, match=r"strides .* got \(0, 1\)"):
        conv(8, 3, strides=(0, 1))
    with pytest.raises(ValueError, match="rhs_dilation .* got 0"):
        conv(8, 3, rhs_dilation=0)
    with pytest.raises(ValueError, match="got 0 and 1"):
        conv(0, 3)
    with pytest.raises(ValueError, match="padding must be .* got 'FULL'"):
        conv(8, 3, padding="FULL")
    with pytest.raises(ValueError, match=r"padding must be .* got \(\(1, 1\),\)"):
        conv(8, 3, padding=((1, 1),))
    with pytest.raises(ValueError, match="kernel_size >= 1, got 0"):
        causal_depthwise(0)
    for numbers in [("NHC", "HWIO", "NHWC"), ("NHWC", "HWIO", "NHWO")]:
        with pytest.raises(ValueError, match="need the letters"):
            conv(8, 3, dimension_numbers=numbers)

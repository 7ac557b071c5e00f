"""Attention as a function of arrays, against a loop in NumPy's float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax.layers.attention_kernel import attention_weights_of

KEY = jax.random.key(5)


def arrays(n_kv=4, b=2, n_queries=5, n_keys=5, n_heads=4, d=3, d_value=3, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(b, n_queries, n_heads, d), (b, n_keys, n_kv, d), (b, n_keys, n_kv)]
    shapes[2] = (*shapes[2], d_value)
    return [rng.normal(size=s).astype(np.float32) for s in shapes]


def by_loops(q, k, v, mask=None, causal=False, start=0, bias=None):
    """Returns (y, weights), one query of one head of one example at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (b, n_queries, n_heads, d), n_keys = q.shape, k.shape[1]
    group = n_heads // k.shape[2]
    if mask is not None:
        mask = np.broadcast_to(np.asarray(mask) != 0, (b, n_heads, n_queries, n_keys))
    y = np.zeros((b, n_queries, n_heads, v.shape[3]))
    weights = np.zeros((b, n_heads, n_queries, n_keys))
    for i, t, h in np.ndindex(b, n_queries, n_heads):
        seen = [
            s
            for s in range(n_keys)
            if (mask is None or mask[i, h, t, s]) and (not causal or s <= start + t)
        ]
        scores = [
            q[i, t, h] @ k[i, s, h // group] / np.sqrt(d)
            + (0 if bias is None else bias[h, t, s])
            for s in seen
        ]
        exps = np.exp(scores - np.max(scores)) if seen else []
        for s, e in zip(seen, exps, strict=True):
            weights[i, h, t, s] = e / np.sum(exps)
            y[i, t, h] += weights[i, h, t, s] * v[i, s, h // group]
    return y, weights


def some_mask(*shape):
    mask = np.random.default_rng(7).uniform(size=shape) < 0.6
    mask[..., 0] = True
    return mask


CASES = {
    "plain": dict(),
    "causal": dict(causal=True),
    "later": dict(causal=True, start=2),
    "keys": dict(mask=some_mask(2, 1, 1, 5)),
    "all": dict(mask=some_mask(2, 4, 5, 5)),
    "heads": dict(mask=some_mask(4, 1, 5)),
    "matrix": dict(mask=some_mask(5, 5).astype(np.int32), causal=True),
    "floats": dict(mask=some_mask(1, 1, 1, 5).astype(np.float32)),
    "scalar": dict(mask=np.array(True)),
    "bias": dict(bias=np.random.default_rng(3).normal(size=(4, 5, 5)), causal=True),
}


def bias_fn(bias):
    if bias is None:
        return None
    return lambda q, k: jnp.asarray(bias, jnp.float32)[:, q[:, None], k[None, :]]


@pytest.mark.parametrize(("chunk", "n_kv"), [(None, 4), (None, 1), (2, 2)])
@pytest.mark.parametrize("case", CASES)
def test_is_a_loop(case, chunk, n_kv):
    q, k, v = arrays(n_kv)
    given = dict(CASES[case])
    expected, weights = by_loops(q, k, v, **given)
    given["bias_fn"] = bias_fn(given.pop("bias", None))
    got = tl.dot_product_attention(q, k, v, chunk=chunk, **given)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    got = attention_weights_of(q, k, **given)
    np.testing.assert_allclose(got, weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [None, 3])
def test_other_lengths_and_sizes_of_values(chunk):
    q, k, v = arrays(n_queries=4, n_keys=7, d_value=2)
    got = tl.dot_product_attention(q, k, v, chunk=chunk)
    np.testing.assert_allclose(got, by_loops(q, k, v)[0], rtol=1e-5, atol=1e-6)


def test_causal_is_a_full_mask():
    q, k, v = arrays()
    got = tl.dot_product_attention(q, k, v, causal=True)
    full = tl.dot_product_attention(q, k, v, np.tri(5, dtype=bool))
    np.testing.assert_allclose(got, full, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_query_that_sees_nothing_gives_zero_and_no_gradient(chunk):
    q, k, v = arrays()
    mask = np.ones((2, 1, 5, 5), bool)
    mask[1] = False
    mask[0, 0, 3] = False

    def run(q, k, v):
        return tl.dot_product_attention(q, k, v, mask, chunk=chunk)

    y = np.asarray(run(q, k, v))
    assert np.all(y[1] == 0) and np.all(y[0, 3] == 0) and np.all(y[0, 2] != 0)
    grads = jax.grad(lambda *x: jnp.sum(jnp.sin(run(*x) + 1)), argnums=(0, 1, 2))(
        q, k, v
    )
    for grad in grads:
        assert np.all(np.asarray(grad)[1] == 0) and np.all(np.isfinite(grad))
        assert np.any(np.asarray(grad)[0] != 0)
    assert np.all(np.asarray(grads[0])[0, 3] == 0)


@pytest.mark.parametrize("causal", [False, True])
def test_chunks_give_the_same_gradients(causal):
    q, k, v = arrays(n_kv=2, n_queries=7, n_keys=7)
    mask = some_mask(2, 1, 7, 7) | np.eye(7, dtype=bool)
    bias = jnp.asarray(np.random.default_rng(1).normal(size=(4, 7, 7)), jnp.float32)

    def loss(q, k, v, bias, chunk):
        def fn(a, b):
            return bias[:, a[:, None], b[None, :]]

        y = tl.dot_product_attention(
            q, k, v, mask, causal=causal, bias_fn=fn, chunk=chunk
        )
        return jnp.sum(jnp.sin(y))

    run = jax.grad(loss, argnums=(0, 1, 2, 3))
    for got, full in zip(run(q, k, v, bias, 3), run(q, k, v, bias, None), strict=True):
        np.testing.assert_allclose(got, full, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [None, 2])
def test_gradients_in_float64(chunk):
    with jax.enable_x64(True):
        q, k, v = (x.astype(np.float64) for x in arrays(n_kv=2, b=1))

        def loss(q, k, v):
            y = tl.dot_product_attention(q, k, v, causal=True, chunk=chunk)
            return jnp.sum(jnp.sin(y))

        def by_numpy(q, k, v):
            return np.sum(np.sin(by_loops(q, k, v, causal=True)[0]))

        grads = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
        given, rng = (q, k, v), np.random.default_rng(2)
        for i, grad in enumerate(grads):
            step = rng.normal(size=given[i].shape)
            moved = [
                by_numpy(*(x + s * step if j == i else x for j, x in enumerate(given)))
                for s in (1e-6, -1e-6)
            ]
            expected = (moved[0] - moved[1]) / 2e-6
            np.testing.assert_allclose(np.sum(grad * step), expected, rtol=1e-7)


def compiled(chunk):
    x = jax.ShapeDtypeStruct((1, 2048, 2, 16), jnp.float32)

    def loss(q, k, v):
        y = tl.dot_product_attention(q, k, v, causal=True, chunk=chunk)
        return jnp.sum(jnp.square(y))

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile()


def test_chunks_take_less_memory():
    full, chunked = (
        compiled(chunk).memory_analysis().temp_size_in_bytes for chunk in (None, 128)
    )
    assert full >= 2 * 2048 * 2048 * 4  # Else the comparison says nothing.
    assert chunked <= full / 4


def test_dropout_keeps_the_mean_and_drops_whole_weights():
    q, k, _ = arrays(b=1, n_heads=1, n_kv=1)
    v = np.eye(5, dtype=np.float32)[None, :, None, :]  # Values that show the weights.
    weights = by_loops(q, k, v)[1][0, 0]

    def run(key):
        return tl.dot_product_attention(q, k, v, dropout=0.4, rng=key)[0, :, 0]

    ys = np.asarray(jax.vmap(run)(jax.random.split(KEY, 4000)))
    kept = ys != 0
    expected = np.broadcast_to(weights / 0.6, ys.shape)
    np.testing.assert_allclose(ys[kept], expected[kept], rtol=1e-4)
    np.testing.assert_allclose(np.mean(kept, axis=0), 0.6, atol=0.04)


def test_dropout_differs_between_chunks():
    q, k, v = (np.ones((1, 64, 1, 2), np.float32) for _ in range(3))
    y = tl.dot_product_attention(q, k, v, dropout=0.5, rng=KEY, chunk=32)
    y = np.asarray(y)[0, :, 0, 0]
    assert np.any(y[:32] != y[32:])
    np.testing.assert_allclose(np.mean(y), 1, atol=0.1)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_bfloat16_is_near_float32(dropout):
    q, k, v = arrays(n_kv=2)
    given = dict(causal=True, dropout=dropout, rng=KEY)
    halves = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    got = tl.dot_product_attention(*halves, **given)
    assert got.dtype == jnp.bfloat16
    expected = tl.dot_product_attention(q, k, v, **given)
    np.testing.assert_allclose(got.astype(np.float32), expected, rtol=0.05, atol=0.05)


def test_large_scores_do_not_overflow():
    q, k, v = arrays()
    got = tl.dot_product_attention(1e4 * q, 1e4 * k, v, some_mask(2, 1, 1, 5))
    assert np.all(np.isfinite(got))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(mask=np.ones((2, 5))), r"pass mask\[:, None, None, :\]"),
        (dict(mask=np.ones((2, 5, 5))), r"pass mask\[:, None\]"),
        (dict(mask=np.ones((2, 1, 1, 6))), r"\(2, 1, 1, 6\).*\(2, 4, 5, 5\)"),
        (dict(mask=np.ones((1, 2, 1, 1, 5))), "does not broadcast"),
        (dict(chunk=0), "chunk must be at least 1"),
        (dict(k=np.ones((2, 5, 3, 3)), v=np.ones((2, 5, 3, 3))), "4 query heads.* 3"),
        (dict(k=np.ones((3, 5, 4, 3))), r"\(2, 5, 4, 3\) and \(3, 5, 4, 3\)"),
        (dict(v=np.ones((2, 6, 4, 3))), r"\(2, 5, 4, 3\) and \(2, 6, 4, 3\)"),
        (dict(q=np.ones((2, 5, 3))), r"queries must have shape.*\(2, 5, 3\)"),
    ],
)
def test_errors_name_the_shapes(change, text):
    given = dict(zip("qkv", arrays(), strict=True)) | change
    with pytest.raises(ValueError, match=text):
        tl.dot_product_attention(**given)

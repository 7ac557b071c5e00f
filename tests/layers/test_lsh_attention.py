"""Hashed attention against a loop in NumPy's float64, and what it promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax.errors import LayerError
from retrax.layers import lsh_kernel
from retrax.layers.lsh_attention import buckets_for
from retrax.layers.lsh_kernel import (
    Windows,
    chunked_attention,
    hash_buckets,
    keys_of_queries,
    lsh_attention,
    new_rotations,
)

KEY = jax.random.key(5)


@pytest.fixture(scope="module", autouse=True)
def _compile_fast():
    """Most of the time here goes into compiling."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


LENGTH, D = 11, 4


def seen_by_loops(buckets, windows, seen):
    """Who sees whom in any round, from sorted lists and no arithmetic of slots."""
    n_hashes, length = buckets.shape
    m, matrix = windows.chunk_len, np.zeros((length, length), bool)
    real = [i for i in range(length) if seen[i]]
    for row in buckets:
        order = sorted(real, key=lambda i: (row[i], i))
        chunk_of = {i: at // m for at, i in enumerate(order)}
        for i in real:
            same = [j for j in order if row[j] == row[i]]
            if windows.causal:
                past = [j for j in same if j <= i]
                found = past[-(m * windows.n_before + 1) :]
            else:
                near = range(-windows.n_before, windows.n_after + 1)
                found = [j for j in same if chunk_of[j] - chunk_of[i] in near]
            matrix[i, found] = True
    return matrix


def attention_by_loops(q, k, v, matrix, exclude_self):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    y = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        others = [j for j in np.flatnonzero(matrix[i]) if not (exclude_self and j == i)]
        others = others or list(np.flatnonzero(matrix[i]))
        if others:
            scores = k[others] @ q[i] / np.sqrt(q.shape[1])
            weights = np.exp(scores - scores.max())
            y[i] = weights @ v[others] / weights.sum()
    return y


def shared_keys(q):
    q = np.asarray(q, np.float64)
    return q / np.sqrt((q**2).mean(-1, keepdims=True) + 1e-6)


def buckets_by_loops(q, rotations, n_buckets):
    """One point, one round, one factor at a time, from the same rotations."""
    out = np.zeros((len(rotations), len(q)), int)
    for r, rotation in enumerate(np.asarray(rotations, np.float64)):
        for i, x in enumerate(np.asarray(q, np.float64)):
            start = 0
            for n in n_buckets:
                axes = x @ rotation[:, start : start + n // 2]
                best = int(np.argmax(np.abs(axes)))
                out[r, i] = out[r, i] * n + best + (n // 2) * (axes[best] < 0)
                start += n // 2
    return out


def points(seed=0, length=LENGTH, d=D):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(length, d)), rng.normal(size=(length, 3))


CASES = {
    "causal": (Windows(3, 1, 0, True), (4,), 3),
    "causal, far": (Windows(2, 2, 0, True), (2, 2), 2),
    "both": (Windows(3, 1, 1, False), (4,), 3),
    "before": (Windows(4, 1, 0, False), (2,), 1),
    "alone": (Windows(3, 0, 0, False), (2, 4), 2),
    "one bucket": (Windows(3, 1, 0, True), (1,), 2),
}


@pytest.mark.parametrize("case", CASES)
def test_is_a_loop(case):
    """Each point once, however many rounds find it; what is hidden takes no place."""
    windows, n_buckets, n_hashes = CASES[case]
    q, v = points()
    seen = np.arange(LENGTH) % 5 != 0  # Not position 0.
    rotations = new_rotations(KEY, n_hashes, D, n_buckets)
    buckets = np.zeros((n_hashes, LENGTH), int)
    if n_buckets != (1,):
        buckets = buckets_by_loops(q, rotations, n_buckets)
        np.testing.assert_array_equal(hash_buckets(q, rotations, n_buckets), buckets)
    matrix = seen_by_loops(buckets, windows, seen)
    expected = attention_by_loops(q, shared_keys(q), v, matrix, True)
    with jax.enable_x64(True):
        got = jax.jit(
            lambda q, v: lsh_attention(q, v, seen, rotations, n_buckets, windows)
        )(q, v)
        assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-10)
    assert np.all(np.asarray(got)[~seen] == 0) and np.any(expected)


@pytest.mark.parametrize("causal", [True, False])
def test_one_bucket_in_one_chunk_is_dense_attention(causal):
    """Against attention with all scores, values and gradients, position 0 hidden."""
    q, v = points(1)
    seen = np.arange(LENGTH) > 0
    rotations = new_rotations(KEY, 2, D, (1,))
    matrix = np.broadcast_to(seen, (LENGTH, LENGTH)) & seen[:, None]
    matrix = np.tril(matrix) if causal else matrix
    alone = matrix.sum(1) - np.diag(matrix) == 0
    matrix = np.where(np.eye(LENGTH, dtype=bool) & ~alone[:, None], False, matrix)

    def dense(q, v):
        scores = q @ (q * jax.lax.rsqrt((q**2).mean(-1, keepdims=True) + 1e-6)).T
        scores = jnp.where(matrix, scores / np.sqrt(D), -1e30)
        return jnp.where(matrix, jax.nn.softmax(scores, -1), 0) @ v

    def hashed(q, v):
        windows = Windows(16, 1, 0, causal)
        return lsh_attention(q, v, seen, rotations, (1,), windows)

    def both(f):
        return jax.jit(
            lambda q, v: (
                f(q, v),
                jax.grad(lambda *x: jnp.sin(f(*x)).sum(), (0, 1))(q, v),
            )
        )(q, v)

    with jax.enable_x64(True):
        got, expected = both(hashed), both(dense)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


def test_chunks_are_a_loop():
    q, v = points(2)
    k = points(3)[0]
    seen = np.arange(LENGTH) % 4 != 0
    at = np.arange(LENGTH)
    for windows in (Windows(3, 1, 0, True), Windows(4, 1, 1, False)):
        ago = at[:, None] // windows.chunk_len - at // windows.chunk_len
        matrix = (ago >= -windows.n_after) & (ago <= windows.n_before) & seen
        if windows.causal:
            matrix = np.tril(matrix)
        expected = attention_by_loops(q, k, v, matrix, False)
        with jax.enable_x64(True):
            f = jax.jit(lambda q, k, v, w=windows: chunked_attention(q, k, v, seen, w))
            got = f(q, k, v)
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-10)


@pytest.fixture(scope="module")
def causal_layer():
    layer = tl.LSHSelfAttention(
        2, 4, 3, causal=True, chunk_len=3, n_hashes=3, n_buckets=[2, 2], mode="eval"
    )
    x = np.random.default_rng(4).normal(size=(2, LENGTH, 5)).astype(np.float32)
    layer.weights = jax.jit(lambda key: layer.init(x, rng=key)[0])(KEY)
    return layer, x, jax.jit(lambda x, w: layer.pure_fn(x, w, (), None)[0])


def test_the_future_changes_nothing(causal_layer):
    """Not even what is seen of the past, though all points are sorted together."""
    layer, x, f = causal_layer
    y = np.asarray(f(x, layer.weights))
    for t in range(1, LENGTH):
        for seed in range(3):
            other = x.copy()
            other[:, t:] = np.random.default_rng(seed).normal(size=other[:, t:].shape)
            again = np.asarray(f(other, layer.weights))
            np.testing.assert_allclose(again[:, :t], y[:, :t], rtol=1e-5, atol=1e-6)
            assert np.any(np.abs(again[:, t:] - y[:, t:]) > 1e-3)


def test_predict_is_eval(causal_layer):
    layer, x, f = causal_layer
    predict = tl.LSHSelfAttention(
        2,
        4,
        3,
        causal=True,
        chunk_len=3,
        n_hashes=3,
        n_buckets=[2, 2],
        mode="predict",
        predict_mem_len=LENGTH,
    )
    predict.state = jax.jit(lambda key: predict.init(x[:, :1], rng=key)[1])(KEY)
    step = jax.jit(predict.pure_fn)
    state, ys, at = predict.state, [], 0
    for n in (4, *[1] * 7):
        y, state = step(x[:, at : at + n], layer.weights, state, None)
        ys.append(y)
        at += n
    expected = f(x, layer.weights)
    np.testing.assert_allclose(np.concatenate(ys, 1), expected, rtol=1e-5, atol=1e-6)
    y, state = step(x[:, :1], layer.weights, state, None)
    assert np.all(np.isnan(y))
    with pytest.raises(ValueError, match="predict_mem_len=11"):
        tl.check_state(predict, state)


def test_keys_decide_hashes_in_training_only():
    x = np.random.default_rng(0).normal(size=(1, 16, 5)).astype(np.float32)
    for mode in ("train", "eval"):
        layer = tl.LSHSelfAttention(1, 4, 4, chunk_len=4, n_buckets=8, mode=mode)
        weights = jax.jit(lambda la=layer: la.init(x, rng=KEY)[0])()
        f = jax.jit(lambda key, la=layer, w=weights: la.pure_fn(x, w, (), key)[0])
        same, once_more, other = (np.asarray(f(jax.random.key(i))) for i in (1, 1, 2))
        np.testing.assert_array_equal(same, once_more)
        if mode == "train":
            assert np.any(np.abs(same - other) > 1e-3)
            with pytest.raises(LayerError, match="needs a random key.*hash rotations"):
                layer.pure_fn(x, weights, (), None)
        else:
            np.testing.assert_array_equal(same, other)


def test_rounds_find_planted_neighbours():
    """More rounds miss fewer: 1 - (1 - p)^n, with p that of one round (section 2).

    128 pairs of near points, 5 degrees apart, among random directions, 16 buckets. The
    chance p of one bucket is estimated by 2000 rotations of its own in NumPy.
    """
    rng = np.random.default_rng(0)
    n_pairs, d, n_rounds = 128, 16, 8
    a, off = rng.normal(size=(2, n_pairs, d))
    a /= np.linalg.norm(a, axis=1, keepdims=True)
    off -= (off * a).sum(1, keepdims=True) * a
    off /= np.linalg.norm(off, axis=1, keepdims=True)
    b = np.cos(np.radians(5)) * a + np.sin(np.radians(5)) * off
    x = np.concatenate([a, b]).astype(np.float32)
    hits = []
    for _ in range(2000):
        rotation = rng.normal(size=(d, 8))
        ha, hb = (
            np.argmax(np.concatenate([y @ rotation, -y @ rotation], -1), -1)
            for y in (a[:4], b[:4])
        )
        hits.append(np.mean(ha == hb))
    p = np.mean(hits)
    assert 0.5 < p < 0.95
    rotations = new_rotations(KEY, 512, d, (16,))
    buckets = np.asarray(hash_buckets(x, rotations, (16,)))
    found = (buckets[:, :n_pairs] == buckets[:, n_pairs:]).reshape(
        -1, n_rounds, n_pairs
    )
    for n in (1, 2, 4):
        recall = np.any(found[:, :n], axis=1).mean()
        np.testing.assert_allclose(recall, 1 - (1 - p) ** n, atol=0.03)
    # And attention goes there: values are one-hot, each point looks at its pair most.
    v = np.eye(2 * n_pairs, dtype=np.float32)
    windows = Windows(32, 1, 1, False)
    y = jax.jit(
        lambda x: lsh_attention(
            50 * x, v, np.ones(2 * n_pairs, bool), rotations[:8], (16,), windows
        )
    )(x)
    pair = np.roll(np.arange(2 * n_pairs), n_pairs)
    assert np.mean(np.argmax(y, 1) == pair) > 0.97


def test_gradients_are_finite_and_those_of_float64():
    """Masks, dropout's key and rounds in one; against the loop's own derivative."""
    windows, n_buckets = Windows(3, 1, 0, True), (4,)
    q, v = points(7)
    seen = np.arange(LENGTH) != 2
    rotations = new_rotations(KEY, 2, D, n_buckets)
    matrix = seen_by_loops(buckets_by_loops(q, rotations, n_buckets), windows, seen)
    target = np.random.default_rng(8).normal(size=(LENGTH, 3))

    def loss(q, v):
        y = attention_by_loops(q, shared_keys(q), v, matrix, True)
        return (y * target).sum()

    with jax.enable_x64(True):
        grad = jax.jit(
            jax.grad(
                lambda q, v: (
                    lsh_attention(q, v, seen, rotations, n_buckets, windows) * target
                ).sum(),
                (0, 1),
            )
        )(q, v)
    for which, x in enumerate((q, v)):
        for at in [(0, 0), (3, 1), (5, 2), (10, 0), (2, 1)]:
            up, down = x.copy(), x.copy()
            up[at] += 1e-5
            down[at] -= 1e-5
            args = [(up, v), (down, v)] if which == 0 else [(q, up), (q, down)]
            slope = (loss(*args[0]) - loss(*args[1])) / 2e-5
            np.testing.assert_allclose(grad[which][at], slope, rtol=1e-5, atol=1e-7)
    assert np.all(np.asarray(grad[1])[2] == 0)


def test_memory_grows_with_the_length_and_not_its_square():
    def temporary(length):
        layer = tl.LSHSelfAttention(1, 8, 8, chunk_len=16, n_hashes=2, causal=True)
        sig = jax.ShapeDtypeStruct((1, length, 8), np.float32)
        weights, _ = layer.weights_and_state_signature(sig)
        weights = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in weights]

        def loss(x, *weights):
            return layer.pure_fn(x, weights, (), jax.random.key(0))[0].sum()

        compiled = jax.jit(jax.grad(loss)).lower(sig, *weights).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporary(512), temporary(2048)
    assert large < 5.5 * small  # Squares would give 16.
    assert large < 2048 * 2048 * 4 / 2  # Half of one matrix of scores.


def test_numbers_of_buckets():
    assert buckets_for(64, 64) == (1,)
    assert buckets_for(65, 64) == (4,)
    assert buckets_for(4096, 64) == (128,)
    factors = buckets_for(65536, 64)
    assert len(factors) == 2 and np.prod(factors) == 2048
    assert all(n % 2 == 0 for n in factors)


@pytest.mark.parametrize(
    "given, text",
    [
        (dict(n_buckets=3), "even.*got 3"),
        (dict(n_buckets=[4, 5]), r"even.*got \[4, 5\]"),
        (dict(n_hashes=0), "n_hashes=0"),
        (dict(share_qk=False), "share_qk=False"),
        (dict(causal=True, n_chunks_before=0), "n_chunks_before >= 1 if causal"),
        (dict(causal=True, n_chunks_after=1), "n_chunks_after=1; use 0"),
        (dict(chunk_len=0), "chunk_len >= 1"),
        (dict(mode="predict", causal=True), "max_length_for_buckets, in all modes"),
        (dict(mode="predict", n_buckets=2), "mode 'predict' needs causal=True"),
        (dict(attention_dropout=1.0), "attention_dropout must be in"),
        (dict(n_parallel_heads=0), "n_parallel_heads must be at least 1"),
        (dict(d_qk=0), "d_qk must be at least 1, got 0"),
    ],
)
def test_mistakes(given, text):
    with pytest.raises(ValueError, match=text):
        tl.LSHSelfAttention(**given)


def test_a_mask_of_another_shape():
    layer = tl.LSHSelfAttention(masked=True)
    with pytest.raises(LayerError, match=r"one flag for each position.*\(2, 5\)"):
        layer.init((np.ones((2, 5, 4)), np.ones((2, 1, 1, 5))))


def test_keys_of_queries():
    q = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)
    np.testing.assert_allclose(
        keys_of_queries(q), [[3 / 12.5**0.5, 4 / 12.5**0.5], [0, 0]], rtol=1e-6
    )


@pytest.mark.parametrize("causal", [True, False])
def test_some_chunks_at_a_time_are_all_at_once(causal, monkeypatch):
    """Values and gradients, hashed and in a row; groups do not come out even."""
    rng = np.random.default_rng(0)
    q, v = rng.normal(size=(2, 37, 4)).astype(np.float32)
    seen = rng.uniform(size=37) < 0.8
    windows = Windows(4, 2, 0 if causal else 1, causal)
    rotations = new_rotations(KEY, 2, 4, (4,))

    def loss(q, v):
        if causal:
            y = lsh_attention(q, v, seen, rotations, (4,), windows)
        else:
            y = chunked_attention(q, q, v, seen, windows, exclude_self=True)
        return jnp.sum(jnp.sin(y)), y

    found = []
    for pairs in (2**18, 150):  # All 10 chunks; 3 at a time (2 if not causal).
        monkeypatch.setattr(lsh_kernel, "_PAIRS", pairs)
        value_and_grad = jax.value_and_grad(loss, (0, 1), has_aux=True)
        jaxpr = str(jax.make_jaxpr(value_and_grad)(q, v))
        n_groups = 1 if pairs > 150 else -(-10 // (150 // (16 * (3 if causal else 4))))
        assert f"length={n_groups}" in jaxpr
        found.append(jax.tree.leaves(jax.jit(value_and_grad)(q, v)))
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

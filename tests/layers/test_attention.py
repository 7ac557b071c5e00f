"""Attention layers against their parts written out in NumPy's float64."""

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax.errors import LayerError
from retrax.shapes import ShapeDtype

KEY = jax.random.key(4)
MODES = ("train", "eval")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def project(x, weights):
    w, b = weights
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64) + np.asarray(b)


def heads_by_hand(q, k, v, n_heads, n_kv, seen):
    """(batch, length, features) each; `seen` (batch, q, k) bool."""
    (b, n_queries, d), group = q.shape, n_heads // n_kv
    d_head = d // n_heads
    y = np.zeros((b, n_queries, d))
    weights = np.zeros((b, n_heads, n_queries, k.shape[1]))
    for i, h in np.ndindex(b, n_heads):
        mine = slice(h * d_head, (h + 1) * d_head)
        theirs = slice(h // group * d_head, (h // group + 1) * d_head)
        scores = q[i, :, mine] @ k[i, :, theirs].T / np.sqrt(d_head)
        exps = np.exp(scores) * seen[i]
        weights[i, h] = exps / exps.sum(-1, keepdims=True)
        y[i, :, mine] = weights[i, h] @ v[i, :, theirs]
    return y, weights


def random_biases(layer):
    """Makes the biases matter, which start next to zero."""
    leaves, structure = jax.tree.flatten(layer.weights)
    moved = [w + 0.3 * normal(*w.shape, seed=i) for i, w in enumerate(leaves)]
    layer.weights = jax.tree.unflatten(structure, moved)


@pytest.mark.parametrize("n_kv", [4, 2])
def test_attention_qkv_is_its_parts(n_kv):
    layer = tl.AttentionQKV(8, n_heads=4, n_kv_heads=n_kv, mode="viz")
    q, k, v = normal(2, 3, 5), normal(2, 4, 6, seed=1), normal(2, 4, 7, seed=2)
    mask = np.array([[1, 1, 1, 0], [1, 0, 1, 1]])[:, None, None, :]
    layer.init((q, k, v, mask), rng=KEY)
    random_biases(layer)
    w_qkv, _, w_last = layer.weights
    parts = [project(x, w) for x, w in zip((q, k, v), w_qkv, strict=True)]
    seen = np.broadcast_to(mask[:, 0], (2, 3, 4))
    joined, weights = heads_by_hand(*parts, 4, n_kv, seen)
    y, same_mask = layer((q, k, v, mask))
    np.testing.assert_allclose(y, project(joined, w_last), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(same_mask, mask)
    (shown,) = tl.attention_weights(layer).values()
    np.testing.assert_allclose(shown, weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kwargs", [{}, dict(n_kv_heads=1), dict(chunk=2)])
def test_causal_attention_is_its_parts(kwargs):
    layer = tl.CausalAttention(6, n_heads=3, **kwargs)
    x = normal(2, 5, 4)
    layer.init(x, rng=KEY)
    random_biases(layer)
    (_, w_qkv), _, w_last = layer.weights
    parts = [project(x, w) for w in w_qkv]
    seen = np.broadcast_to(np.tri(5, dtype=bool), (2, 5, 5))
    joined, _ = heads_by_hand(*parts, 3, kwargs.get("n_kv_heads", 3), seen)
    np.testing.assert_allclose(layer(x), project(joined, w_last), rtol=1e-4, atol=1e-5)


def test_causal_attention_is_attention_under_a_causal_mask():
    x = normal(2, 5, 8)
    mask = tl.CausalMask()(x)
    masked, causal = tl.Attention(8, n_heads=2), tl.CausalAttention(8, n_heads=2)
    masked.init((x, mask), rng=KEY)
    causal.init(x, rng=KEY)
    _, (qkv, _, last) = masked.weights
    causal.weights = (((), qkv), (), last)
    y, _ = masked((x, mask))
    np.testing.assert_allclose(causal(x), y, rtol=1e-5, atol=1e-6)


def test_configurable_attention_is_causal_attention():
    x = normal(2, 5, 8)
    dense = [tl.Dense(8) for _ in range(4)]
    layer = tl.ConfigurableAttention(*dense, tl.DotProductCausalAttention(), n_heads=4)
    layer.init(x, rng=KEY)
    other = tl.CausalAttention(8, n_heads=4)
    other.init(x)
    other.weights = (((), tuple(d.weights for d in dense[:3])), (), dense[3].weights)
    np.testing.assert_allclose(layer(x), other(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("merged", [True, False])
def test_heads_are_split_and_merged(merged):
    x = normal(2, 3, 8)
    y = np.asarray(tl.SplitIntoHeads(4, merged_batch_and_head=merged)(x))
    assert y.shape == ((8, 3, 2) if merged else (2, 4, 3, 2))
    for i, h in np.ndindex(2, 4):
        head = y[4 * i + h] if merged else y[i, h]
        np.testing.assert_array_equal(head, x[i, :, 2 * h : 2 * h + 2])
    back = tl.MergeHeads(4, merged_batch_and_head=merged)(y)
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("lead", [(2, 3), (6,)])
def test_dot_product_attention_layer(lead):
    q, k, v = normal(*lead, 4, 2), normal(*lead, 5, 2, seed=1), normal(*lead, 5, 2)
    mask = np.tri(4, 5, dtype=bool)[(None,) * len(lead)]
    y, weights = tl.DotProductAttention()((q, k, v, mask))
    q, k, v = (x.reshape(6, -1, 2).astype(np.float64) for x in (q, k, v))
    exps = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(2)) * np.tri(4, 5)
    expected = exps / exps.sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, expected.reshape(*lead, 4, 5), rtol=1e-5)
    np.testing.assert_allclose(
        y, (expected @ v).reshape(*lead, 4, 2), rtol=1e-4, atol=1e-6
    )


def test_weights_on_view():
    x = normal(2, 3, 4)
    model = tl.Serial(
        tl.Dense(4), tl.Repeat(lambda: tl.CausalAttention(4, mode="viz"), 2)
    )
    _, state = model.init(ShapeDtype(x.shape), rng=KEY)
    assert all(not np.any(s) for s in jax.tree.leaves(state))
    model(x)
    ((path, weights),) = tl.attention_weights(model).items()
    assert path.endswith("DotProductCausalAttention")
    assert weights.shape == (2, 2, 1, 3, 3)  # Blocks first.
    np.testing.assert_allclose(jnp.sum(weights, -1), np.ones((2, 2, 1, 3)), rtol=1e-6)
    np.testing.assert_array_equal(weights, weights * np.tri(3))
    assert tl.attention_weights(tl.Serial(tl.Dense(2))) == {}


def test_dropout_is_for_training_only():
    x = normal(2, 5, 4)
    train, test = (tl.CausalAttention(4, 2, dropout=0.5, mode=m) for m in MODES)
    plain = tl.CausalAttention(4, 2)
    for layer in (train, test, plain):
        layer.init(x, rng=KEY)
    np.testing.assert_array_equal(test(x, rng=None), plain(x))
    first, again, other = (train(x, rng=jax.random.key(s)) for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other) and np.any(first != plain(x))
    with pytest.raises(LayerError, match="needs a random key.*dropout 0.5"):
        train.pure_fn(x, train.weights, train.state, None)


def test_one_position_bias_for_two_layers_is_one_weight():
    bias = tl.RelativePositionBias(2, n_buckets=4, max_distance=8)
    model = tl.Serial(
        tl.CausalAttention(4, 2, position_bias=bias),
        tl.CausalAttention(4, 2, position_bias=bias, chunk=2),
    )
    x = normal(1, 5, 4)
    weights, state = model.init(x, rng=KEY)
    assert sum(w.shape == (4, 2) for w in jax.tree.leaves(weights)) == 1

    def loss(weights):
        return jnp.sum(jnp.square(model.pure_fn(x, weights, state, None)[0]))

    grads = jax.jit(jax.grad(loss))(weights)
    total = grads[0][1][0]
    # The same with a weight of its own for each layer: the two gradients' sum.
    separate = tl.Serial(
        tl.CausalAttention(4, 2, position_bias=tl.RelativePositionBias(2, 4, 8)),
        tl.CausalAttention(4, 2, position_bias=tl.RelativePositionBias(2, 4, 8)),
    )
    separate.init(x)
    table = weights[0][1][0]
    split = (weights[0], (weights[1][0], (table,), weights[1][2]))
    grads = jax.grad(
        lambda w: jnp.sum(jnp.square(separate.pure_fn(x, w, separate.state, None)[0]))
    )(split)
    np.testing.assert_allclose(
        total, grads[0][1][0] + grads[1][1][0], rtol=1e-4, atol=1e-6
    )
    assert np.any(np.asarray(total) != 0)


@pytest.mark.parametrize("mode", MODES)
def test_repeated_blocks_are_a_chain(mode):
    x = normal(2, 4, 8)

    def block():
        return tl.Residual(
            tl.LayerNorm(),
            tl.CausalAttention(8, 4, n_kv_heads=2, rotary=True, dropout=0.3, mode=mode),
        )

    deep, chain = tl.Repeat(block, 3), tl.Serial(*[block() for _ in range(3)])
    deep.init(x, rng=KEY)
    chain.init(x, rng=KEY)
    np.testing.assert_allclose(
        deep(x, rng=KEY), chain(x, rng=KEY), rtol=1e-4, atol=1e-6
    )


def test_sparsity_leaves_out_projections():
    layer = tl.AttentionQKV(4, q_sparsity="noop", result_sparsity="noop")
    x, mask = normal(1, 3, 4), np.ones((1, 1, 1, 3))
    weights, _ = layer.init((x, x, x, mask), rng=KEY)
    assert len(jax.tree.leaves(weights)) == 4
    with pytest.raises(ValueError, match="q_sparsity='noop' and None only, got 'mult'"):
        tl.AttentionQKV(4, q_sparsity="mult")


@pytest.mark.parametrize("make", [tl.Attention, tl.AttentionQKV, tl.CausalAttention])
def test_heads_that_do_not_fit(make):
    name = make.__name__.removesuffix("QKV")
    with pytest.raises(ValueError, match=rf"{name}.*10 is not divisible by n_heads=4"):
        make(10, n_heads=4)
    with pytest.raises(ValueError, match="n_heads=4 must be .* n_kv_heads=3"):
        make(12, n_heads=4, n_kv_heads=3)
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\), got 1.5"):
        make(12, n_heads=4, dropout=1.5)


def test_errors_of_cores_name_path_and_numbers():
    x = normal(2, 3, 10)
    model = tl.Serial(tl.Dup(), tl.Dup(), tl.DotProductCausalAttention(n_heads=4))
    with pytest.raises(LayerError, match="10, is not divisible by n_heads=4") as e:
        model.init(x)
    assert e.value.path == "Serial[2] > DotProductCausalAttention"
    with pytest.raises(LayerError, match=r"\(batch, length, d_feature\), got \(2, 3\)"):
        tl.DotProductCausalAttention()((x[..., 0],) * 3)
    with pytest.raises(LayerError, match="SplitIntoHeads: d_feature 10"):
        tl.SplitIntoHeads(4)(x)
    with pytest.raises(LayerError, match="first axis, 2, is not divisible"):
        tl.MergeHeads(4)(x)
    with pytest.raises(ValueError, match="CausalDepthwiseConv"):
        tl.CausalAttention(4, use_dconv=True)


def test_gin_configures_by_trax_names():
    with gin.unlock_config():
        gin.parse_config("CausalAttention.n_heads = 4\nAttention.dropout = 0.25")
    try:
        with pytest.raises(ValueError, match="6 is not divisible by n_heads=4"):
            tl.CausalAttention(6)
        x, mask = normal(1, 2, 4), np.ones((1, 1, 1, 2))
        layer = tl.Attention(4)
        layer.init((x, mask))
        with pytest.raises(LayerError, match="dropout 0.25"):
            layer.pure_fn((x, mask), layer.weights, layer.state, None)
    finally:
        gin.clear_config()

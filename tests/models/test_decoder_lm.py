"""DecoderLM: weights and options."""

import jax
import numpy as np
import pytest

from retrax import layers as tl
from retrax import models
from retrax.errors import LayerError
from retrax.layers import tree
from retrax.shapes import ShapeDtype

D, V = 16, 11
IDS = ShapeDtype((2, 5), np.int32)


@pytest.fixture(scope="module", autouse=True)
def _compile_fast():
    """Most of the time here goes into compiling."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def n_weights(model):
    weights, _ = model.weights_and_state_signature(IDS)
    return sum(int(np.prod(w.shape)) for w in jax.tree.leaves(weights))


@pytest.mark.parametrize("n_kv, d_ff", [(None, 24), (1, 24), (2, None)])
def test_weights(n_kv, d_ff):
    model = models.DecoderLM(
        V, d_model=D, d_ff=d_ff, n_layers=3, n_heads=4, n_kv_heads=n_kv
    )
    d_kv = D // 4 * (n_kv or 4)
    feed_forward = 3 * D * (d_ff or 64)  # 8/3 * 16 = 42.7, up to 64.
    block = 2 * D * D + 2 * D * d_kv + feed_forward + 2 * D
    assert n_weights(model) == V * D + 3 * block + D + D * V


def test_default_feed_forward_is_that_of_llama_7b():
    """8/3 * 4096 = 10922.7, and up: 11008 there (multiples of 256), here of 64."""
    model = models.DecoderLM(V, d_model=4096, n_layers=1, n_heads=1)
    weights, _ = model.weights_and_state_signature(IDS)
    assert (4096, 10944) in [w.shape for w in jax.tree.leaves(weights)]


def test_positions_matter_unless_there_are_none():
    """Without positions, earlier ids in another order look the same to attention."""
    ids = np.array([[5, 6, 7, 8, 9]], np.int32)
    swapped = np.array([[6, 5, 7, 8, 9]], np.int32)
    for positions in ("rotary", "alibi", "none"):
        model = models.DecoderLM(
            V, d_model=D, n_layers=1, n_heads=4, positions=positions, mode="eval"
        )
        model.init(ids, rng=jax.random.key(0))
        f = jax.jit(lambda x, m=model: m.pure_fn(x, m.weights, m.state, None)[0])
        difference = np.abs(f(ids) - f(swapped))[0].max(-1)
        assert difference[1] > 1e-3
        assert (difference[3:].max() < 1e-6) == (positions == "none")


def test_chunks_and_remat_change_no_value():
    ids = np.array([[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]], np.int32)
    sizes = dict(d_model=D, n_layers=2, n_heads=4, scan_layers=True)
    plain = models.DecoderLM(V, **sizes)
    plain.init(ids, rng=jax.random.key(0))
    saving = models.DecoderLM(V, attention_chunk=2, remat=True, **sizes)

    def gradient(model):
        f = jax.grad(lambda w: (model.pure_fn(ids, w, model.state, None)[0] ** 2).sum())
        return jax.jit(f)(plain.weights)

    saving.init(ids)
    for a, b in zip(
        jax.tree.leaves(gradient(plain)), jax.tree.leaves(gradient(saving)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_parts_can_be_others():
    model = models.DecoderLM(
        V, d_model=D, n_layers=1, n_heads=4, norm=tl.LayerNorm, feed_forward=tl.GEGLU
    )
    assert "RMSNorm" not in str(model) and "LayerNorm" in str(model)
    assert "GEGLU" in str(model) and "SwiGLU" not in str(model)


def tied(mode="eval", **kwargs):
    return models.DecoderLM(
        V, D, n_layers=1, n_heads=4, mode=mode, tie_embeddings=True, **kwargs
    )


@pytest.mark.parametrize("scan_layers", [False, True])
def test_tied_embeddings_are_one_weight_with_both_gradients(scan_layers):
    """Against the untied model whose last matrix is set to the embedding's."""
    ids = np.array([[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]], np.int32)
    one = tied(scan_layers=scan_layers)
    two = models.DecoderLM(
        V, D, n_layers=1, n_heads=4, mode="eval", scan_layers=scan_layers
    )
    assert n_weights(two) - n_weights(one) == V * D

    @jax.jit
    def compare(key):
        weights, state = one.init(ids, rng=key)
        untied, _ = two.init(ids, rng=key)
        leaves = [*jax.tree.leaves(weights), weights[1].T]
        untied = jax.tree.unflatten(jax.tree.structure(untied), leaves)
        targets = jax.random.normal(key, (*ids.shape, V))

        def loss(model):
            def f(w):
                return ((model.pure_fn(ids, w, state, None)[0] - targets) ** 2).sum()

            return jax.value_and_grad(f)

        return loss(one)(weights), loss(two)(untied)

    (value, grads), (untied_value, untied_grads) = compare(jax.random.key(0))
    np.testing.assert_allclose(value, untied_value, rtol=1e-5)
    *others, last = jax.tree.leaves(untied_grads)
    first, *rest = jax.tree.leaves(grads)
    assert first.shape == (V, D) and np.any(last)
    np.testing.assert_allclose(first, others[0] + last.T, rtol=1e-4, atol=1e-4)
    for a, b in zip(rest, others[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_tied_embeddings_in_files_and_decoding(tmp_path, scan_layers=True):
    ids = np.array([[5, 6, 7, 8]], np.int32)
    model = tied(scan_layers=scan_layers)
    model.init(IDS, rng=jax.random.key(1))
    names = [path for path, _ in tree.named_leaves(model, model.weights)]
    assert [n for n in names if "Embedding" in n or "Dense" in n][:1] == [
        "1.TiedEmbedding"
    ]
    assert sum("Embedding" in n for n in names) == 1
    assert len(names) == len(jax.tree.leaves(model.weights))
    model.save_to_file(tmp_path / "lm.pkl")
    predict = tied("predict", max_len=8, scan_layers=scan_layers)
    predict.init_from_file(
        tmp_path / "lm.pkl",
        weights_only=True,
        input_signature=ShapeDtype((1, 1), np.int32),
    )
    assert predict.sublayers[1] is predict.sublayers[-1]
    expected, _ = jax.jit(model.pure_fn)(ids, model.weights, model.state, None)
    step = jax.jit(predict.pure_fn)
    state, ys = predict.state, []
    for t in range(ids.shape[1]):  # Nothing is shifted here, so 0 comes first.
        x = ids[:, t - 1 : t] if t else np.zeros((1, 1), np.int32)
        y, state = step(x, predict.weights, state, None)
        ys.append(y)
    np.testing.assert_allclose(np.concatenate(ys, 1), expected, rtol=1e-4, atol=1e-5)


def test_a_tied_embedding_names_what_it_takes():
    layer = tl.TiedEmbedding(V, D)
    layer.init(IDS)
    with pytest.raises(LayerError, match=r"vectors of 16 features, got .*\(2, 4\)"):
        layer(np.ones((2, 4), np.float32))


def test_errors_name_values():
    with pytest.raises(ValueError, match="'learned'"):
        models.DecoderLM(V, positions="learned")
    with pytest.raises(ValueError, match="scan_layers"):
        models.DecoderLM(V, remat=True)
    with pytest.raises(ValueError, match="n_heads=4.*n_kv_heads=3"):
        models.DecoderLM(V, d_model=D, n_heads=4, n_kv_heads=3)

"""DecoderLM: weights and options."""

import jax
import numpy as np
import pytest

from retrax import layers as tl
from retrax import models
from retrax.shapes import ShapeDtype

D, V = 16, 11
IDS = ShapeDtype((2, 5), np.int32)


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


def test_errors_name_values():
    with pytest.raises(ValueError, match="'learned'"):
        models.DecoderLM(V, positions="learned")
    with pytest.raises(ValueError, match="scan_layers"):
        models.DecoderLM(V, remat=True)
    with pytest.raises(ValueError, match="n_heads=4.*n_kv_heads=3"):
        models.DecoderLM(V, d_model=D, n_heads=4, n_kv_heads=3)

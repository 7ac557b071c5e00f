"""LatentTransformerLM: what is put in, read off, and left out."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax import models
from retrax.errors import LayerError
from retrax.shapes import signature

SIZES = dict(d_model=8, d_ff=12, n_layers=1, n_heads=2, dropout=0.0)
POSITIONS = jnp.array([[6, 7], [3, 4]])


def inputs(n_latents=2, length=11):
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, 6, (2, length)), jnp.int32)
    latents = jnp.asarray(rng.normal(size=(2, n_latents, 8)), jnp.float32)
    return ids, latents, POSITIONS[:, :n_latents], jnp.ones((2, n_latents), bool)


def made(n_latents=2, **more):
    lm = models.LatentTransformerLM(4, n_latents, mode="eval", **(SIZES | more))
    x = inputs(n_latents)
    if more.get("noise_head"):
        x = (*x, x[1])
    init(lm, x)
    return lm, x


@pytest.fixture(scope="module")
def two():
    """A model of two slots, and its inputs."""
    return made()


def init(lm, x):
    make = jax.jit(lambda key: lm.init(signature(x), rng=key))
    lm.weights, lm.state = make(jax.random.key(1))


def run(lm, x):
    return _compiled(lm)(x, lm.weights, lm.state, None)[0]


@functools.lru_cache
def _compiled(lm):
    return jax.jit(lm.pure_fn)


def test_without_slots_it_is_the_plain_language_model():
    lm, x = made(n_latents=0)
    logits, hidden, candidates = run(lm, x)
    assert candidates.shape == (2, 0, 16, 4)
    plain = models.TransformerLM(6, mode="eval", ff_activation=tl.Gelu, **SIZES)
    plain_weights, _ = plain.weights_and_state_signature(signature(x[0]))
    # The plain model shifts by itself, has sinusoids for positions, and a bias.
    (_, embedding, _, positions, _, *blocks), rest = (
        [w for w in lm.weights[:-2]],
        lm.weights[-2:],
    )
    body = tl.Serial(*plain.sublayers[4:-1])
    vectors = embedding[x[0]] + positions[: x[0].shape[1]]
    run_body = jax.jit(body.pure_fn)
    wanted = run_body(vectors, (*blocks, rest[0]), lm.state[5:-1], None)[0]
    np.testing.assert_allclose(hidden, wanted, atol=1e-6)
    np.testing.assert_allclose(logits, wanted @ rest[1][1][0], atol=1e-5)
    n_plain = sum(math.prod(w.shape) for w in jax.tree.leaves(plain_weights))
    n_weights = sum(w.size for w in jax.tree.leaves(lm.weights))
    assert n_weights == n_plain + positions.size - 6  # Positions; no bias.


def test_latents_stand_for_placeholders_and_are_seen_from_there_on(two):
    lm, (ids, latents, positions, active) = two
    logits, hidden, candidates = run(lm, (ids, latents, positions, active))
    assert logits.shape == (2, 11, 6) and candidates.shape == (2, 2, 16, 4)
    other = run(lm, (ids, latents.at[0, 1].multiply(-1), positions, active))
    same = np.isclose(hidden, other[1]).all(-1)
    assert same[1].all() and same[0, :7].all() and not same[0, 7:].any()
    # The ids under active slots count for nothing, those under others do.
    there = jnp.arange(2)[:, None], positions
    changed = ids.at[there].set((ids[there] + 1) % 6)
    np.testing.assert_allclose(
        run(lm, (changed, latents, positions, active))[0], logits
    )
    off = active.at[0, 0].set(False)
    a, b = (run(lm, (i, latents, positions, off))[0] for i in (ids, changed))
    assert not np.isclose(a[0, 6:], b[0, 6:]).all()
    np.testing.assert_allclose(a[1], b[1])


def test_candidates_are_read_at_the_slots(two):
    lm, x = two
    _, hidden, candidates = run(lm, x)
    _, w, b = jax.tree.leaves(lm.weights[-1])  # The last branch's.
    at = np.take_along_axis(np.asarray(hidden), np.asarray(POSITIONS)[..., None], 1)
    np.testing.assert_allclose(
        candidates, (at @ w + b).reshape(2, 2, 16, 4), rtol=1e-4, atol=1e-5
    )


def test_a_latent_of_one_number_stands_for_a_vector_of_it():
    layer, x = tl.InjectLatents(), jnp.zeros((2, 9, 8))
    active = jnp.ones((2, 2), bool)
    wide, narrow = (
        layer((x, jnp.full((2, 2, d), 3.0), POSITIONS, active)) for d in (8, 1)
    )
    np.testing.assert_array_equal(wide, narrow)
    assert wide.sum() == 4 * 8 * 3
    beyond = layer((x, jnp.ones((2, 2, 8)), POSITIONS + jnp.array([[9, -9]]), active))
    assert not beyond.any()
    with pytest.raises(LayerError, match=r"latents must have shape \(2, 2, 8\)"):
        layer((x, jnp.zeros((2, 2, 3)), POSITIONS, active))


def test_noise_of_thoughts():
    lm = models.LatentTransformerLM(4, 2, noise_head=True, **SIZES)
    assert (lm.n_in, lm.n_out) == (5, 5)
    head, z = lm.sublayers[1], inputs()[1]
    head.init(signature(z))
    mu, log_sigma = head(z)
    np.testing.assert_array_equal(mu, z)
    np.testing.assert_array_equal(log_sigma, np.full((2, 2, 8), -3.0))
    rng = np.random.default_rng(0)
    matrix, vector, log_matrix, log_vector = head.weights = tuple(
        rng.normal(size=w.shape) for w in head.weights
    )
    mu, log_sigma = head(z)
    for j in range(2):
        at_j = np.asarray(z[:, j], np.float64)
        wanted = at_j + at_j @ matrix[j] + vector[j]
        np.testing.assert_allclose(mu[:, j], wanted, rtol=1e-4, atol=1e-5)
        wanted = at_j @ log_matrix[j] + log_vector[j]
        np.testing.assert_allclose(log_sigma[:, j], wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(LayerError, match=r"vectors of shape \(batch, 2, 8\), got"):
        head(z[:, :1])


def test_a_short_convolution_adds_the_embeddings_just_before():
    lm, (ids, latents, positions, active) = made(conv_width=3)
    table, added = (np.asarray(lm.weights[i], "d") for i in (1, 4))
    w = np.asarray(jax.tree.leaves(lm.weights[2])[0], "d")
    assert w.shape == (3, 8) and np.abs(w).min() > 0
    vectors = table[ids]
    wanted = vectors + w[0] * vectors
    wanted[:, 1:] += w[1] * vectors[:, :-1]
    wanted[:, 2:] += w[2] * vectors[:, :-2]
    wanted[np.arange(2)[:, None], np.asarray(positions)] = latents  # As they are.
    wanted += added[: ids.shape[1]]
    body = tl.Serial(*lm.sublayers[:5])
    x = (ids, latents, positions, active)
    found = body.pure_fn(x, lm.weights[:5], lm.state[:5], None)[0][0]
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("conv_width", [0, 3])
def test_token_by_token_it_gives_the_same(conv_width):
    lm, (ids, latents, positions, active) = made(conv_width=conv_width)
    wanted = run(lm, (ids, latents, positions, active))[0]
    cached = models.LatentTransformerLM(
        4, 2, mode="predict", conv_width=conv_width, **SIZES
    )

    @jax.jit
    def run_cached(weights):
        x = (ids[:, :2], latents, positions, active)
        _, state = cached.init(signature(x), rng=jax.random.key(0))
        (first, *_), state = cached.pure_fn(x, weights, state, None)

        def one_more(state, t):
            token = jax.lax.dynamic_slice_in_dim(ids, t, 1, axis=1)
            x = (token, latents, positions - t, active)
            (logits, *_), state = cached.pure_fn(x, weights, state, None)
            return state, logits[:, 0]

        _, rest = jax.lax.scan(one_more, state, jnp.arange(2, ids.shape[1]))
        return jnp.concatenate([first, jnp.swapaxes(rest, 0, 1)], axis=1)

    np.testing.assert_allclose(run_cached(lm.weights), wanted, atol=1e-5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(n_latents=-1), "n_latents=-1"),
        (dict(conv_width=-3), "conv_width=-3"),
        (dict(noise_head=True), "noise_head=True needs n_latents of at least 1"),
        (dict(d_model=9, n_heads=2), "9 is not divisible by n_heads=2"),
    ],
)
def test_sizes_that_do_not_fit_are_told(arguments, message):
    with pytest.raises(ValueError, match=message):
        models.LatentTransformerLM(4, **arguments)

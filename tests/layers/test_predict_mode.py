"""Predict mode gives what eval mode gives, token by token, and forgets on request."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax.errors import LayerError
from retrax.layers import sequences
from retrax.shapes import ShapeDtype, signature

KEY = jax.random.key(6)
LENGTH = 9


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def block(mode, **kwargs):
    return tl.Residual(
        tl.LayerNorm(),
        tl.CausalAttention(8, 4, max_inference_length=LENGTH, mode=mode, **kwargs),
    )


def alone(**kwargs):
    return lambda mode: tl.Serial(block(mode, **kwargs), tl.Dense(5))


def with_bias(make):
    return lambda mode: tl.Serial(block(mode, position_bias=make()), tl.Dense(5))


def with_positions(**kwargs):
    return lambda mode: tl.Serial(
        tl.PositionalEncoding(max_len=LENGTH, mode=mode, **kwargs), block(mode)
    )


MODELS = {
    "plain": alone(),
    "rotary": alone(rotary=True),
    "rotary:part": alone(rotary=tl.RotaryPositions(base=500.0, interleaved=True)),
    "grouped": alone(n_kv_heads=2, rotary=True),
    "one_kv": alone(n_kv_heads=1),
    "chunk": alone(chunk=2, rotary=True),
    "relative": with_bias(lambda: tl.RelativePositionBias(4, 6, 8)),
    "alibi": with_bias(lambda: tl.AlibiBias(4)),
    "sinusoidal": with_positions(),
    "learned": with_positions(kind="learned", d_feature=3),
    "sincos": lambda mode: tl.Serial(
        tl.SinCosPositionalEncoding(mode=mode), block(mode)
    ),
    "rotary_layer": lambda mode: tl.Serial(tl.RotaryPositions(mode=mode), block(mode)),
    "merged_heads": lambda mode: tl.ConfigurableAttention(
        *[tl.Dense(8) for _ in range(4)],
        tl.DotProductCausalAttention(max_inference_length=LENGTH, mode=mode),
        n_heads=2,
    ),
    "repeat": lambda mode: tl.Repeat(lambda: block(mode, rotary=True), 3),
    "repeat:bias": lambda mode: tl.Repeat(
        lambda: block(mode, position_bias=tl.RelativePositionBias(4, 6, 8)), 2
    ),
}


def pair(name):
    """Returns (x, eval mode's outputs, an initialised model in mode 'predict')."""
    x = normal(2, LENGTH, 8)
    model, predict = MODELS[name]("eval"), MODELS[name]("predict")
    model.init(x, rng=KEY)
    predict.init(ShapeDtype((2, 1, 8)), rng=jax.random.key(0))
    predict.weights = model.weights
    return x, np.asarray(model(x)), predict


@pytest.mark.parametrize("name", MODELS)
def test_predict_is_eval_at_every_position(name):
    x, expected, predict = pair(name)
    run = jax.jit(predict.pure_fn)
    for _ in range(2):  # The second time shows that reset_state forgets all.
        ys, state = [], predict.state
        for part in (x[:, :3], x[:, 3:5], *(x[:, i : i + 1] for i in range(5, LENGTH))):
            y, state = run(part, predict.weights, state, None)
            ys.append(y)
        np.testing.assert_allclose(np.concatenate(ys, 1), expected, atol=1e-5)
        predict.state = state
        assert any(np.any(s) for s in jax.tree.leaves(state))
        predict.reset_state()
        assert not any(np.any(s) for s in jax.tree.leaves(predict.state))


@pytest.mark.parametrize("name", ["plain", "sinusoidal", "repeat"])
def test_a_full_cache_is_an_error_that_names_the_limit(name):
    x, expected, predict = pair(name)
    np.testing.assert_allclose(predict(x), expected, atol=1e-5)  # Just fits.
    limit = "max_len=9" if name == "sinusoidal" else "max_inference_length=9"
    with pytest.raises(LayerError, match=f"{limit}.*has reached 10.*reset_state"):
        predict(x[:, :1])
    predict.reset_state()
    np.testing.assert_allclose(predict(x), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "sinusoidal", "repeat"])
def test_compiled_code_past_the_end_is_loud(name):
    x, _, predict = pair(name)
    run = jax.jit(predict.pure_fn)
    y, state = run(x, predict.weights, predict.state, None)
    assert np.all(np.isfinite(y))
    tl.check_state(predict, state)
    y, state = run(x[:, :1], predict.weights, state, None)
    assert np.all(np.isnan(y))
    with pytest.raises(ValueError, match=r"=9\), but the sequence has reached 10"):
        tl.check_state(predict, state)
    with pytest.raises(LayerError, match="=9.*has reached 18|=9.*length 18"):
        run(np.concatenate([x, x], 1), predict.weights, predict.state, None)


def test_another_batch_size_is_an_error_with_both_numbers():
    x, _, predict = pair("plain")
    with pytest.raises(LayerError, match="batch of 1 .*cache was made for 2"):
        predict(x[:1])


def test_the_cache_keeps_its_dtype():
    x, expected, predict = pair("grouped")
    y, state = predict.pure_fn(
        jnp.asarray(x, jnp.bfloat16),
        jax.tree.map(lambda w: w.astype(jnp.bfloat16), predict.weights),
        predict.state,
        None,
    )
    assert y.dtype == jnp.bfloat16
    assert signature(state) == signature(predict.state)
    np.testing.assert_allclose(y.astype(np.float32), expected, atol=0.15)


def test_many_sequences_by_vmap():
    x, _, predict = pair("rotary")
    xs = normal(3, 2, 4, 8, seed=8)
    states = jax.tree.map(lambda s: jnp.stack([s] * 3), predict.state)

    def run(x, state):
        return predict.pure_fn(x, predict.weights, state, None)

    ys, states = jax.jit(jax.vmap(run))(xs[:, :, :3], states)
    more, _ = jax.jit(jax.vmap(run))(xs[:, :, 3:], states)
    for i in range(3):
        predict.reset_state()
        expected = predict(xs[i])
        np.testing.assert_allclose(
            np.concatenate([ys[i], more[i]], 1), expected, atol=1e-5
        )


def test_reset_leaves_what_was_learned():
    model = tl.Serial(
        tl.Branch(tl.BatchNorm(axis=(0, 1)), block("predict")),
        tl.Parallel(None, tl.Cache(tl.Fn("Double", lambda x: 2 * x))),
        tl.Scan(
            tl.Fn("Sum", lambda x, y, c: (x + y + c, c + 1), n_out=2),
            axis=1,
            mode="predict",
        ),
    )
    x, carry = normal(2, 4, 8), np.zeros((2, 8), np.float32)
    _, before = model.init((x, carry), rng=KEY)
    model((x, carry))
    after = model.state
    batch_norm = after[0][1][0]
    assert np.any(batch_norm[0]) and after[2][1][0]
    model.reset_state()
    for kept, old in zip(model.state[0][1][0], batch_norm, strict=True):
        np.testing.assert_array_equal(kept, old)
    model.state = (
        (model.state[0][0], (before[0][1][0], model.state[0][1][1])),
        *model.state[1:],
    )
    assert jax.tree.structure(model.state) == jax.tree.structure(before)
    for now, old in zip(
        jax.tree.leaves(model.state), jax.tree.leaves(before), strict=True
    ):
        np.testing.assert_array_equal(now, old)


def test_initial_state_is_pure_and_compiles():
    x, _, predict = pair("repeat")
    _, state = predict.pure_fn(x, predict.weights, predict.state, None)
    start = jax.jit(lambda s: tl.initial_state(predict, s))(state)
    assert jax.tree.structure(start) == jax.tree.structure(state)
    assert not any(np.any(s) for s in jax.tree.leaves(start))
    assert any(np.any(s) for s in jax.tree.leaves(state))


def test_one_instance_in_two_places_is_reset_once():
    # The second place holds a marker, which has to stay one.
    layer = tl.PositionalEncoding(max_len=9, mode="predict")
    model = tl.Serial(tl.Dup(), tl.Parallel(layer, tl.Serial(layer)))
    x = normal(2, 3, 4)
    model.init(x)
    model(x)
    assert int(layer.state) == 6
    model.reset_state()
    assert int(layer.state) == 0


def test_state_of_another_model_is_an_error():
    with pytest.raises(ValueError, match="2 sublayers but its state has 0 elements"):
        sequences.initial_state(tl.Serial(tl.Dense(2), tl.Dense(2)), ())


def test_keys_of_the_encoder_can_be_projected_once():
    x, encoded, mask = normal(2, 1, 8), normal(2, 5, 8, seed=1), np.ones((2, 1, 1, 5))
    layer = tl.AttentionQKV(8, 2, mode="predict", cache_KV_in_predict=True)
    plain = tl.AttentionQKV(8, 2, mode="eval")
    for each in (layer, plain):
        each.init((x, encoded, encoded, mask), rng=KEY)
    plain.weights = jax.tree.unflatten(
        jax.tree.structure(plain.weights), jax.tree.leaves(layer.weights)
    )
    expected, _ = plain((x, encoded, encoded, mask))
    for given in (encoded, 0 * encoded):  # The second call does not look.
        y, _ = layer((x, given, given, mask))
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    layer.reset_state()
    y, _ = layer((x, 0 * encoded, 0 * encoded, mask))
    assert np.any(np.abs(y - expected) > 1e-3)

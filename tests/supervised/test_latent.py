"""Latent thoughts and their loss against the golden vectors, and by the definitions."""

import functools
import importlib.util
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import models, optimizers
from retrax.errors import ConfigError, LayerError
from retrax.layers import Serial
from retrax.shapes import signature
from retrax.supervised import lr_schedules
from retrax.supervised.latent import build_latents
from retrax.supervised.latent_config import LatentConfig
from retrax.supervised.latent_layers import (
    LatentThoughtLoss,
    LatentThoughts,
    thinking,
)
from retrax.supervised.latent_losses import (
    gate_terms,
    leaks,
    loss_terms,
    read_candidates,
)

COMPILES_QUICKLY = True

SPEC = importlib.util.spec_from_file_location(
    "latent_vectors", Path(__file__).with_name("latent_vectors.py")
)
vectors = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(vectors)
NAMES, VECTORS, arrays = vectors.NAMES, vectors.VECTORS, vectors.arrays


# --- The loss -----------------------------------------------------------------------


@functools.cache
def losses_of(inputs):
    """Terms and gradients for all configurations of one input, compiled at once."""
    *batch, logits, cand_logits = arrays(inputs)

    def of(config):
        def total(logits):
            terms = loss_terms(*batch, logits, cand_logits, **config)
            return terms["total"], terms

        (_, terms), gradient = jax.value_and_grad(total, has_aux=True)(logits)
        return terms, jnp.linalg.norm(gradient.ravel())

    wanted = [v for v in VECTORS["loss_vectors"] if v["inputs"] == inputs]
    return jax.jit(lambda: {v["name"]: of(v["config"]) for v in wanted})()


@pytest.mark.parametrize("name", NAMES)
def test_loss_is_that_of_the_vectors(name):
    vector = VECTORS["loss_vectors"][NAMES.index(name)]
    terms, norm = losses_of(vector["inputs"])[name]
    expected = dict(vector["expected"])
    assert abs(float(norm) - expected.pop("dtotal_dlogits_l2")) < 1e-5
    assert set(expected) == set(terms)
    for key, value in expected.items():
        got = np.asarray(terms[key], np.float64)
        np.testing.assert_allclose(
            got.reshape(np.shape(value)), value, atol=1e-5, err_msg=key
        )


def test_the_first_token_of_the_solution_is_supervised_on_demand():
    *batch, logits, cand_logits = arrays("A")
    tokens, start = batch[:2]
    terms = {
        on: loss_terms(
            *batch,
            logits,
            cand_logits,
            aux_weight=0.0,
            loc_weight=0.5,
            num_passes=2,
            supervise_first=on,
        )
        for on in (False, True)
    }
    n = float(terms[False]["supervised_tokens"])
    assert float(terms[True]["supervised_tokens"]) == n + len(tokens)
    at = 3 * start + 3 - 1  # The last placeholder predicts the row.
    rows = np.arange(len(tokens))
    z = logits[0, rows, at].astype(np.float64)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    more = -0.5 * log_p[rows, tokens[rows, at + 1]].sum()
    before = float(terms[False]["ce_loss"]) * n
    wanted = (before + more) / (n + len(tokens))
    assert abs(float(terms[True]["ce_loss"]) - wanted) < 1e-5


@pytest.mark.parametrize("i", range(4))
def test_the_gate_is_that_of_the_vectors(i):
    vector = VECTORS["gate"][i]
    logits = jnp.array(vector["logits"], jnp.float32)
    terms = gate_terms(logits, jnp.array(vector["masks"]), vector["n"])
    for key, values in terms.items():
        wanted = [cell[key] for cell in vector["cells"]]
        np.testing.assert_allclose(values, wanted, atol=1e-5, err_msg=key)
    assert np.all(np.asarray(terms["shape_kl"]) > -1e-6)
    excess = float(jnp.mean(terms["ce"] - terms["log_size"]))
    assert abs(excess - vector["mean_excess"]) < 1e-5
    for slack, promoted in vector["promote_at_slack"].items():
        assert (excess <= float(slack)) == promoted


def test_leaks_of_huge_logits_are_finite():
    logits = jnp.array([[0.0, 1e4, -1e4, 0.0, 0.0, 0.0]])
    assert float(leaks(logits, jnp.array([1]), 4)[0]) == 0.0
    lost = float(leaks(logits, jnp.array([2]), 4)[0])
    assert abs(lost - 30 * math.log(10)) < 1e-3
    assert np.isfinite(jax.grad(lambda z: leaks(z, jnp.array([2]), 4)[0])(logits)).all()


# --- The recurrence -----------------------------------------------------------------

RECURRENCE = VECTORS["recurrence"]


def toy(tokens, weights):
    """The toy model of the vectors: causal running means."""
    e, w, pos = weights
    length = tokens.shape[1]

    def forward(latents, positions, active, key):
        del key
        x = e[tokens]
        for k in range(positions.shape[1]):
            here = (jnp.arange(length) == positions[:, k, None]) & active[:, k, None]
            x = jnp.where(here[..., None], latents[:, k, None], x)
        mean = jnp.cumsum(x + pos, 1) / jnp.arange(1, length + 1)[:, None]
        return jnp.tanh(mean @ w)

    return forward


@functools.cache
def recurrences():
    """What all vectors ask for, compiled at once."""
    tokens, start, *_ = arrays(RECURRENCE["inputs"])
    head = {k: jnp.array(v, jnp.float32) for k, v in RECURRENCE["noise_head"].items()}
    e, w, pos, g = (
        jnp.array(RECURRENCE[k], jnp.float32) for k in ("E", "W", "pos", "G")
    )

    def of(vector):
        keys = ("num_passes", "mode", "trunc", "noise")
        config = LatentConfig(**{key: vector[key] for key in keys})

        @functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
        def total(w, e, wmu):
            def noise_head(z, j):
                mu = z @ wmu[j] + head["bmu"][j]
                return mu, z @ head["Wls"][j] + head["bls"][j]

            forward = toy(tokens[:, :-1], (e, w, pos))
            latents = build_latents(
                forward,
                start,
                jnp.array(vector["levels"]),
                3,
                config,
                noise_head=noise_head if vector["noise"] else None,
                eps=head["eps"],
                d_latent=3,
            )
            return jnp.sum(latents.values * g), (latents, forward(*latents[:3], None))

        (_, (latents, hidden)), gradients = total(w, e, head["Wmu"])
        at = latents.positions[..., None]
        return {
            "latent_vals": latents.values,
            "slot_pos": latents.positions,
            "active": latents.active,
            "last_sigma": latents.sigma,
            "grad_W": gradients[0],
            "grad_E": gradients[1],
            "grad_Wmu": gradients[2],
            "readout_hidden_at_slots": jnp.take_along_axis(hidden, at, 1),
        }

    return jax.jit(lambda: [of(vector) for vector in RECURRENCE["vectors"]])()


@pytest.mark.parametrize("i", range(9))
def test_thoughts_are_those_of_the_vectors(i):
    expected, got = RECURRENCE["vectors"][i]["expected"], recurrences()[i]
    assert set(expected) <= set(got)
    for key, value in expected.items():
        got_value = np.asarray(got[key], np.float64)
        np.testing.assert_allclose(got_value, value, atol=2e-5, err_msg=key)


def test_noise_is_drawn_by_its_own_keys():
    tokens, start, levels, *_ = arrays("A")
    e, w, pos = (jnp.array(RECURRENCE[k], jnp.float32) for k in ("E", "W", "pos"))
    seen = []
    inner = toy(tokens[:, :-1], (e, w, pos))

    def forward(latents, positions, active, key):
        seen.append(jax.random.key_data(key).tolist())
        return inner(latents, positions, active, key)

    def build(noise, eps=None):
        return build_latents(
            forward,
            start,
            levels,
            3,
            LatentConfig(noise=noise),
            rng=jax.random.key(5),
            noise_head=lambda z, j: (z, jnp.zeros_like(z) - j),
            eps=eps,
        )

    build(noise=False)
    plain = jax.random.key_data(jax.random.key(5)).tolist()
    assert seen == [plain] * 3  # One key for all passes.
    seen.clear()
    drawn = build(noise=True)
    passes = jax.random.split(jax.random.key(5), 3)
    pairs = [jax.random.split(key) for key in passes]
    assert seen == [jax.random.key_data(dropout).tolist() for dropout, _ in pairs]
    eps = [jax.random.normal(noise, (2, 3)) for _, noise in pairs]
    np.testing.assert_allclose(drawn.values, build(True, eps).values, atol=1e-6)
    assert abs(float(drawn.sigma) - math.exp(-2)) < 1e-6  # The last pass's alone.


# --- Schedule and optimizer ---------------------------------------------------------


@pytest.mark.parametrize("i", range(3))
def test_schedule_is_that_of_the_vectors(i):
    vector = VECTORS["lr_schedule"][i]

    def schedule(hold):
        return lr_schedules.warmup_cosine_floor(
            vector["warmup"], vector["lr"], vector["final"], vector["end_factor"], hold
        )

    for n, wanted in zip(vector["steps"], vector["expected"], strict=True):
        assert abs(schedule(False)(n + 1) - wanted) < 1e-6 * vector["lr"] + 1e-12
        if n > vector["final"]:
            floor = vector["lr"] * vector["end_factor"]
            assert abs(schedule(True)(n + 1) - floor) < 1e-12


def test_adamw_with_clipping_is_that_of_the_vectors():
    vector = VECTORS["adamw_clip"]
    names = ("b1", "b2", "eps")
    optimizer = optimizers.AdamW(
        weight_decay_rate=vector["weight_decay"],
        clip_grad_norm=vector["clip"],
        **{name: vector[name] for name in names},
    )

    def floats(tree):
        return {k: jnp.array(v, jnp.float32) for k, v in tree.items()}

    weights = floats(vector["params"])
    slots, opt_params = optimizer.tree_init(weights)
    for step, (grads, rate, wanted) in enumerate(
        zip(
            vector["grads"],
            vector["lr_by_update"],
            vector["params_after_each"],
            strict=True,
        ),
        start=1,
    ):
        opt_params = {**opt_params, "learning_rate": jnp.float32(rate)}
        weights, slots, _ = optimizer.tree_update(
            step, floats(grads), weights, slots, opt_params
        )
        for key, value in wanted.items():
            np.testing.assert_allclose(weights[key], value, atol=2e-6)


# --- Layers -------------------------------------------------------------------------


def batch_of(name="A"):
    tokens, start, levels, candidates, *_ = arrays(name)
    solution = np.zeros((len(tokens), 16), np.int32)
    return tokens, solution, start[:, None], levels[:, None], candidates


def whole(config, noise_head=False, n_latents=3):
    lm = models.LatentTransformerLM(
        4, n_latents, 8, 8, 1, 2, dropout=0.0, noise_head=noise_head
    )
    return Serial(LatentThoughts(lm, config), LatentThoughtLoss(config))


def test_layers_compute_the_loss_of_the_functions():
    settings = dict(leak_weight=0.3, loc_weight=0.5, noise=True, n_draws=2)
    config = LatentConfig(num_passes=1, **settings)
    layer, batch = whole(config, noise_head=True), batch_of()
    thoughts, loss_layer = layer.sublayers
    wanted, state = thoughts.weights_and_state_signature(signature(batch))
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda s: rng.normal(size=s.shape).astype("f"), wanted)
    *most, c = weights[0][1]
    weights = ((weights[0][0], (*most[:2], 0 * most[2], 0 * c - 3)),)

    @jax.jit
    def run(key):
        outs, _ = thoughts.pure_fn(batch, weights, state, key)
        loss, _, emitted = loss_layer.apply(outs, (), (), None)
        terms = loss_terms(batch[0], *batch[2:], *outs[:2], num_passes=1, **settings)
        return outs[:3], loss, dict(emitted), terms

    (logits, cand_logits, sigma), loss, emitted, terms = run(jax.random.key(3))
    assert logits.shape == (2, 2, 50, 6) and cand_logits.shape == (2, 2, 3, 16, 4)
    assert not np.allclose(logits[0], logits[1])
    assert abs(float(sigma) - math.exp(-3)) < 1e-6
    assert abs(float(loss) - float(terms["total"])) < 1e-5
    for name in ("ce_loss", "aux_loss", "leak_loss"):
        assert abs(float(emitted[name][0]) - float(terms[name])) < 1e-5
    assert float(emitted["weight"]) == float(terms["supervised_tokens"])
    with thinking(num_passes=2, noise=False):
        assert thoughts.config == LatentConfig(2, **settings | {"noise": False})
    with pytest.raises(LayerError, match="need a random key, got rng=None"):
        jax.eval_shape(lambda: thoughts.pure_fn(batch, weights, state, None))


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(num_passes=4), "num_passes=4, but there are only 3 slots"),
        (dict(mode="levle"), "mode of latent thoughts must be one of .* got 'levle'"),
        (dict(objective="max"), "objective of latent thoughts must be one of"),
        (dict(num_passes=-1), "num_passes must not be negative, got -1"),
        (dict(trunc=-2), "trunc must not be negative, got -2"),
        (dict(n_draws=0), "n_draws must be at least 1, got 0"),
    ],
)
def test_settings_that_cannot_work_are_told(settings, message):
    with pytest.raises(ConfigError, match=message):
        loss_terms(*arrays("A"), **settings)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(leak_weight=0.5), "leak_weight=0.5 .* with n_latents=0 the batches"),
        (dict(num_passes=1), "num_passes=1, but there are only 0 slots"),
        (dict(noise=True), "noise=True makes thoughts random, but n_latents is 0"),
    ],
)
def test_what_needs_slots_is_refused_without_any(settings, message):
    with pytest.raises(ConfigError, match=message):
        loss_terms(*arrays("Z"), **settings)
    with pytest.raises(ConfigError, match=message):
        build_latents(None, jnp.array([5]), jnp.array([3]), 0, LatentConfig(**settings))


def test_models_that_do_not_think_are_refused():
    with pytest.raises(TypeError, match="needs a model of 4 inputs .* got Serial"):
        LatentThoughts(models.MLP())
    with pytest.raises(ValueError, match="reduce must be one of .* got 'max'"):
        LatentThoughtLoss(reduce="max")
    with pytest.raises(ValueError, match="noise=True needs a model with a noise head"):
        build_latents(
            lambda *_: jnp.zeros((1, 20, 2)),
            jnp.array([5]),
            jnp.array([3]),
            1,
            LatentConfig(noise=True),
            eps=jnp.zeros((1, 1, 2)),
        )


@pytest.mark.parametrize("p", [0.3, 0.49, 0.51, 0.8])
def test_candidates_are_what_the_head_holds_for_more_likely_than_not(p):
    x = np.linspace(-6, 6, 100_001)
    loss = 5.0 * p * np.logaddexp(0, -x) + (1 - p) * np.logaddexp(0, x)
    best = x[loss.argmin()]
    assert bool(read_candidates(jnp.float32(best), 5.0)) == (p > 0.5)
    assert best > 0  # Where a threshold of 0 would see all four.

"""Several devices against one, and against JAX and NumPy without retrax.

The processes with several CPU devices run several_devices_run.py; it saves numbers, and
here they are judged.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from retrax.trainer import step_rngs

SCRIPT = Path(__file__).with_name("several_devices_run.py")
LIMIT = 240
QUICKLY = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
COMPILES_QUICKLY = True


def script():
    spec = importlib.util.spec_from_file_location("several_devices_run", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUN = script()
batches_of = RUN.batches_of


def results_of(group, folder):
    output = folder / f"{group}.npz"
    flags = os.environ.get("XLA_FLAGS", "")
    flags += " --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, group, output],
        env={**os.environ, **QUICKLY, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(output) as found:
        return dict(found)


@pytest.fixture(scope="module")
def equal(tmp_path_factory):
    return results_of("equal", tmp_path_factory.mktemp("equal"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return results_of("other", tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def evaluations(tmp_path_factory):
    return results_of("evaluations", tmp_path_factory.mktemp("evaluations"))


def leaves(results, prefix):
    return [results[f"{prefix}{i}"] for i in range(100) if f"{prefix}{i}" in results]


def close(got, want):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want) > 0
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-6)


# --- The oracle: the same models in plain JAX, the whole batch on one device ---------


def scores_of(weights, x):
    w1, b1, *middle, w2, b2 = weights
    h = x @ w1 + b1
    moments = ()
    if middle:
        bias, scale = middle
        moments = (jnp.mean(h, 0), jnp.mean((h - jnp.mean(h, 0)) ** 2, 0))
        h = (h - moments[0]) / jnp.sqrt(moments[1] + 1e-5) * scale + bias
    return jnp.tanh(h) @ w2 + b2, moments


def cross_entropy(weights, x, labels, q=None):
    scores, moments = scores_of(weights, x)
    each = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
    q = jnp.ones(len(x)) if q is None else q
    return jnp.sum(each * q) / max(jnp.sum(q), 1e-9), moments


def fn_loss(weights, x, labels, q):
    scores, moments = scores_of(weights, x)
    hit = scores[jnp.arange(len(x)), labels]
    return jnp.mean((hit - jnp.tanh(q)) ** 2), moments


def plain_steps(initial, batches, loss=cross_entropy, optimizer=None):
    """(losses, weights, moments of each step)."""
    optimizer = optimizer or optax.sgd(0.3)
    weights, all_moments, losses = [jnp.asarray(w) for w in initial], [], []
    state = optimizer.init(weights)
    for batch in batches:
        (value, moments), grads = jax.value_and_grad(loss, has_aux=True)(
            weights, *batch
        )
        updates, state = optimizer.update(grads, state)
        weights = optax.apply_updates(weights, updates)
        losses.append(value)
        all_moments.append(moments)
    return np.array(losses), weights, all_moments


SETTINGS = {
    "plain": (RUN.EVEN, False, cross_entropy),
    "plain_uneven": (RUN.UNEVEN, False, cross_entropy),
    "weighted_uneven": (RUN.UNEVEN, True, cross_entropy),
    "small": (RUN.SMALL, True, cross_entropy),
    "accumulate": (RUN.UNEVEN, True, cross_entropy),
    "fn_loss": (RUN.UNEVEN, True, fn_loss),
    "batch_norm": (RUN.UNEVEN, True, cross_entropy),
    "pmap": (RUN.UNEVEN, True, cross_entropy),
}


@pytest.mark.parametrize(
    ("name", "n"),
    [("weighted_uneven", 1), ("batch_norm", 1)]
    + [(s, n) for s in SETTINGS for n in (2, 4)],
)
def test_any_number_of_devices_gives_the_numbers_of_plain_jax(equal, name, n):
    sizes, weighted, loss = SETTINGS[name]
    optimizer = optax.adam(0.01) if name == "plain" else None
    prefix = f"{name}/{n}/"
    losses, weights, moments = plain_steps(
        leaves(equal, prefix + "initial"), batches_of(sizes, weighted), loss, optimizer
    )
    close(equal[prefix + "losses"], losses)
    close(leaves(equal, prefix + "weights"), weights)
    if name == "batch_norm":
        mean, var = np.zeros(6), np.ones(6)
        for batch_mean, batch_var in moments:
            mean, var = (mean + batch_mean) / 2, (var + batch_var) / 2
        got_mean, got_var, n_batches = leaves(equal, prefix + "state")
        close([got_mean[0], got_var[0]], [mean, var])
        assert n_batches == len(sizes)


def test_the_weights_of_the_test_leave_one_device_without_any():
    shards = [shard.sum() for shard in np.split(batches_of([8])[0][2], 4)]
    assert shards[0] == 0 and shards[1] > 5 * max(shards[2:])


# --- Other ways to agree -------------------------------------------------------------


def test_reduce_mean_is_the_mean_over_devices(other):
    weights = [jnp.asarray(w) for w in leaves(other, "mean/initial")]
    losses = []
    for batch in batches_of(RUN.EVEN):
        halves = [[x[:4] for x in batch], [x[4:] for x in batch]]
        found = [
            jax.value_and_grad(cross_entropy, has_aux=True)(weights, *half)
            for half in halves
        ]
        losses.append(np.mean([value for (value, _), _ in found]))
        grads = jax.tree.map(lambda a, b: (a + b) / 2, found[0][1], found[1][1])
        weights = jax.tree.map(lambda w, g: w - 0.3 * g, weights, grads)
    close(other["mean/losses"], np.array(losses))
    close(leaves(other, "mean/weights"), weights)


def test_adasum_of_two_equal_halves_is_one_of_them(other):
    close(leaves(other, "adasum_twice/weights"), leaves(other, "adasum_half/weights"))
    close(other["adasum_twice/losses"], other["adasum_half/losses"])
    moved = (
        leaves(other, "adasum_half/weights")[0]
        - leaves(other, "adasum_half/initial")[0]
    )
    assert np.abs(moved).max() > 1e-3


def test_random_numbers_differ_between_devices(other):
    key = jax.random.key(RUN.RNG_SEED)
    draws = []
    for i in range(4):
        forward, _ = step_rngs(jax.random.fold_in(key, i), 1)
        draws.append(jax.random.uniform(jax.random.split(forward, 3)[0], (1, 1)).item())
    assert len(set(draws)) == 4
    np.testing.assert_allclose(other["draws"], np.mean(draws), rtol=1e-6)


# --- State ---------------------------------------------------------------------------


def test_state_that_changes_without_a_declaration_is_refused_by_path(other):
    text = str(other["undeclared"])
    assert text.startswith("ConfigError")
    for part in ("1.Serial/0.Counter", "2 devices", "state_sync", "'mean'", "'sum'"):
        assert part in text


def test_state_that_is_declared_or_does_not_change_is_fine(other):
    (unchanged,) = leaves(other, "unchanged/state")
    assert unchanged == 0
    (alone,), (summed,) = (
        leaves(other, "undeclared_one/state"),
        leaves(other, "summed/state"),
    )
    w, b = leaves(other, "summed/initial")[:2]
    ((x, _),) = batches_of([8], weighted=False)
    expected = (np.float64(x) @ w + b).sum()
    np.testing.assert_allclose([alone, summed], expected, rtol=1e-5)


GOLDEN = json.loads((SCRIPT.parent / "vectors/pax_public.json").read_text())


@pytest.mark.parametrize("vector", GOLDEN["train_steps"], ids=lambda v: v["name"])
def test_golden_weighted_steps(other, vector):
    wanted, prefix = vector["expected"], f"golden/{vector['name']}/"
    values = {n: wanted[n] for n in ("loss", "moving_mean", "grad_norm", "per_example")}
    values |= wanted["params"]
    values |= {f"metrics/{n}": pair for n, pair in wanted["metrics"].items()}
    for name, value in values.items():
        got = other[prefix + name]
        np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("n", [2, 4])
def test_one_bad_device_makes_all_skip(other, n):
    kept = other[f"bad/{n}/kept"]
    assert list(other[f"bad/{n}/skipped"]) == [0, 1, 1]
    assert float(other[f"bad/{n}/scale"]) == 128.0
    np.testing.assert_array_equal(kept, np.repeat(kept[:, :1], kept.shape[1], 1))
    np.testing.assert_array_equal(kept[0], kept[1])
    assert np.isfinite(kept).all() and not np.array_equal(kept[1], kept[2])


# --- What a person sees --------------------------------------------------------------


def test_more_devices_than_there_are_says_so(other):
    assert "n_devices=5 but there are 4 (cpu)" in str(other["too_many"])
    assert "xla_force_host_platform_device_count=5" in str(other["too_many"])


def test_weights_that_are_held_stay_readable_and_can_be_set_back(other, equal):
    assert other["held"]
    close(other["loss_again"], equal["weighted_uneven/4/losses"][0])


# --- Evaluation and whole runs -------------------------------------------------------


def numpy_metrics(w, b):
    x, labels, q = (
        np.concatenate(parts) for parts in zip(*batches_of([8, 7, 3]), strict=True)
    )
    scores = np.float64(x) @ w + b
    each = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(x)), labels]
    hits = (scores.argmax(1) == labels).mean()
    return {"loss": (each * q).sum() / q.sum(), "accuracy": hits, "hits": hits}


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("backend", ["shard_map", "pmap"])
@pytest.mark.parametrize("kind", ["told", "untold"])
def test_metrics_do_not_depend_on_the_devices(evaluations, n, backend, kind):
    expected = numpy_metrics(*leaves(evaluations, "eval_weights"))
    names = ["loss", "accuracy"] + ["hits"] * (kind == "untold")
    for name in names:
        got = evaluations[f"eval/{n}/{backend}/{kind}/{name}"]
        np.testing.assert_allclose(got, expected[name], rtol=1e-6)


def test_a_run_on_four_devices_goes_on_on_one_with_the_same_numbers(evaluations):
    assert (
        evaluations["trainer/4/step"] == 3 and evaluations["trainer/4 then 1/step"] == 5
    )
    for metric in ("loss", "accuracy"):
        got = evaluations[f"trainer/4 then 1/{metric}"]
        assert len(got) == 5  # After steps 1, 2, 3 (the first run's end), 4 and 5.
        # The run that was not stopped has no evaluation after step 3.
        alone = evaluations[f"trainer/1/{metric}"]
        np.testing.assert_allclose(np.delete(got, 2), alone, rtol=1e-5)
    close(
        leaves(evaluations, "trainer/4 then 1/leaf"),
        leaves(evaluations, "trainer/1/leaf"),
    )

"""Layer-by-layer training against StepTrainer, which keeps everything on the device."""

import functools
import importlib.metadata
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import data, optimizers
from retrax import layers as tl
from retrax.errors import ConfigError
from retrax.shapes import signature
from retrax.trainer import (
    ReversibleSerialTrainer,
    RunLog,
    StepTrainer,
    Trainer,
    extract_reversible_blocks,
    init_reversible_blocks,
)
from retrax.trainer.state import restore_step_trainer, step_trainer_payload
from retrax.trainer.structure import fingerprint

KEY = jax.random.key(5)
WIDTH, CLASSES = 4, 3
SCRIPT = Path(__file__).with_name("reversible_devices_run.py")
EXACT_SCRIPT = Path(__file__).with_name("exact_run.py")


def batches(n, rows=6):
    rng = np.random.default_rng(0)
    return [
        (
            rng.normal(size=(rows, 5)).astype(np.float32),
            rng.integers(0, CLASSES, rows).astype(np.int32),
            rng.uniform(size=rows).astype(np.float32),
        )
        for _ in range(n)
    ]


def half(*before):
    return tl.ReversibleHalfResidual(*before, tl.Dense(WIDTH), tl.Tanh())


def block():
    """Dropout and BatchNorm: keys and state have to be right in reverse too."""
    return [
        half(tl.Dropout(0.3)),
        tl.ReversibleSwap(),
        half(tl.BatchNorm(axis=0, momentum=0.5)),
        tl.ReversibleSwap(),
    ]


def standard():
    return tl.Serial(
        tl.Dense(WIDTH),
        tl.Dropout(0.2),
        tl.Residual(tl.BatchNorm(axis=0, momentum=0.5), tl.Dense(WIDTH)),
        tl.Repeat(lambda: [tl.Dense(WIDTH), tl.Tanh()], 2),
        tl.Dense(CLASSES),
    )


def mixed():
    return tl.Serial(
        tl.Dense(WIDTH),
        tl.Dup(),
        tl.Serial(block()[:2]),
        tl.Fn("Scale", lambda x, y: (0.5 * x, y), n_out=2),
        tl.Repeat(block, 2),
        tl.Concatenate(),
        tl.Dense(CLASSES),
    )


def small():
    return tl.Serial(tl.Dense(WIDTH), tl.Dup(), half(), tl.Add(), tl.Dense(CLASSES))


def with_loss(model, loss=None, batch=None):
    model = tl.Serial(model, loss or tl.WeightedCategoryCrossEntropy())
    model.init(signature(batch or batches(1)[0]), rng=jax.random.key(1))
    return model


def layered(model, optimizer, **options):
    return ReversibleSerialTrainer.from_model(model, optimizer, 1, **options)


def plain(model, optimizer, **options):
    return StepTrainer(model, optimizer, n_devices=1, **options)


def trained(trainer, model, data):
    losses = [float(trainer.one_step(batch, KEY)[0]) for batch in data]
    leaves = jax.tree.leaves((model.weights, model.state))
    return np.array(losses), [np.asarray(x) for x in leaves]


def assert_same(a, b, bound):
    np.testing.assert_allclose(a[0], b[0], rtol=bound, atol=bound)
    for x, y in zip(a[1], b[1], strict=True):
        np.testing.assert_allclose(x, y, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    "make, bound", [(standard, 2e-6), (mixed, 2e-5)], ids=["standard", "mixed"]
)
def test_twenty_steps_are_those_of_step_trainer(make, bound):
    data = batches(20)
    models = [with_loss(make()) for _ in range(2)]
    adam = functools.partial(optimizers.Adam, 1e-2)
    expected = trained(plain(models[0], adam()), models[0], data)
    deep = layered(models[1], adam(), check_reverse=make is mixed)
    assert_same(trained(deep, models[1], data), expected, bound)


@pytest.mark.skipif(
    not importlib.metadata.version("jaxlib").startswith("0.10."),
    reason="flags of XLA's debugging are known for this version",
)
def test_random_standard_chains_are_equal_in_every_bit():
    # A program of one layer fuses other operations, and contracts other products and
    # sums, than one of the whole model. With that out of the way nothing may differ.
    flags = "--xla_cpu_max_isa=AVX --xla_disable_hlo_passes=fusion"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    done = subprocess.run(
        [sys.executable, "-W", "error", EXACT_SCRIPT, "5", "7"],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    chains = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(chains) == 2
    kinds = {kind for found in chains for kind in found["kinds"]}
    assert kinds >= {"batch_norm", "residual", "repeat", "tanh", "nested"}
    for found in chains:
        assert found["differ"] == 0 and found["moved"] > 0.1, found


def test_weights_can_be_set_and_a_checkpoint_goes_on_where_it_was_saved():
    models = [with_loss(small()) for _ in range(2)]
    deep, other = (layered(m, optimizers.Momentum(0.1)) for m in models)
    data = batches(3)
    trained(deep, models[0], data)
    restore_step_trainer(other, step_trainer_payload(deep))
    goes_on = [t.one_step(data[0], KEY, 4) for t in (deep, other)]
    assert goes_on[0][0] == goes_on[1][0]
    for a, b in zip(*map(jax.tree.leaves, (deep.carry, other.carry)), strict=True):
        np.testing.assert_array_equal(a, b)
    models[1].weights = jax.tree.map(jnp.zeros_like, models[1].weights)
    np.testing.assert_allclose(other.one_step(data[0], KEY)[0], np.log(3), rtol=1e-6)
    stats = goes_on[0][1]
    squares = [float(v) ** 2 for k, v in stats.items() if k.endswith("/gradients_l2")]
    np.testing.assert_allclose(stats["gradients_l2"], np.sqrt(sum(squares)), rtol=1e-5)
    assert stats["host_memory_bytes"] > 1e6


def test_equal_layers_share_programs():
    n_programs = []
    for n in (2, 4):
        layers = [tl.Dense(WIDTH), tl.Dup()]
        layers += [x for _ in range(n) for x in (half(), tl.ReversibleSwap())]
        model = with_loss(tl.Serial(layers, tl.Add(), tl.Dense(CLASSES)))
        trainer = layered(model, optimizers.SGD(0.1))
        trainer.one_step(batches(1)[0], KEY)
        n_programs.append(trainer.n_programs)
    assert n_programs[0] == n_programs[1]


def test_fingerprints_look_at_every_sublayer():
    """What lies deep or late counts as well, whatever was looked at before."""

    def chains(n):
        def last():
            return tl.Dense(n)

        return [
            tl.Serial(tl.Dense(3), last()),
            tl.Serial(tl.LayerNorm(), tl.Dense(3), tl.Relu(), last()),
            tl.Residual(tl.LayerNorm(), tl.Dense(3), tl.Serial(tl.Relu(), last())),
            tl.Serial(tl.Dropout(0.1), tl.Dropout(0.1), tl.Dropout(n / 10)),
            tl.Branch(tl.Dense(3), tl.Serial(last(), tl.Tanh())),
        ]

    made = [(n, i, layer) for n in (3, 4, 3, 5) for i, layer in enumerate(chains(n))]
    for n, i, a in made:
        for m, j, b in made:
            assert (fingerprint(a) == fingerprint(b)) == ((n, i) == (m, j))


def test_fingerprints_tell_layers_apart_that_print_alike():
    def fn(c):
        return tl.PureLayer(lambda x: x * c, name="Scale")

    assert fingerprint(fn(1.0)) == fingerprint(fn(1.0))
    assert fingerprint(fn(1.0)) != fingerprint(fn(2.0))
    assert fingerprint(fn(np.ones(2))) != fingerprint(fn(np.zeros(2)))
    assert fingerprint(half()) == fingerprint(half())
    assert fingerprint(tl.Dropout(0.1)) != fingerprint(tl.Dropout(0.2))
    assert fingerprint(fn(object())) != fingerprint(fn(object()))


def test_a_gradient_that_is_not_finite_changes_nothing():
    """The first layer's, which comes last, when all others were updated already."""
    x, *rest = batches(1)[0]
    model = with_loss(small())
    trainer = layered(model, optimizers.Momentum(0.1))
    trainer.one_step((x, *rest), KEY)
    (inner, loss) = model.weights
    model.weights = ((jax.tree.map(np.zeros_like, inner[0]), *inner[1:]), loss)
    before = jax.tree.map(np.array, trainer.carry)
    loss, stats = trainer.one_step((x * 0 + 1e25, *rest), KEY)
    assert np.isfinite(loss) and not stats["grads_finite"]
    assert np.isfinite(stats["layer1/gradients_l2"])
    after = trainer.carry
    assert after.n_skipped == 1 == stats["skipped_steps"]
    for a, b in zip(*map(jax.tree.leaves, (before[:3], after[:3])), strict=True):
        np.testing.assert_array_equal(a, b)
    _, stats = trainer.one_step((x, *rest), KEY)
    assert stats["grads_finite"]


def test_clipping_by_the_norm_of_all_gradients():
    optimizer = optimizers.SGD(0.5, clip_grad_norm=0.1)
    with pytest.raises(ConfigError, match="two_pass"):
        layered(with_loss(small()), optimizer)
    models = [with_loss(small()) for _ in range(3)]
    data = batches(3)
    expected = trained(plain(models[0], optimizer), models[0], data)
    exact = layered(models[1], optimizer, global_norm="two_pass")
    assert_same(trained(exact, models[1], data), expected, 1e-6)
    each = layered(models[2], optimizer, global_norm="per_layer")
    _, found = trained(each, models[2], data)
    pairs = zip(found, expected[1], strict=True)
    assert max(np.abs(a - b).max() for a, b in pairs) > 1e-3


def test_frozen_layers_keep_their_bits():
    def frozen():
        model = small()
        model.sublayers[2].trainable = False
        return with_loss(model)

    models, data = [frozen(), frozen()], batches(3)
    before = jax.tree.leaves(models[0].weights[0][2])
    expected = trained(plain(models[0], optimizers.Adam(0.1)), models[0], data)
    deep = layered(models[1], optimizers.Adam(0.1), skip_nonfinite=False)
    assert_same(trained(deep, models[1], data), expected, 1e-5)
    for a, b in zip(before, jax.tree.leaves(models[1].weights[0][2]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not any("HalfResidual" in path for path in deep.trainable_paths())


@pytest.mark.parametrize("chunk", [4, 7])
def test_a_loss_in_chunks_of_tokens_is_exact(chunk):
    rng = np.random.default_rng(1)
    batch = (
        rng.normal(size=(3, 5, WIDTH)).astype(np.float32),
        rng.integers(0, CLASSES, (3, 5)).astype(np.int32),
        rng.uniform(size=(3, 5)).astype(np.float32),
    )

    def model():
        layers = (tl.Dup(), half(), tl.Add(), tl.Mean(axis=1, keepdims=True))
        mixing = tl.Residual(tl.Serial(layers))
        return with_loss(tl.Serial(mixing, tl.Dense(CLASSES)), batch=batch)

    models = [model(), model()]
    expected = trained(plain(models[0], optimizers.SGD(0.3)), models[0], [batch] * 2)
    parts = layered(models[1], optimizers.SGD(0.3), loss_chunk_size=chunk)
    assert_same(trained(parts, models[1], [batch] * 2), expected, 1e-6)
    assert parts.units[-1].chunk == chunk


def test_a_loss_without_weights_is_not_cut():
    batch = batches(1)[0]
    loss = tl.Fn("Loss", lambda scores, y, w: jnp.mean(scores**2))
    trainer = layered(with_loss(small(), loss), optimizers.SGD(), loss_chunk_size=4)
    with pytest.raises(ConfigError, match="does not say what a batch weighs"):
        trainer.one_step(batch, KEY)


def test_blocks_in_trax_form():
    first, rev, last = tl.Dense(WIDTH), [half(), tl.ReversibleSwap()], tl.Dense(CLASSES)
    loss = tl.Serial(tl.Add(), last, tl.WeightedCategoryCrossEntropy())
    blocks = [([first, tl.Dup()], rev)]
    batch = batches(1)[0]
    init_reversible_blocks(blocks, loss, signature(batch), jax.random.key(1))
    trainer = ReversibleSerialTrainer(
        blocks,
        loss,
        functools.partial(optimizers.SGD, 0.5),
        n_devices=1,
        memoize_jit=False,
        free_accelerators_on_step=True,
    )
    losses = [float(trainer.one_step(batch, KEY)[0]) for _ in range(3)]
    assert losses[2] < losses[0]
    assert [u.kind for u in trainer.units] == ["standard", "reversible", "loss"]
    assert last.weights[0].shape == (WIDTH, CLASSES)


def test_extraction_finds_what_it_can_and_says_what_it_cannot():
    model = tl.Serial(mixed(), tl.WeightedCategoryCrossEntropy())
    blocks, loss = extract_reversible_blocks([model])
    assert [len(rev) for _, rev in blocks] == [2, 2]
    assert loss.sublayers[-1] is model.sublayers[-1]
    assert blocks.unused == []
    hidden = tl.Serial(tl.Branch(half(), tl.Select([0, 1])), tl.L2Loss())
    assert "inside of Parallel" in extract_reversible_blocks(hidden)[0].unused[0][1]


class Wrong(tl.ReversibleLayer):
    def forward(self, x):
        return x * 2

    def reverse(self, output, weights=(), state=(), new_state=(), rng=None):
        return output / 2 + 0.25


def test_what_cannot_work_is_refused_with_a_reason():
    loss = tl.WeightedCategoryCrossEntropy()
    with pytest.raises(ValueError, match="final layer must be a standard loss"):
        extract_reversible_blocks([small(), tl.ReversibleSwap()])
    with pytest.raises(TypeError, match=r"optimizer_fn must be a function .* lambda"):
        ReversibleSerialTrainer([], loss, optimizers.SGD(0.1))
    with pytest.raises(TypeError, match="block 0 must be"):
        ReversibleSerialTrainer([tl.Dense(3)], loss, optimizers.SGD)
    with pytest.raises(ValueError, match="block 0: Dense_3 is among"):
        ReversibleSerialTrainer([([], [tl.Dense(3)])], loss, optimizers.SGD)
    shared = tl.Dense(WIDTH)
    twice = with_loss(
        tl.Serial(shared, shared, tl.Dense(CLASSES)),
        batch=(np.ones((6, WIDTH), np.float32), *batches(1)[0][1:]),
    )
    with pytest.raises(ConfigError, match=r"at 0\.Serial/0\.Dense and at 0\.Serial/1"):
        layered(twice, optimizers.SGD())
    with pytest.raises(ConfigError, match="global_norm must be one of"):
        layered(with_loss(small()), optimizers.SGD(), global_norm="exact")
    wrong = with_loss(tl.Serial(tl.Dense(WIDTH), Wrong(), tl.Dense(CLASSES)))
    trainer = layered(wrong, optimizers.SGD(), check_reverse=True)
    with pytest.raises(ValueError, match=r"Wrong at 0\.Serial/1\.Wrong .* is 0\.25"):
        trainer.one_step(batches(1)[0], KEY)
    no_scalar = tl.Fn("Rows", lambda scores, y, w: jnp.mean(scores, -1))
    with pytest.raises(ValueError, match=r"one number, got shape \(6,\)"):
        layered(with_loss(small(), no_scalar), optimizers.SGD()).one_step(
            batches(1)[0], KEY
        )
    with pytest.raises(ConfigError, match="has no weights yet"):
        blocks, last = extract_reversible_blocks([small(), loss])
        ReversibleSerialTrainer(blocks, last, optimizers.SGD, 1).one_step(
            batches(1)[0], KEY
        )


def test_two_devices_are_as_one(tmp_path):
    output = tmp_path / "found.npz"
    flags = os.environ.get("XLA_FLAGS", "")
    flags += " --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, output],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(output) as found:
        for name in ("losses", "weights", "uneven", "adasum"):
            np.testing.assert_allclose(
                found[f"layered {name}"], found[f"plain {name}"], rtol=2e-5, atol=2e-6
            )
        assert "state_sync" in str(found["undeclared"])


class DeepTrainer(Trainer):
    def make_step_trainer(self, model_with_loss, optimizer, **options):
        return ReversibleSerialTrainer.from_model(
            model_with_loss, optimizer, options["n_devices"]
        )


def test_a_trainer_may_train_layer_by_layer_and_resume(tmp_path):
    def model(mode):
        return tl.Serial(small().sublayers[:-1], tl.Dense(10))

    def made():
        return DeepTrainer(
            model,
            tl.CategoryCrossEntropy(),
            optimizers.Momentum(0.1),
            lambda step: 0.1,
            data.digits(batch_size=30, eval_batch_size=101, flatten=True),
            tmp_path,
            n_devices=1,
            should_write_summaries=False,
            log=RunLog(stream=io.StringIO()),
        )

    first = made()
    first.run(2, eval_frequency=2, eval_steps=1)
    first.close()
    second = made()
    assert second.step == 2
    for a, b in zip(
        *(jax.tree.leaves(t.step_trainer.carry) for t in (first, second)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    second.run(3, eval_frequency=2, eval_steps=1)
    assert second.history.get("eval", "metrics/loss")[-1][0] == 3
    second.close()


def test_all_memory_modes_of_step_trainer_train_alike():
    runs = []
    for mode in ("plain", "remat", "reversible"):
        model = with_loss(small())
        trainer = plain(model, optimizers.SGD(0.3), memory=mode)
        runs.append(trained(trainer, model, batches(2)))
    for run in runs[1:]:
        assert_same(run, runs[0], 1e-6)
    with pytest.raises(ConfigError, match="memory must be one of .* got 'less'"):
        plain(model, optimizers.SGD(), memory="less")


@pytest.mark.parametrize(("n", "rows"), [(6, 64), (72, 4)])
def test_the_device_holds_two_layers_one_block_and_the_stack_at_most(n, rows):
    """At every program: what is alive, what it gives, and its temporary memory."""
    width = 32
    layers = [tl.Dup()]
    for _ in range(n):
        half = tl.ReversibleHalfResidual(tl.Dense(width), tl.Relu())
        layers += [half, tl.ReversibleSwap()]
    x = np.ones((rows, width), np.float32)
    model = with_loss(tl.Serial(layers, tl.Add()), tl.L2Loss(), (x, x, x))
    trainer = layered(model, optimizers.Adam(1e-3))
    trainer.one_step((x, x, x), KEY)
    programs, needs, peaks = trainer._program, {}, []

    def live():
        # Copies to the host are other arrays in the same place.
        places = {x.unsafe_buffer_pointer(): x.nbytes for x in jax.live_arrays()}
        return sum(places.values())

    def watched(i, what):
        program = programs(i, what)

        def call(*args):
            key = (id(program), str(jax.tree.map(jnp.shape, args)))
            if key not in needs:
                needs[key] = program.lower(*args).compile().memory_analysis()
            memory = needs[key]
            given = memory.output_size_in_bytes - memory.alias_size_in_bytes
            peaks.append(live() - before + given + memory.temp_size_in_bytes)
            return program(*args)

        return call

    trainer._program = watched
    before = live()
    for _ in range(2):
        trainer.one_step((x, x, x), KEY)
    layer = 4 * 4 * (width * width + width)  # Weights, gradients and two slots.
    stream = rows * width * 4
    small = 4096  # Keys, counters and norms.
    # Of a block: streams before and after, their cotangents, a value inside.
    assert stream < max(peaks) <= 2 * layer + 9 * stream + 3 * stream + small
    if n > 64:  # A budget that weights and slots exceed 16 times.
        assert max(peaks) <= 3 / 4 * n * layer / 16

"""What `retrax inspect` says, against what is there and what is known beforehand."""

import gc
import itertools
import re

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import cli, optimizers
from retrax import layers as tl
from retrax.command_line.inspect import parsed_memory
from retrax.errors import ConfigError
from retrax.shapes import ShapeDtype, signature
from retrax.trainer import ReversibleSerialTrainer, StepTrainer, inspect
from retrax.trainer.inspect.layer_by_layer import needs
from retrax.trainer.inspect.reversal import reversals
from retrax.trainer.inspect.totals import totals, without_values
from retrax.trainer.inspect.walk import visits

KEY = jax.random.key(5)
ROWS, WIDTH = 96, 64
SIG = tuple(ShapeDtype((ROWS, WIDTH)) for _ in range(3))


def half():
    return tl.ReversibleHalfResidual(tl.Dense(WIDTH), tl.Tanh())


def deep(n):
    block = tl.Repeat(lambda: [half(), tl.ReversibleSwap()], n)
    model = tl.Serial(tl.Dense(WIDTH), tl.Dup(), block, tl.Add())
    return tl.Serial(model, tl.L2Loss())


def batch():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, ROWS, WIDTH)).astype(np.float32)
    return x, y, np.ones_like(x)


# --- Along the data stack -----------------------------------------------------------


def test_reads_writes_and_moves():
    found = {v.path: v for v in visits(deep(5), SIG)}
    names = "0.Dense 1.Dup 2.Repeat/block/0.ReversibleHalfResidual".split()
    names += "2.Repeat/block/1.ReversibleSwap 3.Add".split()
    assert list(found) == [f"0.Serial/{name}" for name in names] + ["1.L2Loss"]
    dense, dup, residual, swap, add, loss = found.values()
    assert (dense.reads, dense.writes, dense.moves) == ({0}, {0}, {})
    assert (dup.reads, dup.writes, dup.moves) == (set(), set(), {0: 0, 1: 0})
    assert (residual.reads, residual.writes, residual.moves) == ({0, 1}, {0}, {1: 1})
    assert (swap.reads, swap.moves) == (set(), {0: 1, 1: 0})
    assert (add.reads, add.writes, len(add.stack)) == ({0, 1}, {0}, 2)
    assert loss.reads == {0, 1, 2} and loss.outputs[0].shape == ()
    assert [v.n_times for v in found.values()] == [1, 1, 5, 5, 1, 1]
    assert [v.is_reversible for v in found.values()] == [0, 0, 1, 1, 0, 0]
    assert residual.weights[0][0][0].shape == (WIDTH, WIDTH)


def test_costs_of_layers_are_those_of_arithmetic():
    """Two dense layers, one of them at two places and one frozen."""
    b, d, h = 32, 8, 16
    shared, frozen = tl.Dense(h), tl.Freeze(tl.Dense(h))
    model = tl.Serial(tl.Dense(h), shared, tl.Relu(), shared, frozen)
    made = inspect.report(
        model, ShapeDtype((b, d)), optimizer=optimizers.Adam(), run=False, modes=()
    )
    first, one, relu, again, last, loss = made.costs
    n = 4 * (d * h + h)
    assert (first.weights, first.slots, first.kept) == (n, 2 * n, 4 * b * d)
    assert 6 * b * d * h <= first.flops <= 6 * b * d * h + 4 * b * h
    n = 4 * (h * h + h)
    assert (one.weights, one.slots, one.kept) == (n, 2 * n, 4 * b * h)
    assert (again.weights, again.slots, again.kept) == (0, 0, 4 * b * h)
    assert (last.weights, last.slots) == (n, 0)
    assert (relu.weights, relu.slots, relu.kept) == (0, 0, b * h)  # One bit a byte.
    assert first.forward_ms is None and loss.weights == 0
    assert "no loss" in made.notes[0]


# --- Predicted and real -------------------------------------------------------------


def live_bytes():
    return sum(x.nbytes for x in jax.live_arrays())


def test_a_step_holds_and_takes_what_was_predicted():
    """Live arrays, and what the step that really runs says of its memory."""
    predicted = {}
    for mode in ("plain", "reversible"):
        model = deep(12)
        (predicted[mode],) = totals(model, SIG, optimizers.Adam(), (mode,))
        assert model.weights == ((), ()) or not jax.tree.leaves(model.weights)
    gc.collect()
    before = live_bytes()
    model.init(SIG, rng=KEY)
    trainer = StepTrainer(model, optimizers.Adam(), 1, memory="reversible")
    for _ in range(2):
        trainer.one_step(jax.device_put(batch()), KEY)
    n_batch = sum(x.nbytes for x in batch())
    there = live_bytes() - before + n_batch
    assert predicted["reversible"].held == pytest.approx(there, rel=0.02)
    assert predicted["plain"].held == predicted["reversible"].held
    # Of 12 layers 'plain' keeps both streams' inputs and what tanh needs.
    stream = 4 * ROWS * WIDTH
    saved = predicted["plain"].temporary - predicted["reversible"].temporary
    assert 12 * stream <= saved <= 40 * stream


def test_precision_is_heeded():
    """Weights stay as wide; what a step takes changes (on the CPU not always down)."""
    modes = ("plain", "layer by layer")
    whole, narrow = (
        totals(deep(4), SIG, optimizers.SGD(), modes, precision)
        for precision in (None, "mixed_float16")
    )
    for a, b in zip(whole, narrow, strict=True):
        assert b.temporary != a.temporary and not b.problem
        assert 0 <= b.held - a.held <= 12  # The loss scale and its counter.
    with pytest.raises(ConfigError, match="precision must be one of .* got 'float8'"):
        totals(deep(4), SIG, optimizers.SGD(), modes, "float8")


def test_layer_by_layer_peak_is_the_real_one(monkeypatch):
    """Arrays alive before and after each program, when copies have come."""
    sig = signature(batch())
    model = deep(4)
    need = needs(without_values(model), sig, optimizers.Adam())
    model.init(sig, rng=KEY)
    options = {"free_accelerators_on_step": True}
    trainer = ReversibleSerialTrainer.from_model(model, optimizers.Adam(), 1, **options)
    trainer.one_step(batch(), KEY)
    gc.collect()
    before, peaks = live_bytes(), [0]
    find = ReversibleSerialTrainer._program

    def sample():
        trainer._visits._worker.submit(int).result()  # All before it is done.
        peaks.append(live_bytes() - before)

    def sampling(self, i, what):
        def call(*args):
            sample()
            result = jax.block_until_ready(find(self, i, what)(*args))
            sample()
            return result

        return call

    monkeypatch.setattr(ReversibleSerialTrainer, "_program", sampling)
    trainer.one_step(batch(), KEY)
    assert need.live == pytest.approx(max(peaks), rel=0.1)
    values = trainer.carry
    arrays = jax.tree.leaves((values.weights, values.state, values.slots))
    assert need.host == 2 * sum(x.nbytes for x in arrays)
    assert need.peak >= need.live > need.held == sum(x.nbytes for x in batch())


def test_what_cannot_be_trained_layer_by_layer_says_why():
    shared = tl.Dense(WIDTH)
    model = tl.Serial(shared, shared, tl.L2Loss())
    modes, clips = ("plain", "layer by layer"), optimizers.Adam(clip_grad_norm=1.0)
    made = inspect.report(
        model, SIG, optimizer=clips, memory=10, run=False, modes=modes
    )
    assert "global_norm='two_pass'" in made.notes[0]
    plain, layered = made.totals
    assert "used at 0.Dense and at 1.Dense" in layered.problem
    assert made.fitting == [] and "Nothing fits into 10 B." in made.text()
    assert "note: layer by layer: the layer Dense_64 is used" in made.text()
    assert plain.peak > 10 and not plain.fits(10, True)
    assert plain.fits(plain.peak, True) and not layered.fits(10**9, True)


# --- Reversing ----------------------------------------------------------------------


class Off(tl.ReversibleLayer):
    """Doubles, and is reversed with an error of one in a thousand."""

    def forward(self, x):
        return 2 * x

    def reverse(self, output, weights=(), state=(), new_state=(), rng=None):
        return 0.5 * 1.001 * output


def test_errors_of_reversing_are_those_planted():
    found = reversals(tl.Serial(Off(), Off(), Off()), batch()[0])
    assert [r.depth for r in found] == [1, 2, 3]
    assert [r.path for r in found] == ["2.Off", "1.Off", "0.Off"]
    expected = [1.001**k - 1 for k in (1, 2, 3)]
    np.testing.assert_allclose([r.inputs for r in found], expected, rtol=1e-3)
    assert max(r.gradients for r in found) < 1e-6  # A linear layer's are the same.


def test_gradients_that_reversing_spoils_are_warned_of():
    """Reversing divides by gamma each time, so 1e-7 becomes 1e-1 after 8 layers."""

    def model(gamma):
        residual = lambda: tl.ReversibleMomentumResidual(  # noqa: E731
            tl.Dense(8), tl.Tanh(), gamma=gamma
        )
        start = tl.Fn("Start", lambda x: (x, jnp.zeros_like(x)), n_out=2)
        return tl.Serial(start, tl.Repeat(residual, 10), tl.Add())

    x = batch()[0][:, :8]
    bad, good = (inspect.report(model(gamma), x, modes=()) for gamma in (0.1, 0.99))
    assert [r.depth for r in bad.reversals] == list(range(1, 11))
    (warning,) = bad.warnings
    worst = next(r for r in bad.reversals if r.gradients > 0.01)
    assert f"reversing {worst.depth} layers, down to {worst.path}," in warning
    assert "% of the gradient" in warning and "WARNING" in bad.text()
    assert 3 <= worst.depth <= 10 and bad.reversals[0].gradients < 1e-4
    assert good.warnings == [] and good.reversals[-1].gradients < 1e-3
    assert all(c.forward_ms > 0 for c in bad.costs)
    assert re.search(r"^10 +0.Serial/1.Repeat/block 0 ", bad.text(), re.MULTILINE)


# --- Picture and command ------------------------------------------------------------


def test_picture_names_each_layer_and_its_shapes(tmp_path):
    found = visits(deep(3), SIG)
    inspect.draw(found, tmp_path / "stack.svg")
    text = (tmp_path / "stack.svg").read_text()
    for name in (
        "0.Serial/0.Dense_64",
        "block: 0.ReversibleHalfResidual  (x 3)",
        "1.L2Loss",
    ):
        assert f"<!-- {name} -->" in text
    assert text.count("<!-- 96 x 64 -->") == 3 + 3  # The batch, and what is written.
    inspect.draw(found, tmp_path / "stack.png")
    assert (tmp_path / "stack.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ValueError, match=r"\.png or a \.svg file, got .*stack\.jpg"):
        inspect.draw(found, tmp_path / "stack.jpg")
    many = list(itertools.repeat(found[0], 1001))
    with pytest.raises(ValueError, match="room for 1000 layers, not for 1001"):
        inspect.draw(many, tmp_path / "many.png")


def test_command(tmp_path, capsys):
    picture = tmp_path / "stack.png"
    gin.clear_config()
    try:
        code = cli.main(
            ["inspect", "digits_mlp.gin", "--memory=1GB", "--no_run"]
            + [f"--picture={picture}", "--config=MLP.layer_widths = (8, 10)"]
        )
        out = capsys.readouterr().out
    finally:
        gin.clear_config()
    assert code == 0 and picture.stat().st_size > 5000
    assert re.search(r"^0\.Serial/1\.Dense +1 +2\.0 KiB", out, re.MULTILINE)
    assert re.search(r"^layer by layer .* fits$", out, re.MULTILINE)
    assert "Fits into 1.0 GiB, the fastest way first: plain" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["digits_mlp.gin", "--memory=lots"], "--memory must be a size .* got 'lots'"),
        (["digits_mlp.gin", "--picture=a.gif"], "--picture must be .* got 'a.gif'"),
        (["digits_mlpp.gin"], "Did you mean digits_mlp.gin"),
    ],
)
def test_command_with_bad_arguments(arguments, message, capsys):
    assert cli.main(["inspect", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_memory_sizes():
    assert parsed_memory("16GB") == parsed_memory(" 16 gib ") == 16 * 2**30
    assert parsed_memory("0.5M") == 2**19 and parsed_memory("100") == 100
    for text in ("0GB", "-1GB", "1.2.3M", "GB"):
        with pytest.raises(ConfigError, match="--memory"):
            parsed_memory(text)

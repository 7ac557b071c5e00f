"""The table of layers: what it says, and that it makes nothing."""

import jax
import jax.numpy as jnp
import pytest

from retrax.errors import LayerError
from retrax.layers.base import Fn, Layer
from retrax.layers.combinators import Freeze, Residual, Serial
from retrax.layers.control import Repeat, Scan
from retrax.layers.summary import table
from retrax.shapes import ShapeDtype


class Affine(Layer):
    def __init__(self, n, name=None):
        super().__init__(name=name or f"Affine_{n}")
        self._n = n

    def init_weights_and_state(self, input_signature):
        self.weights = (
            jnp.ones((input_signature.shape[-1], self._n)),
            jnp.zeros(self._n),
        )
        self.state = jnp.zeros((2,), jnp.int32)

    def forward(self, x):
        w, b = self.weights
        return x @ w + b


def relu():
    return Fn("Relu", lambda x: jnp.maximum(x, 0))


def test_table_of_a_model():
    shared = Affine(4, name="tied")
    model = Serial(
        shared,
        Residual(relu(), shared),
        Freeze(Affine(4)),
        Repeat(lambda: Serial(Affine(4), relu()), 12),
        Scan(Affine(1000), axis=1, n_carry=0),
    )
    expected = [
        "layer output weights size",
        "Serial (2, 3, 1000) float32 5,280 20.6 KiB",
        "0.tied (2, 3, 4) float32 20 80 B",
        "1.Serial (2, 3, 4) float32 0 0 B",
        "0.Branch (2, 3, 4), (2, 3, 4) float32 0 0 B",
        "0.Select[0,0] (2, 3, 4), (2, 3, 4) float32 0 0 B",
        "1.Parallel (2, 3, 4), (2, 3, 4) float32 0 0 B",
        "0.Serial (2, 3, 4) float32 0 0 B",
        "1.Serial (2, 3, 4) float32 0 0 B",
        "0.Relu (2, 3, 4) float32 0 0 B",
        "1.tied (shared) (2, 3, 4) float32 - -",
        "1.Add (2, 3, 4) float32 0 0 B",
        "2.Affine (frozen) (2, 3, 4) float32 20 80 B",
        "3.Repeat (2, 3, 4) float32 240 960 B",
        "block.Serial (2, 3, 4) float32 240 960 B",
        "0.Affine (2, 3, 4) float32 240 960 B",
        "1.Relu (2, 3, 4) float32 0 0 B",
        "4.Scan (2, 3, 1000) float32 5,000 19.5 KiB",
        "0.Affine (2, 1000) float32 5,000 19.5 KiB",
        "trainable 5,260 weights 20.5 KiB",
        "frozen 20 weights 80 B",
        "state 120 B",
    ]
    got = table(model, ShapeDtype((2, 3, 4)))
    rows = [" ".join(line.split()) for line in got.splitlines()]
    assert [row for row in rows if "--" not in row] == expected
    lines = got.splitlines()
    assert lines[1] == lines[-4] == "-" * max(len(line) for line in lines)
    ends = {len(line) for line in lines}
    assert len(ends) == 1  # Columns are flush on the right.
    assert model.summary(ShapeDtype((2, 3, 4))) == got


def test_table_makes_no_arrays_and_changes_nothing():
    # 4 TiB of weights could not be made.
    model = Serial(Affine(2**20), Affine(2**20))
    text = table(model, ShapeDtype((1, 4)))
    assert "4096.0 GiB" in text
    assert model.weights == ((), ()) and jax.tree.leaves(model.state) == []
    small = Serial(Affine(3))
    small.init(ShapeDtype((1, 4)))
    weights = small.weights
    table(small, ShapeDtype((5, 7)))
    assert small.weights[0][0] is weights[0][0]


def test_many_outputs_wrap_and_dtypes_are_named_once():
    def many(x):
        return (*(x,) * 6, x.astype(jnp.int32), x.sum())

    text = table(Serial(Fn("Many", many, n_out=8)), ShapeDtype((128, 1024)))
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= 100
    start = lines[0].index("output")
    end = lines[0].index("weights")
    first = next(i for i, line in enumerate(lines) if "0.Many" in line)
    last = next(i for i, line in enumerate(lines[2:], 2) if line.startswith("---"))
    cell = " ".join(line[start:end].strip() for line in lines[first:last])
    six = ", ".join(["(128, 1024)"] * 6)
    assert cell == f"{six} float32, (128, 1024) int32, () float32"
    assert last - first > 1


def test_layers_that_never_run_show_no_output():
    class Lazy(Layer):
        def __init__(self):
            super().__init__()
            self._sublayers = [Affine(3)]

        def init_weights_and_state(self, input_signature):
            w, s = self.sublayers[0].init(input_signature, use_cache=True)
            self.weights, self.state = (w,), (s,)

        def forward(self, x):
            return x

    lines = table(Lazy(), ShapeDtype((2, 4))).splitlines()
    assert lines[3].split() == ["0.Affine", "-", "15", "60", "B"]


def test_mistakes_are_layer_errors():
    model = Serial(Fn("Fail", lambda x: x @ x))
    with pytest.raises(LayerError) as e:
        table(model, ShapeDtype((2, 3)))
    assert e.value.path == "Serial[0] > Fail"

"""Combinators against a model of the data stack in plain Python, and their prints."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax.errors import LayerError
from retrax.layers.base import Fn, Layer, PureLayer
from retrax.layers.combinators import (
    Branch,
    Freeze,
    Parallel,
    Residual,
    Serial,
    SerialWithSideOutputs,
)
from retrax.layers.stack import inputs_from_stack, outputs_onto_stack
from retrax.layers.stack_layers import (
    Add,
    Concatenate,
    Drop,
    Dup,
    FlattenList,
    Gate,
    Multiply,
    Select,
    Split,
    SubtractTop,
    Swap,
)
from retrax.shapes import ShapeDtype

# Symbols (strings) lie on the stack, so every mix-up shows.
ARITIES = list(itertools.product(range(3), range(3)))


def symbolic(name, n_in, n_out):
    """A layer that writes down what it was given, and its model on lists."""

    def call(items):
        text = f"{name}({','.join(items)})"
        return [f"{text}.{i}" for i in range(n_out)]

    def forward(xs):
        items = [xs] if n_in == 1 else list(xs)
        assert len(items) == n_in
        outputs = call(items)
        return outputs[0] if n_out == 1 else tuple(outputs)

    layer = PureLayer(forward, n_in=n_in, n_out=n_out, name=name)
    return layer, call


def chains(max_length, arities=ARITIES):
    for length in range(1, max_length + 1):
        yield from itertools.product(arities, repeat=length)


def run_chain(kinds, calls, stack):
    stack = list(stack)
    for (n_in, _), call in zip(kinds, calls, strict=True):
        if n_in > len(stack):
            return None
        stack = call(stack[:n_in]) + stack[n_in:]
    return stack


def arity_of_chain(kinds, calls):
    for n_in in range(20):
        out = run_chain(kinds, calls, "abcdefghijklmnopqrst"[:n_in])
        if out is not None:
            return n_in, len(out)
    raise RuntimeError("no arity found")


def run(layer, stack):
    """Runs a layer of a stack and returns the stack as a list."""
    x = stack[0] if len(stack) == 1 else tuple(stack)
    y, _ = layer.pure_fn(x, layer.weights, layer.state, None)
    if isinstance(y, tuple):
        assert len(y) != 1, "one item must be bare"
        return list(y)
    return [y]


def make(kinds):
    pairs = [symbolic(f"L{i}", *kind) for i, kind in enumerate(kinds)]
    return [p[0] for p in pairs], [p[1] for p in pairs]


# --- Against the model --------------------------------------------------------------


def test_serial_is_the_stack_machine():
    for kinds in chains(3):
        layers, calls = make(kinds)
        n_in, n_out = arity_of_chain(kinds, calls)
        serial = Serial(*layers)
        assert (serial.n_in, serial.n_out) == (n_in, n_out), kinds
        for n_more in range(3):
            stack = list("abcdefghij"[: n_in + n_more])
            assert run(serial, stack) == run_chain(kinds, calls, stack), kinds


def test_nesting_serials_changes_nothing():
    for kinds in chains(3, [(0, 1), (1, 2), (2, 1), (1, 0), (2, 2)]):
        layers, calls = make(kinds)
        for cut in range(1, len(kinds)):
            nested = Serial(Serial(*layers[:cut]), Serial(*layers[cut:]))
            flat = Serial(layers[:cut], (layers[cut:],), None)
            assert flat.sublayers == layers
            n_in, _ = arity_of_chain(kinds, calls)
            stack = list("abcdefghij"[: n_in + 1])
            assert nested.n_in >= n_in
            expected = run_chain(kinds, calls, stack)
            assert run(flat, stack) == expected
            if len(stack) >= nested.n_in:
                assert run(nested, stack) == expected


def test_parallel_gives_each_layer_its_own_inputs():
    for kinds in chains(3):
        if len(kinds) < 2:
            continue
        layers, calls = make(kinds)
        parallel = Parallel(*layers)
        n_in = sum(k[0] for k in kinds)
        assert (parallel.n_in, parallel.n_out) == (n_in, sum(k[1] for k in kinds))
        stack, expected = list("abcdefghij"[:n_in]), []
        rest = stack
        for (k, _), call in zip(kinds, calls, strict=True):
            expected += call(rest[:k])
            rest = rest[k:]
        assert run(parallel, stack) == expected, kinds


def test_branch_gives_all_layers_the_top_inputs():
    for kinds in chains(3):
        layers, calls = make(kinds)
        branch = Branch(*layers)
        n_in = max(k[0] for k in kinds)
        assert (branch.n_in, branch.n_out) == (n_in, sum(k[1] for k in kinds))
        stack = list("abcdefghij"[:n_in])
        expected = [
            y
            for (k, _), call in zip(kinds, calls, strict=True)
            for y in call(stack[:k])
        ]
        assert run(branch, stack) == expected, kinds
        if len(kinds) > 1:
            assert run(branch, [*stack, "z"]) == [*expected, "z"]


@pytest.mark.parametrize("with_shortcut", [False, True])
def test_residual_adds_the_shortcut_first(with_shortcut):
    for kinds in chains(2):
        layers, calls = make(kinds)
        n_in, n_out = arity_of_chain(kinds, calls)
        if n_out == 0:
            continue
        shortcut, shortcut_call = symbolic("S", 1, 1)
        residual = Residual(*layers, shortcut=shortcut if with_shortcut else None)
        n_in = max(n_in, 1)
        assert (residual.n_in, residual.n_out) == (n_in, n_out), kinds
        stack = list("abcdefghij"[:n_in])
        out = run_chain(kinds, calls, stack[: arity_of_chain(kinds, calls)[0]])
        arm = shortcut_call(stack[:1])[0] if with_shortcut else stack[0]
        assert run(residual, [*stack, "z"]) == [arm + out[0], *out[1:], "z"], kinds


def test_side_outputs_end_up_below_in_order():
    some = [(1, 1), (1, 2), (2, 2), (1, 3), (2, 3)]
    n_checked = 0
    for kinds in chains(3, some):
        for sides in itertools.product(range(3), repeat=len(kinds)):
            if any(s > k[1] for s, k in zip(sides, kinds, strict=True)):
                continue
            layers, calls = make(kinds)
            layer = SerialWithSideOutputs(layers, list(sides))
            stack, aside = list("abcdefghij"[: layer.n_in]), []
            for (k, n_y), call, side in zip(kinds, calls, sides, strict=True):
                outputs = call(stack[:k])
                aside += outputs[n_y - side :]
                stack = outputs[: n_y - side] + stack[k:]
            assert run(layer, list("abcdefghij"[: layer.n_in])) == stack + aside
            assert layer.n_out == len(stack + aside)
            n_checked += 1
    assert n_checked > 500


def test_select_all_indices():
    for length in range(4):
        for indices in itertools.product(range(3), repeat=length):
            for n_in in range(max(indices, default=-1) + 1, 5):
                layer = Select(indices, n_in=n_in)
                assert (layer.n_in, layer.n_out) == (n_in, length)
                stack = list("abcde"[:n_in])
                assert run(layer, stack) == [stack[i] for i in indices]


def test_stack_helpers_are_inverse():
    for n_stack in range(1, 4):
        items = tuple("abc"[:n_stack])
        stack = items[0] if n_stack == 1 else items
        for n in range(n_stack + 1):
            top = inputs_from_stack(stack, n)
            assert top == (items[0] if n == 1 else items[:n])
            assert outputs_onto_stack(top, stack, n) == stack
    with pytest.raises(ValueError, match="4 inputs are needed but the data stack hol"):
        inputs_from_stack((1, 2, 3), 4)


# --- Numbers ------------------------------------------------------------------------


def test_arithmetic_of_the_stack():
    a, b, c = np.random.default_rng(0).normal(size=(3, 4, 6))
    for layer, expected in (
        (Add(), a + b),
        (SubtractTop(), b - a),
        (Multiply(), a * b),
        (Concatenate(), np.concatenate([a, b], -1)),
        (Concatenate(axis=0), np.concatenate([a, b], 0)),
    ):
        got = layer((jnp.asarray(a), jnp.asarray(b)))
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    np.testing.assert_allclose(Gate()((a, b, c)), b * a + (1 - b) * c, rtol=1e-6)
    parts = Split(3)(jnp.asarray(a))
    assert len(parts) == 3
    for got, expected in zip(parts, np.split(a, 3, -1), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert Split(1, axis=0)(jnp.asarray(a)).shape == (4, 6)
    np.testing.assert_allclose(Split(2, axis=0)(jnp.asarray(a))[1], a[2:], rtol=1e-6)
    assert FlattenList()((1, [2, (3, [])], 4)) == (1, 2, 3, 4)
    assert (Dup()(1), Swap()((1, 2)), Drop()(1)) == ((1, 1), (2, 1), ())


# --- Layers without inputs (H15) ----------------------------------------------------


class Constant(Layer):
    def __init__(self):
        super().__init__(n_in=0)

    def init_weights_and_state(self, input_signature):
        self.weights = jnp.arange(3.0)

    def forward(self, _):
        return self.weights


def test_layers_without_inputs_go_everywhere():
    scale = Fn("Triple", lambda x: 3 * x)
    x = np.ones(3, np.float32)
    for layer, expected in (
        (Branch(Constant(), scale), [np.arange(3), 3 * x]),
        (Parallel(Constant(), scale), [np.arange(3), 3 * x]),
        (Serial(Constant(), Add()), [x + np.arange(3)]),
        (Residual(Constant()), [x + np.arange(3)]),
    ):
        layer.init(ShapeDtype((3,)))
        y = layer(x)
        for got, want in zip([y] if len(expected) == 1 else y, expected, strict=True):
            np.testing.assert_allclose(got, want)
        assert len(jax.tree.leaves(layer.weights)) == 1
    alone = Constant()
    alone.init(())
    np.testing.assert_array_equal(alone(()), np.arange(3))


# --- Prints (recorded from Trax 1.4.1; function layers are not wrapped here, H20) ----


def relu():
    return Fn("Relu", lambda x: x)


def dense(n):
    return PureLayer(lambda x: x, name=f"Dense_{n}")


GOLDEN = [
    (lambda: Serial(), "Serial", 1, 1, 0),
    (lambda: Serial(None), "Serial", 1, 1, 0),
    (
        lambda: Serial(dense(4), [relu(), (dense(2),)]),
        "Serial[\n  Dense_4\n  Relu\n  Dense_2\n]",
        1,
        1,
        3,
    ),
    (
        lambda: Serial(Serial(relu()), relu()),
        "Serial[\n  Serial[\n    Relu\n  ]\n  Relu\n]",
        1,
        1,
        2,
    ),
    (
        lambda: Serial(Dup(), Dup(), Add()),
        "Serial_out2[\n  Dup_out2\n  Dup_out2\n  Add_in2\n]",
        1,
        2,
        3,
    ),
    (
        lambda: Serial(Add(), Add(), Add()),
        "Serial_in4[\n  Add_in2\n  Add_in2\n  Add_in2\n]",
        4,
        1,
        3,
    ),
    (lambda: Serial(Drop()), "Serial_out0[\n  Drop_out0\n]", 1, 0, 1),
    (
        lambda: Serial(Drop(), Drop(), Dup()),
        "Serial_in3_out2[\n  Drop_out0\n  Drop_out0\n  Dup_out2\n]",
        3,
        2,
        3,
    ),
    (
        lambda: Serial(Swap(), Drop(), Dup(), Add()),
        "Serial_in2[\n  Swap_in2_out2\n  Drop_out0\n  Dup_out2\n  Add_in2\n]",
        2,
        1,
        4,
    ),
    (lambda: Branch(relu(), None), "Branch_out2[\n  Relu\n  None\n]", 1, 2, 2),
    (lambda: Branch(dense(3)), "Dense_3", 1, 1, 0),
    (
        lambda: Branch(Add(), Dup(), relu()),
        "Branch_in2_out4[\n  Add_in2\n  Dup_out2\n  Relu\n]",
        2,
        4,
        2,
    ),
    (
        lambda: Branch([dense(2), relu()], relu()),
        "Branch_out2[\n  [Dense_2, Relu]\n  Relu\n]",
        1,
        2,
        2,
    ),
    (
        lambda: Residual(dense(4)),
        "Serial[\n  Branch_out2[\n    None\n    Dense_4\n  ]\n  Add_in2\n]",
        1,
        1,
        2,
    ),
    (
        lambda: Residual(dense(4), relu()),
        "Serial[\n  Branch_out2[\n    None\n    Serial[\n      Dense_4\n      Relu\n"
        "    ]\n  ]\n  Add_in2\n]",
        1,
        1,
        2,
    ),
    (
        lambda: Residual(dense(4), shortcut=dense(4)),
        "Serial[\n  Branch_out2[\n    Dense_4\n    Dense_4\n  ]\n  Add_in2\n]",
        1,
        1,
        2,
    ),
    (
        lambda: Residual(Dup()),
        "Serial_out2[\n  Branch_out3[\n    None\n    Dup_out2\n  ]\n  Add_in2\n]",
        1,
        2,
        2,
    ),
    (
        lambda: Parallel(dense(2), Add()),
        "Parallel_in3_out2[\n  Dense_2\n  Add_in2\n]",
        3,
        2,
        2,
    ),
    (
        lambda: Parallel(None, [Dup(), Swap()]),
        "Parallel_in2_out3[\n  Serial\n  Serial_out2[\n    Dup_out2\n"
        "    Swap_in2_out2\n  ]\n]",
        2,
        3,
        2,
    ),
    (lambda: Select([0]), "Select[0]", 1, 1, 0),
    (lambda: Select([1, 0, 1]), "Select[1,0,1]_in2_out3", 2, 3, 0),
    (lambda: Select([0], n_in=2), "Select[0]_in2", 2, 1, 0),
    (lambda: Select([2], name="Third"), "Third_in3", 3, 1, 0),
    (lambda: Concatenate(), "Concatenate_in2", 2, 1, 0),
    (lambda: Concatenate(n_items=3, axis=1), "Concatenate_axis1_in3", 3, 1, 0),
    (lambda: Split(), "Split_out2", 1, 2, 0),
    (lambda: Split(n_items=3), "Split_out3", 1, 3, 0),
    (lambda: Gate(), "Gate_in3", 3, 1, 0),
    (lambda: SubtractTop(), "SubtractTop_in2", 2, 1, 0),
    (lambda: Multiply(), "Multiply_in2", 2, 1, 0),
    (lambda: FlattenList(), "FlattenList", 1, 1, 0),
    (lambda: Serial(relu(), name="Stem"), "Stem[\n  Relu\n]", 1, 1, 1),
    (lambda: Serial(relu(), sublayers_to_print=[]), "Serial", 1, 1, 1),
]


@pytest.mark.parametrize("golden", GOLDEN, ids=range(len(GOLDEN)))
def test_prints_arities_and_sublayers(golden):
    make_layer, text, n_in, n_out, n_sublayers = golden
    layer = make_layer()
    assert str(layer) == text
    assert (layer.n_in, layer.n_out) == (n_in, n_out)
    assert len(layer.sublayers) == n_sublayers


# --- Mistakes -----------------------------------------------------------------------


def named_function():
    return None


@pytest.mark.parametrize(
    ("make_layer", "error", "text"),
    [
        (
            lambda: Serial(relu(), Concatenate),
            TypeError,
            r"Serial: item 1 is no layer but the class Concatenate; make an instance",
        ),
        (
            lambda: Serial([relu(), [named_function]]),
            TypeError,
            r"item 1 is no layer but the function named_function; call it .*Fn\('nam",
        ),
        (
            lambda: Residual(ShapeDtype((2,))),
            TypeError,
            r"Residual: item 0 .* signature \(ShapeDtype\); pass it to init",
        ),
        (lambda: Freeze(3), TypeError, "Freeze: item 0 is no layer but 3 of type int"),
        (lambda: Branch(relu(), "x"), TypeError, "item 1 is no layer but 'x'"),
        (lambda: Parallel(relu()), ValueError, "at least two layers, got 1"),
        (
            lambda: Select([0, 2], n_in=2),
            ValueError,
            r"Select\(\[0, 2\], n_in=2\) reaches outside of its 2 inputs",
        ),
        (lambda: Select([-1]), ValueError, r"Select\(\[-1\], n_in=0\) reaches outside"),
        (
            lambda: SerialWithSideOutputs([Dup(), Dup()], [1]),
            ValueError,
            "1 items for 2 layers",
        ),
        (
            lambda: Split(4)(jnp.zeros((2, 6))),
            LayerError,
            "cannot cut axis -1 of size 6 into 4 equal parts",
        ),
        (
            lambda: Serial(relu(), Add())(jnp.zeros(2)),
            LayerError,
            "takes 2 inputs in a tuple or list",
        ),
    ],
)
def test_mistakes_are_explained(make_layer, error, text):
    with pytest.raises(error, match=text):
        make_layer()

"""Shape checks: what they let pass, what they say, and that they leave layers alone."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax.errors import LayerError
from retrax.shapes import ShapeDtype


def zeros(*shapes):
    arrays = tuple(jnp.zeros(s) for s in shapes)
    return arrays[0] if len(arrays) == 1 else arrays


@pytest.mark.parametrize(
    "spec, shapes",
    [
        ("bld", [(2, 3, 4)]),
        ("b...", [(2, 3, 4)]),
        ("b...", [(2,)]),
        ("...", [()]),
        ("", [()]),
        ("...d", [(4,)]),
        ("a...d", [(2, 3, 4)]),
        ("aa", [(3, 3)]),
        ("b1l", [(5, 1, 2)]),
        ("ab,bc", [(2, 3), (3, 4)]),
        ("...a,...b", [(2, 3, 4), (2, 3, 5)]),
        ("b...,...d", [(7, 2, 3), (2, 3, 5)]),
    ],
)
def test_shapes_that_fit_pass_unchanged(spec, shapes):
    layer = tl.AssertShape(spec)
    xs = zeros(*shapes)
    assert layer.n_in == layer.n_out == len(shapes)
    y, _ = layer.pure_fn(xs, (), (), None)
    assert y is xs


@pytest.mark.parametrize(
    "spec, shapes, text",
    [
        ("bld", [(2, 3)], r"input 0 .* shape \(2, 3\), specified as 'bld': .* 3 axes"),
        ("a...d", [(2,)], "at least 2 axes"),
        ("aa", [(3, 4)], "a is 4 but must be 3"),
        ("b1", [(5, 2)], "1 is 2 but must be 1"),
        ("ab,bc", [(2, 3), (4, 3)], r"input 1 .*'bc': b is 4 but must be 3"),
        ("...a,...b", [(2, 4), (3, 5)], r"\.\.\. is \(3,\) but must be \(2,\)"),
        ("...a,...b", [(4,), (3, 5)], r"'\.\.\.b': \.\.\. is \(3,\) but must be \(\)"),
    ],
)
def test_shapes_that_do_not_fit_are_told(spec, shapes, text):
    with pytest.raises(LayerError, match=text):
        tl.AssertShape(spec).pure_fn(zeros(*shapes), (), (), None)


def test_the_error_holds_the_specification_the_sizes_and_the_message():
    layer = tl.AssertShape("ab,bc", message="See the notes.")
    with pytest.raises(LayerError) as e:
        layer.pure_fn(zeros((2, 3), (4, 3)), (), (), None)
    assert "(in 'ab,bc'; known sizes: {'a': 2, 'b': 3}). See the notes." in str(e.value)


@pytest.mark.parametrize("spec", ["b-d", "......", "a...b...", "a b"])
def test_specifications_that_cannot_be_read_are_refused(spec):
    with pytest.raises(ValueError, match="cannot read"):
        tl.AssertShape(spec)


def test_decorated_functions_need_an_arrow():
    with pytest.raises(ValueError, match="needs an arrow"):
        tl.assert_shape("bd")


def test_assert_shape_layers_are_invisible_unless_asked_for():
    model = tl.Serial(tl.AssertShape("bd"), tl.Dense(2))
    assert str(model) == "Serial[\n  Dense_2\n]"
    assert str(tl.AssertShape("b,d", visible_layer=True)) == "AssertShape_in2_out2"


# --- The decorator ------------------------------------------------------------------


@tl.assert_shape("...a,...b->...c")
class Joined(tl.Layer):
    """Concatenates; with `wrong` it gives an axis too many."""

    def __init__(self, wrong=False):
        super().__init__(n_in=2)
        self._wrong = wrong

    def forward(self, inputs):
        """Concatenates the last axes."""
        y = jnp.concatenate(inputs, -1)
        return y[None] if self._wrong else y


@tl.assert_shape("bd->b")
def SumOfRow(wrong=False):
    """Makes a layer of a function."""
    return tl.Fn("SumOfRow", lambda x: x if wrong else x.sum(-1))


@tl.assert_shape("bd->be")
def Net():
    """Makes a combinator."""
    return tl.Serial(tl.Dense(3), tl.Relu())


def test_classes_are_checked_before_and_after():
    assert Joined()(zeros((2, 3), (2, 5))).shape == (2, 8)
    with pytest.raises(LayerError, match=r"input 1 of Joined .*\.\.\. is \(3,\)"):
        Joined()(zeros((2, 3), (3, 5)))
    with pytest.raises(LayerError, match=r"output 0 of Joined has shape \(1, 2, 8\)"):
        Joined(wrong=True)(zeros((2, 3), (2, 5)))


def test_function_layers_stay_flat():
    model = tl.Serial(tl.Dense(2), SumOfRow())
    assert str(model) == "Serial[\n  Dense_2\n  SumOfRow\n]"
    assert isinstance(model.sublayers[1], tl.PureLayer)
    assert type(model.sublayers[1]).__name__ == "PureLayer"


def test_function_layers_are_checked_before_and_after():
    assert SumOfRow()(zeros((2, 3))).shape == (2,)
    with pytest.raises(LayerError, match="input 0 of SumOfRow"):
        SumOfRow()(zeros((2, 3, 4)))
    with pytest.raises(LayerError, match=r"output 0 of SumOfRow .* \(2, 3\)"):
        SumOfRow(wrong=True)(zeros((2, 3)))


def test_checks_run_while_compiling():
    layer = SumOfRow()
    with pytest.raises(LayerError, match="input 0 of SumOfRow"):
        jax.jit(lambda x: layer.pure_fn(x, (), (), None)).lower(
            jax.ShapeDtypeStruct((2, 3, 4), jnp.float32)
        )


def test_combinators_keep_their_tree_of_weights():
    net = Net()
    assert str(net) == "Serial[\n  Dense_3\n  Relu\n]"
    weights, _ = net.init(ShapeDtype((4, 2)))
    assert len(weights) == 2 and weights[0][0].shape == (2, 3)
    assert net(zeros((4, 2))).shape == (4, 3)
    with pytest.raises(LayerError, match="input 0 of Serial"):
        net.init(ShapeDtype((4, 5, 2)))
        net(zeros((4, 5, 2)))


def test_undecorated_layers_of_the_class_are_not_checked():
    SumOfRow()
    assert tl.Fn("Other", lambda x: x)(zeros((2, 3, 4))).shape == (2, 3, 4)


def test_checks_survive_copies():
    net = Net()
    weights, _ = net.init(ShapeDtype((4, 2)))
    shallow, deep = copy.copy(net), copy.deepcopy(net)
    for layer in (shallow, deep):
        assert layer(zeros((4, 2))).shape == (4, 3)
        with pytest.raises(LayerError, match="input 0 of"):
            layer(zeros((4, 5, 2)))
    deep.weights = jax.tree.map(jnp.zeros_like, weights)
    assert (net.weights[0][0] != 0).any()


def test_checks_survive_pickling():
    norm = tl.AssertFunction("bd->bd", tl.LayerNorm())
    norm.init(ShapeDtype((4, 2)))
    norm.weights = (jnp.array([2.0, 3.0]), jnp.zeros(2))
    stored = pickle.loads(pickle.dumps(norm))
    np.testing.assert_array_equal(stored.weights[0], [2.0, 3.0])
    with pytest.raises(LayerError, match="input 0 of LayerNorm"):
        stored(zeros((4, 5, 2)))


def test_assert_function_adds_checks_to_the_layer_itself():
    dense = tl.Dense(3)
    assert tl.AssertFunction("...a->...b", dense) is dense
    assert tl.AssertFunction("bd->b3", dense, message="Twice.") is dense
    assert isinstance(dense, tl.Dense)
    dense.init(ShapeDtype((4, 2)))
    with pytest.raises(LayerError, match="'bd': it must have 2 axes.* Twice."):
        dense(zeros((4, 5, 2)))


def test_layers_without_inputs_can_be_checked():
    make = tl.assert_shape("->ij")(lambda shape: tl.Weights(_zeros, shape))
    make((2, 3)).init(())
    with pytest.raises(LayerError, match=r"output 0 of Weights_\(2,\)"):
        layer = make((2,))
        layer.init(())
        layer(())


def _zeros(shape, rng):
    return jnp.zeros(shape)


def test_decorator_refuses_other_classes():
    with pytest.raises(TypeError, match="got the class int"):
        tl.assert_shape("a->a")(int)

"""The optimizer interface: trees, slots, statistics, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax.optimizers import SGD, Adam, Optimizer


class HeavyBall(Optimizer):
    """A rule as a user of Trax would write it."""

    def __init__(self, learning_rate=0.1, mass=0.5, **kwargs):
        super().__init__(learning_rate=learning_rate, mass=mass, **kwargs)

    def init(self, weights):
        return {"v": jnp.zeros_like(weights)}

    def update(self, step, grads, weights, slots, opt_params):
        v = opt_params["mass"] * slots["v"] + grads
        return weights - opt_params["learning_rate"] * step * v, {"v": v}


class NoSlots(Optimizer):
    def init(self, weights):
        return None

    def update(self, step, grads, weights, slots, opt_params):
        assert slots is None
        return weights - opt_params["learning_rate"] * grads, None


def tree(*values):
    a, b = (jnp.asarray(v, jnp.float32) for v in values)
    return ((), {"b": b}, [a, ({},)])


def test_own_rule_runs_per_leaf_of_nested_containers():
    opt = HeavyBall()
    weights, grads = tree([1.0], [[2.0, 3.0]]), tree([10.0], [[20.0, 30.0]])
    slots, opt_params = opt.tree_init(weights)
    assert isinstance(slots, tuple) and len(slots) == 2
    for step in (1, 2):
        weights, slots, _ = opt.tree_update(step, grads, weights, slots, opt_params)
    # v is g, then 1.5 g; the steps are 0.1 * 1 * g and 0.1 * 2 * 1.5 g.
    expected = tree([1.0 - 0.4 * 10], [[2.0 - 0.4 * 20, 3.0 - 0.4 * 30]])
    assert jax.tree.structure(weights) == jax.tree.structure(expected)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), weights, expected
    )
    np.testing.assert_allclose(slots[0]["v"], [[30.0, 45.0]])  # "b" is the first leaf


def test_rule_without_slots():
    opt = NoSlots(learning_rate=0.5)
    slots, opt_params = opt.tree_init(tree([1.0], [1.0]))
    new, slots, _ = opt.tree_update(
        1, tree([2.0], [4.0]), tree([1.0], [1.0]), slots, opt_params
    )
    assert slots == (None, None)
    np.testing.assert_array_equal(new[2][0], [0.0])
    np.testing.assert_array_equal(new[1]["b"], [-1.0])


def test_tree_without_leaves():
    opt = Adam()
    slots, opt_params = opt.tree_init(((), {"a": ()}, []))
    new, slots, stats = opt.tree_update(
        1, ((), {"a": ()}, []), ((), {"a": ()}, []), slots, opt_params
    )
    assert (new, slots) == (((), {"a": ()}, []), ())
    assert stats["gradients_l2"] == 0 and stats["weights_l2"] == 0


def test_opt_params_are_float32_scalars():
    opt = HeavyBall(learning_rate=1, mass=np.float64(0.25))
    assert set(opt.opt_params) == {"learning_rate", "mass"}
    for value in opt.opt_params.values():
        assert isinstance(value, jax.Array)
        assert (value.shape, value.dtype) == ((), jnp.float32)
    opt.opt_params = {"learning_rate": 3, "mass": 0.5}
    assert opt.opt_params["learning_rate"].dtype == jnp.float32
    assert opt.opt_params["learning_rate"] == 3


def test_tree_init_hands_out_its_own_opt_params():
    opt = SGD(learning_rate=0.5)
    _, opt_params = opt.tree_init((jnp.ones(1),))
    opt_params["learning_rate"] = jnp.float32(9)
    assert opt.opt_params["learning_rate"] == 0.5


@pytest.mark.parametrize("bad", ["0.1", None, [0.1], jnp.ones(2)])
def test_opt_params_that_are_no_scalars_are_refused(bad):
    with pytest.raises(TypeError, match="'mass' must be a number, got"):
        HeavyBall(mass=bad)


def test_opt_params_need_a_learning_rate():
    with pytest.raises(ValueError, match=r"must hold 'learning_rate'; got only \['m"):
        SGD().opt_params = {"mass": 1.0}


def test_stats_are_of_unclipped_gradients_and_old_weights():
    opt = SGD(learning_rate=1.0, clip_grad_norm=1.0)
    weights, grads = tree([6.0], [[8.0]]), tree([30.0], [[40.0]])
    slots, opt_params = opt.tree_init(weights)
    new, _, stats = opt.tree_update(1, grads, weights, slots, opt_params)
    assert set(stats) == {"gradients_l2", "weights_l2"}
    np.testing.assert_allclose(stats["gradients_l2"], 50.0, rtol=1e-6)
    np.testing.assert_allclose(stats["weights_l2"], 10.0, rtol=1e-6)
    np.testing.assert_allclose(new[2][0], [6.0 - 0.6], rtol=1e-6)
    np.testing.assert_allclose(new[1]["b"], [[8.0 - 0.8]], rtol=1e-6)


@pytest.mark.parametrize("off", [None, 0])
def test_clipping_can_be_off(off):
    opt = SGD(learning_rate=1.0, clip_grad_norm=off)
    assert opt.clip_grad_norm is None
    new, _, _ = opt.tree_update(
        1, (jnp.array([1e6]),), (jnp.array([0.0]),), (None,), opt.opt_params
    )
    np.testing.assert_array_equal(new[0], [-1e6])


def test_negative_clip_norm_is_refused():
    with pytest.raises(ValueError, match="clip_grad_norm is -2"):
        Adam(clip_grad_norm=-2)


def test_store_slots():
    opt = HeavyBall()
    weights = (jnp.array([1.0]),)
    slots, opt_params = opt.tree_init(weights)
    assert opt.slots is slots
    _, new_slots, _ = opt.tree_update(
        1, weights, weights, slots, opt_params, store_slots=False
    )
    assert opt.slots is slots
    _, new_slots, _ = opt.tree_update(1, weights, weights, slots, opt_params)
    assert opt.slots is new_slots and opt.slots is not slots
    opt.slots = (7,)
    assert opt.slots == (7,)


def test_traced_slots_are_not_kept():
    opt = HeavyBall()
    weights = (jnp.array([1.0]),)
    jax.jit(lambda w: opt.tree_init(w)[0])(weights)
    assert opt.slots is None
    slots, opt_params = opt.tree_init(weights)
    jax.jit(opt.tree_update, static_argnums=5)(1, weights, weights, slots, opt_params)
    assert opt.slots is slots


def test_numpy_weights_are_taken():
    opt = Adam()
    weights = {"w": np.ones(3, np.float32)}
    slots, opt_params = opt.tree_init(weights)
    new, _, _ = opt.tree_update(1, weights, weights, slots, opt_params)
    assert isinstance(new["w"], jax.Array)


@pytest.mark.parametrize("step", [0, -1, np.int64(0)])
def test_steps_count_from_one(step):
    with pytest.raises(ValueError, match=f"step is {step}, but steps count from 1"):
        SGD().tree_update(step, (), (), (), {})


class Bad(NoSlots):
    def __init__(self, result):
        super().__init__()
        self.result = result

    def update(self, step, grads, weights, slots, opt_params):
        return self.result, None


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (jnp.ones(2, jnp.bfloat16), r"'1/b' from float32\(2,\) to bfloat16\(2,\)"),
        (jnp.ones(3), r"'1/b' from float32\(2,\) to float32\(3,\)"),
        (0.5, r"'1/b' from float32\(2,\) to float, not a jax array"),
    ],
)
def test_a_leaf_that_changes_is_named(result, words):
    weights = ((), {"b": jnp.ones(2)})
    with pytest.raises(ValueError, match=f"Bad changed weights {words}"):
        opt = Bad(result)
        opt.tree_update(1, weights, weights, (None,), opt.opt_params)


@pytest.mark.parametrize(
    ("grads", "words"),
    [
        (({"a": 1.0, "c": 2.0},), "0/b.*0/c"),
        (({"a": 1.0},), "0/b: missing"),
        (({"a": 1.0, "b": 2.0}, 3.0), "1: not expected"),
        ([{"a": 1.0, "b": 2.0}], "expected structure"),
    ],
)
def test_first_difference_in_structure_is_named(grads, words):
    weights = ({"a": jnp.ones(()), "b": jnp.ones(())},)
    opt = SGD()
    with pytest.raises(ValueError, match=f"structure of the weights.*{words}"):
        opt.tree_update(1, grads, weights, (None, None), opt.opt_params)


def test_gradient_of_another_shape_is_named():
    opt = SGD()
    with pytest.raises(ValueError, match=r"'w' has shape \(1,\), but .* have \(3,\)"):
        opt.tree_update(
            1, {"w": jnp.ones(1)}, {"w": jnp.ones(3)}, (None,), opt.opt_params
        )


def test_slots_of_other_weights_are_refused():
    opt = SGD()
    with pytest.raises(ValueError, match="3 slots were given for 1 arrays"):
        opt.tree_update(1, (jnp.ones(1),), (jnp.ones(1),), (None,) * 3, {})


def test_a_rule_without_its_two_methods_says_so():
    with pytest.raises(NotImplementedError, match=r"Optimizer has no init\(weights\)"):
        Optimizer().tree_init((jnp.ones(1),))
    with pytest.raises(NotImplementedError, match="has no update"):
        Optimizer().tree_update(1, (jnp.ones(1),), (jnp.ones(1),), (None,), {})

"""StepTrainer against a loop written by hand with JAX and Optax."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from retrax import layers as tl
from retrax import optimizers
from retrax.errors import ConfigError, DataError
from retrax.shapes import signature
from retrax.trainer import StepTrainer, from_loss
from retrax.trainer.step import step_rngs

RNG = jax.random.key(5)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def labelled(seed=0, n=12, d=6, n_classes=4):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)).astype(np.float32)
    return x, rng.integers(0, n_classes, n).astype(np.int32)


def weighted(seed=0, n=12):
    q = np.linspace(0, 8, n, dtype=np.float32) ** 2
    return (*labelled(seed, n), q)


def mlp(*middle, loss=None):
    loss = loss or tl.CategoryCrossEntropy()
    model = tl.Serial(tl.Dense(8), tl.Tanh(), *middle, tl.Dense(4), loss)
    batch = labelled() if model.n_in == 2 else weighted()
    model.init(signature(batch), rng=jax.random.key(1))
    return model


def trainer_of(model, optimizer=None, **options):
    return StepTrainer(model, optimizer or optimizers.SGD(0.5), n_devices=1, **options)


def arrays(tree):
    return [np.array(x) for x in jax.tree.leaves(tree)]


def copies(tree):
    # Through JAX: NumPy would leave a copy on the host that outlives the array.
    return [np.array(x + 0) for x in jax.tree.leaves(tree)]


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def logits(weights, x):
    (w1, b1), (w2, b2) = weights
    return jnp.tanh(x @ w1 + b1) @ w2 + b2


def plain_loss(weights, batch):
    """Weighted cross-entropy of the MLP, by Optax's formula."""
    x, labels, *rest = batch
    each = optax.softmax_cross_entropy_with_integer_labels(logits(weights, x), labels)
    q = rest[0] if rest else jnp.ones(len(x))
    return jnp.sum(each * q) / jnp.sum(q)


def dense_weights(weights):
    return [w for w in weights if len(w) == 2]


def plain_steps(weights, batches, optimizer):
    """(losses, weights) of a loop of JAX and Optax only."""
    weights = jax.tree.map(jnp.asarray, weights)
    state = optimizer.init(weights)
    losses = []
    for batch in batches:
        loss, grads = jax.value_and_grad(plain_loss)(weights, batch)
        updates, state = optimizer.update(grads, state, weights)
        weights = optax.apply_updates(weights, updates)
        losses.append(float(loss))
    return losses, weights


def close(got, want, tolerance=1e-6):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


# --- Numbers ------------------------------------------------------------------------


def test_ten_steps_with_adam_equal_a_hand_written_loop():
    model = mlp()
    before = [tuple(map(np.array, w)) for w in dense_weights(model.weights)]
    trainer = trainer_of(model, optimizers.Adam(0.01, weight_decay_rate=0, eps=1e-8))
    batches = [labelled(seed) for seed in range(10)]
    losses = [float(trainer.one_step(batch, RNG)[0]) for batch in batches]
    expected_losses, expected = plain_steps(before, batches, optax.adam(0.01))
    close(losses, expected_losses)
    close(dense_weights(model.weights), expected)
    close(dense_weights(trainer.weights), expected)


@pytest.mark.parametrize("accumulate", [2, 4, 5])
def test_accumulation_equals_the_whole_batch_also_where_it_does_not_divide(accumulate):
    model = mlp(loss=tl.WeightedCategoryCrossEntropy())
    before = [tuple(map(np.array, w)) for w in dense_weights(model.weights)]
    trainer = trainer_of(model, accumulate=accumulate)
    batches = [weighted(seed) for seed in range(2)] + [weighted(2, n=11)]
    losses = [float(trainer.one_step(batch, RNG)[0]) for batch in batches]
    expected_losses, expected = plain_steps(before, batches, optax.sgd(0.5))
    close(losses, expected_losses)
    close(dense_weights(model.weights), expected)


def test_padding_leaves_batch_norm_at_the_moments_of_the_real_rows():
    def model():
        made = tl.Serial(tl.BatchNorm(axis=0, momentum=0.5), tl.Dense(4), _weighted())
        made.init(signature(weighted()), rng=jax.random.key(1))
        return made

    batch = weighted(n=5)
    # Two micro-batches of 3 rows, the last of them padding: rows 0-2, then 3 and 4.
    padded = trainer_of(model(), accumulate=2)
    padded.one_step(batch, RNG)
    mean, var, n_batches = padded.model_with_loss.state[0]
    x = np.float64(batch[0])
    moments = [(p.mean(0), p.var(0)) for p in (x[:3], x[3:])]
    expected_mean = 0.25 * 0 + 0.25 * moments[0][0] + 0.5 * moments[1][0]
    expected_var = 0.25 * 1 + 0.25 * moments[0][1] + 0.5 * moments[1][1]
    np.testing.assert_allclose(mean[0], expected_mean, atol=1e-6)
    np.testing.assert_allclose(var[0], expected_var, atol=1e-6)
    assert int(n_batches) == 2


def _weighted():
    return tl.WeightedCategoryCrossEntropy()


def test_a_loss_without_weight_must_divide_into_micro_batches():
    model = tl.Serial(tl.Dense(1), tl.Fn("Mean", lambda y: jnp.mean(y**2)))
    model.init(signature(normal(0, 7, 3)), rng=RNG)
    trainer = trainer_of(model, accumulate=2)
    with pytest.raises(DataError, match="7 rows does not divide into accumulate=2"):
        trainer.one_step((normal(0, 7, 3),), RNG)
    x, (w, b) = np.float64(normal(0, 8, 3)), map(np.float64, model.weights[0])
    loss, _ = trainer.one_step((normal(0, 8, 3),), RNG)
    np.testing.assert_allclose(loss, np.mean((x @ w + b) ** 2), rtol=1e-6)


def test_the_learning_rate_given_is_the_one_used():
    model = mlp()
    before = dense_weights(model.weights)
    trainer = trainer_of(model, optimizers.SGD(100.0))
    trainer.one_step(labelled(), RNG, 1, 0.25)
    close(
        dense_weights(model.weights), plain_steps(before, [labelled()], _sgd(0.25))[1]
    )
    now = dense_weights(model.weights)
    trainer.one_step(labelled(), RNG, 2, 0.0)
    assert bits(dense_weights(model.weights)) == bits(now)
    assert float(trainer.opt_params["learning_rate"]) == 100


def _sgd(rate):
    return optax.sgd(rate)


def test_stats_are_the_norms_before_the_update():
    model = mlp()
    before = dense_weights(model.weights)
    loss, stats = trainer_of(model).one_step(labelled(), RNG)
    assert loss is stats["loss"]
    grads = jax.grad(plain_loss)(before, labelled())
    for name, tree in (("gradients_l2", grads), ("weights_l2", before)):
        norm = np.sqrt(sum((np.float64(x) ** 2).sum() for x in jax.tree.leaves(tree)))
        np.testing.assert_allclose(stats[name], norm, rtol=1e-6)


def test_dropout_draws_from_the_steps_own_key():
    def draws(rng):
        return jax.random.uniform(rng, (3,))

    class Draw(tl.Layer):
        def forward(self, x):
            return x + 0 * jnp.sum(x) + jnp.sum(draws(self.rng))

    model = tl.Serial(Draw(), tl.Fn("Mean", lambda x: jnp.mean(x)))
    model.init(signature(np.zeros((2, 3), "f")), rng=RNG)
    trainer = trainer_of(model)
    batch = (np.zeros((2, 3), np.float32),)
    got = [float(trainer.one_step(batch, RNG, step)[0]) for step in (1, 2, 1)]
    expected = []
    for step in (1, 2):
        key = jax.random.split(step_rngs(RNG, step)[0], 2)[0]
        expected.append(float(jnp.sum(draws(key))))
    np.testing.assert_allclose(got, [*expected, expected[0]], rtol=1e-6)
    assert got[0] != got[1]


# --- Weights that people hold, read and set -----------------------------------------


def test_weights_are_current_between_steps_and_stay_readable():
    model = mlp()
    held = [(model.weights, copies(model.weights))]
    layer_held = model.sublayers[0].weights
    trainer = trainer_of(model)
    for step in range(3):
        before = dense_weights(model.weights)
        trainer.one_step(labelled(step), RNG)
        now = dense_weights(model.weights)
        close(now, plain_steps(before, [labelled(step)], _sgd(0.5))[1])
        close(dense_weights(trainer.weights), now, 0)
        held.append((model.weights, copies(model.weights)))
        held.append((trainer.weights, copies(trainer.weights)))
        held.append((trainer.slots, copies(trainer.slots)))
    trainer.one_step(labelled(), RNG)
    for tree, then in held:  # No array was given away.
        assert not any(x.is_deleted() for x in jax.tree.leaves(tree))
        assert bits(tree) == bits(then)
    assert bits(layer_held) == bits(held[0][1][:2])


def test_weights_set_in_the_middle_take_effect_and_slots_stay():
    model = mlp()
    trainer = trainer_of(model, optimizers.Momentum(0.1, mass=0.5, weight_decay_rate=0))
    trainer.one_step(labelled(), RNG)
    slots = arrays(trainer.slots)
    doubled = jax.tree.map(lambda w: 2 * w, model.weights)
    model.weights = doubled
    close(arrays(trainer.slots), slots, 0)
    loss, _ = trainer.one_step(labelled(1), RNG)
    close(loss, plain_loss(dense_weights(doubled), labelled(1)))
    assert bits(doubled) != bits(model.weights)


def test_weights_of_one_layer_set_in_the_middle_take_effect():
    model = mlp()
    trainer = trainer_of(model)
    trainer.one_step(labelled(), RNG)
    first, last = dense_weights(model.weights)
    new = (normal(3, 8, 4), normal(4, 4))
    model.sublayers[2].weights = new
    loss, _ = trainer.one_step(labelled(1), RNG)
    close(loss, plain_loss([first, new], labelled(1)))
    expected = plain_steps([first, new], [labelled(1)], _sgd(0.5))[1]
    close(dense_weights(model.weights), expected)
    np.testing.assert_array_equal(new[0], normal(3, 8, 4))


def test_init_in_the_middle_begins_anew():
    model = mlp()
    start = arrays(model.weights)
    trainer = trainer_of(model)
    trainer.one_step(labelled(), RNG)
    model.init(signature(labelled()), rng=jax.random.key(1))
    loss, _ = trainer.one_step(labelled(), RNG)
    close(loss, plain_loss([start[:2], start[2:]], labelled()))


def test_two_trainers_take_turns_on_one_model():
    model = mlp()
    expected = dense_weights(model.weights)
    one, two = trainer_of(model), trainer_of(model, optimizers.SGD(0.125))
    turns = [(one, 0.5), (one, 0.5), (two, 0.125), (one, 0.5), (two, 0.125)]
    for i, (trainer, rate) in enumerate(turns):
        (loss,), expected = plain_steps(expected, [labelled(i)], _sgd(rate))
        close(trainer.one_step(labelled(i), RNG)[0], loss)
    close(dense_weights(model.weights), expected)
    close(dense_weights(one.weights), expected)


def test_a_trainer_made_later_starts_from_the_weights_of_now():
    model = mlp()
    one = trainer_of(model)
    one.one_step(labelled(), RNG)
    now = dense_weights(one.weights)
    two = trainer_of(model)
    close(two.one_step(labelled(1), RNG)[0], plain_loss(now, labelled(1)))


def test_a_copy_of_a_model_in_training_is_on_its_own():
    model = mlp()
    trainer = trainer_of(model)
    trainer.one_step(labelled(), RNG)
    duplicate = copy.deepcopy(model)
    now = arrays(model.weights)
    trainer.one_step(labelled(), RNG)
    close(arrays(duplicate.weights), now, 0)
    assert bits(duplicate.weights) != bits(model.weights)


def test_state_and_slots_can_be_set():
    model = mlp(tl.BatchNorm(axis=0))
    trainer = trainer_of(model, optimizers.Momentum(0.1, mass=0.5, weight_decay_rate=0))
    trainer.one_step(labelled(), RNG)
    trainer.state = jax.tree.map(jnp.zeros_like, trainer.state)
    assert not any(x.any() for x in arrays(model.state))
    trainer.slots = jax.tree.map(jnp.ones_like, trainer.slots)
    before = arrays(trainer.weights)
    trainer.one_step(labelled(), RNG, learning_rate=0.0)
    assert int(jax.tree.leaves(trainer.state)[-1]) == 1
    close(arrays(trainer.weights), before, 0)
    trainer.n_skipped = 3
    assert trainer.n_skipped == 3


# --- Frozen, shared, not finite -----------------------------------------------------


def test_frozen_layers_keep_their_bits_under_decay_and_have_no_slot():
    model = mlp()
    model.sublayers[0].trainable = False
    frozen = bits(model.sublayers[0].weights)
    moving = bits(model.sublayers[2].weights)
    trainer = trainer_of(model, optimizers.Adam(0.1, weight_decay_rate=0.5))
    for step in range(3):
        trainer.one_step(labelled(step), RNG)
    assert bits(model.sublayers[0].weights) == frozen
    assert bits(model.sublayers[2].weights) != moving
    assert trainer.trainable_paths() == ["2.Dense/0", "2.Dense/1"]
    assert len(trainer.slots) == 2


def test_a_shared_layer_gets_the_sum_of_its_gradients():
    shared = tl.Dense(6)
    loss = tl.CategoryCrossEntropy()
    model = tl.Serial(shared, tl.Tanh(), shared, loss)
    batch = labelled(n_classes=6)
    model.init(signature(batch), rng=jax.random.key(1))
    w, b = map(np.array, shared.weights)

    def plain(first, second):
        h = jnp.tanh(batch[0] @ first[0] + first[1]) @ second[0] + second[1]
        each = optax.softmax_cross_entropy_with_integer_labels(h, batch[1])
        return jnp.mean(each)

    at_first, at_second = jax.grad(plain, (0, 1))((w, b), (w, b))
    trainer_of(model, optimizers.SGD(1.0)).one_step(batch, RNG)
    close(shared.weights[0], w - at_first[0] - at_second[0])
    close(shared.weights[1], b - at_first[1] - at_second[1])


def test_a_batch_with_nan_is_skipped_and_counted():
    model = mlp()
    trainer = trainer_of(model, optimizers.Adam(0.1))
    trainer.one_step(labelled(), RNG)
    before = bits((trainer.weights, trainer.state, trainer.slots))
    x, y = labelled()
    _, stats = trainer.one_step((x * np.nan, y), RNG)
    assert not bool(stats["grads_finite"]) and trainer.n_skipped == 1
    assert bits((trainer.weights, trainer.state, trainer.slots)) == before

    trainer = trainer_of(model, optimizers.Adam(0.1), skip_nonfinite=False)
    trainer.one_step((x * np.nan, y), RNG)
    assert trainer.n_skipped == 0
    assert any(np.isnan(w).any() for w in arrays(model.weights))


# --- Experiments --------------------------------------------------------------------


def test_a_subclass_overrides_loss_gradients_update_and_metrics():
    class Experiment(StepTrainer):
        def loss(self, weights, state, rng, batch):
            loss, aux = super().loss(weights, state, rng, batch)
            penalty = sum(jnp.sum(w**2) for w in jax.tree.leaves(weights))
            aux.metrics["penalty"] = penalty
            return loss + 0.5 * penalty, aux

        def gradients(self, weights, state, rng, batch):
            grads, aux = super().gradients(weights, state, rng, batch)
            return jax.tree.map(lambda g: 2 * g, grads), aux

        def update(self, step, grads, weights, slots, opt_params):
            new = jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)
            return new, slots, {"updates": step}

        def metrics(self, aux):
            return {"half_penalty": aux.metrics["penalty"] / 2, "pair": (3.0, 5.0)}

    model = mlp()
    before = dense_weights(model.weights)
    loss, stats = Experiment(model, optimizers.SGD(7.0), 1).one_step(labelled(), RNG)

    def penalised(weights):
        penalty = sum(jnp.sum(w**2) for w in jax.tree.leaves(weights))
        return plain_loss(weights, labelled()) + 0.5 * penalty

    value, grads = jax.value_and_grad(penalised)(before)
    close(loss, value)
    expected = jax.tree.map(lambda w, g: w - 0.2 * g, before, grads)
    close(dense_weights(model.weights), expected)
    penalty = sum((np.float64(w) ** 2).sum() for w in jax.tree.leaves(before))
    np.testing.assert_allclose(stats["half_penalty"], penalty / 2, rtol=1e-6)
    assert float(stats["pair"]) == 3 and int(stats["updates"]) == 1
    assert "penalty" not in stats


def test_hooks_replace_the_gradients():
    class Hooks:
        trainer = None

        def gradients(self, weights, state, rng, batch):
            grads, aux = from_loss(self.trainer.loss, self.trainer.reduce)(
                weights, state, rng, batch
            )
            return jax.tree.map(jnp.sign, grads), aux

    hooks, model = Hooks(), mlp()
    before = dense_weights(model.weights)
    hooks.trainer = trainer_of(model, hooks=hooks)
    hooks.trainer.one_step(labelled(), RNG)
    grads = jax.grad(plain_loss)(before, labelled())
    expected = jax.tree.map(lambda w, g: w - 0.5 * jnp.sign(g), before, grads)
    close(dense_weights(model.weights), expected)


def test_summaries_of_layers_are_reported_with_the_step():
    model = mlp(tl.SummaryScalar("activation", jnp.max), tl.SummaryScalar("activation"))
    (w, b), _ = dense_weights(model.weights)
    _, stats = trainer_of(model).one_step(labelled(), RNG)
    activation = np.tanh(np.float64(labelled()[0]) @ w + b)
    got = stats["summary_activation"], stats["summary_activation_1"]
    np.testing.assert_allclose(got, [activation.max(), activation.mean()], rtol=1e-5)


# --- Mistakes -----------------------------------------------------------------------


def test_a_model_without_weights_is_refused():
    model = tl.Serial(tl.Dense(4), tl.CategoryCrossEntropy())
    with pytest.raises(ConfigError, match=r"Serial has no weights yet.*\.init\("):
        trainer_of(model).one_step(labelled(), RNG)


def test_an_optimizer_must_be_one():
    with pytest.raises(TypeError, match=r"Optimizer such as Adam.*got <class.*Adam"):
        trainer_of(mlp(), optimizers.Adam)
    with pytest.raises(TypeError, match="must be an Optimizer.*got 'adam'"):
        trainer_of(mlp(), "adam")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_must_be_a_tuple(accumulate):
    trainer = trainer_of(mlp(), accumulate=accumulate)
    for batch, kind in ((labelled()[0], "ndarray"), ({"x": 1}, "dict")):
        with pytest.raises(DataError, match=f"tuple of arrays, got {kind}"):
            trainer.one_step(batch, RNG)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_of_two_parts_for_a_loss_of_three_inputs_says_how_to_mend_it(
    accumulate,
):
    trainer = trainer_of(mlp(loss=_weighted()), accumulate=accumulate)
    expected = (
        r"batch has 2 parts.*WeightedCategoryCrossEntropy_in3 takes 3.*"
        r"AddLossWeights.*loss without weights"
    )
    with pytest.raises(DataError, match=expected):
        trainer.one_step(labelled(), RNG)
    close(trainer.one_step(weighted(), RNG)[0].shape, ())  # It can go on.


def test_a_batch_with_too_many_parts_is_refused():
    with pytest.raises(DataError, match="batch has 3 parts.*takes 2"):
        trainer_of(mlp()).one_step(weighted(), RNG)


def test_weights_that_are_no_floats_are_refused_by_path():
    class Counter(tl.Layer):
        def init_weights_and_state(self, input_signature):
            self.weights = (jnp.arange(3),)

        def forward(self, x):
            return x

    model = tl.Serial(Counter(), tl.Dense(4), tl.CategoryCrossEntropy())
    model.init(signature(labelled()), rng=RNG)
    with pytest.raises(ConfigError, match=r"weight 0.Counter/0 has dtype int32"):
        trainer_of(model).one_step(labelled(), RNG)


@pytest.mark.parametrize("accumulate", [0, -1, True, 2.5, "2"])
def test_accumulate_must_be_a_positive_whole_number(accumulate):
    with pytest.raises(ConfigError, match="accumulate must be.*got"):
        trainer_of(mlp(), accumulate=accumulate)


def test_unknown_options_are_refused():
    with pytest.raises(ConfigError, match="reduce must be one of.*'median'"):
        trainer_of(mlp(), reduce="median")
    with pytest.raises(ConfigError, match="backend must be one of.*'jit'"):
        trainer_of(mlp(), backend="jit")


def test_each_variant_is_compiled_once_over_the_same_weights():
    traced = []

    class Scaled(StepTrainer):
        factor = 1.0

        def loss(self, weights, state, rng, batch):
            traced.append(self.factor)
            loss, aux = super().loss(weights, state, rng, batch)
            return self.factor * loss, aux

    trainer = Scaled(mlp(), optimizers.SGD(0.5), n_devices=1)
    batch = labelled()
    losses = []
    for factor in (1.0, 3.0, 1.0, 3.0):
        trainer.factor = trainer.variant = factor
        losses.append(float(trainer.one_step(batch, RNG)[0]))
    assert traced == [1.0, 3.0]
    plain = trainer_of(mlp())
    for factor, loss in zip((1.0, 3.0, 1.0, 3.0), losses, strict=True):
        wanted, _ = plain.one_step(batch, RNG, learning_rate=0.5 * factor)
        np.testing.assert_allclose(loss, factor * float(wanted), rtol=1e-5)
    trainer.reset_optimizer(reread_trainable=True)
    trainer.one_step(batch, RNG)
    trainer.variant = 1.0
    trainer.factor = 1.0
    trainer.one_step(batch, RNG)
    assert traced == [1.0, 3.0, 3.0, 1.0]

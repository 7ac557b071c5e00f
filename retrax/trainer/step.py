"""The one update step: where gradients come from, and what is done with them.

`from_loss`, `from_vjp` and `from_reverse` make gradient functions; `build_update` turns
any of them and an optimizer into an update. Compiling it is left to `devices`.
Nothing here holds values: all is called while tracing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from retrax import trees
from retrax.layers.running import PER_EXAMPLE_PREFIX, SUMMARY_PREFIX
from retrax.optimizers import l2_norm
from retrax.trainer.loss_scale import (
    LossScale,
    NoLossScale,
    current_loss_scale,
    loss_scale_context,
)
from retrax.trainer.reduce import Reduce, as_pair, ratio, reduced_metrics

__all__ = [
    "Aux",
    "Carry",
    "aux_of",
    "build_update",
    "from_loss",
    "from_reverse",
    "from_vjp",
    "step_rngs",
]


class Aux(NamedTuple):
    """What a loss or gradient function tells beside its main result.

    Attributes:
      state: new model state.
      loss: the loss, already multiplied by this replica's share; set by `from_loss`.
      weight: sum of the loss weights on this replica, () float; None if every replica
        and micro-batch weighs the same.
      metrics: name -> scalar, or (mean, weight) pairs that are reduced by weight.
      summaries: name -> value to look at, from the forward pass.
      per_example: name -> array with one entry for each row of the batch.
      inputs: what a block passes to the block before: (inputs, cotangent) or cotangent.
      loss_scale: the `LossScale` whose multiple of the loss was differentiated, as
        `from_loss` does; None if it was the loss itself.
    """

    state: Any = ()
    loss: Any = None
    weight: Any = None
    metrics: Any = {}
    summaries: Any = {}
    per_example: Any = {}
    inputs: Any = None
    loss_scale: Any = None


class Carry(NamedTuple):
    """What goes round from step to step; its memory is given to the next one.

    Attributes:
      weights: all weights, trained or not.
      state: model state.
      slots: what the optimizer remembers of the trained weights.
      n_skipped: () int32, steps skipped because a gradient was not finite.
      weights_l2: () float32, norm of the trained weights. It is computed when they are
        made, since reading weights that a step overwrites would cost a copy of them.
      loss_scale: the `LossScale`.
    """

    weights: Any
    state: Any
    slots: Any
    n_skipped: Any
    weights_l2: Any
    loss_scale: Any = NoLossScale()


def aux_of(state: Any, emitted: list[tuple[str, Any]]) -> Aux:
    """Sorts what a model emitted: its weight, metrics, summaries, values of rows."""
    weight, metrics, summaries, per_example = None, {}, {}, {}
    for name, value in emitted:
        if name == "weight":
            weight = value
            continue
        kind = metrics
        if name.startswith(SUMMARY_PREFIX):
            kind = summaries
        elif name.startswith(PER_EXAMPLE_PREFIX):
            kind = per_example
        kind[_unique(name, kind)] = value
    return Aux(state, None, weight, metrics, summaries, per_example)


GradFn = Callable[..., tuple[Any, Aux]]


def step_rngs(rng: Any, step: Any) -> tuple[Any, Any]:
    """Derives a step's keys from the run's key: (forward key, backward key).

    The keys depend on the run's key and the step number only, never on what was drawn
    before, so evaluating more often or resuming changes no key.
    """
    rest, forward = jax.random.split(jax.random.fold_in(rng, step))
    return forward, jax.random.split(rest)[1]


# --- Gradient sources: grad_fn(weights, state, rng, *xs) -> (grads, Aux) --------------


def from_loss(loss_fn: Callable[..., tuple[Any, Aux]], reduce: Reduce) -> GradFn:
    """Gradients of a whole model.

    Args:
      loss_fn: function of (weights, state, rng, batch) that returns (loss, Aux) with
        the new state and the loss weight of this replica's part of the batch.
      reduce: gives the share that this part has in the whole.

    Raises:
      ValueError: the loss is no scalar.
    """

    def grad_fn(weights: Any, state: Any, rng: Any, batch: Any) -> tuple[Any, Aux]:
        def shared_loss(w: Any) -> tuple[Any, Aux]:
            loss, aux = loss_fn(w, state, rng, batch)
            if jnp.shape(loss) != ():
                raise ValueError(
                    f"the loss must be one number, got shape {jnp.shape(loss)}: end "
                    "the model with a loss layer, or reduce with Mean over all axes."
                )
            loss = loss.astype(jnp.float32) * reduce.share(aux.weight)
            return scale.scale(loss), aux._replace(loss=loss)

        scale = current_loss_scale()
        (_, aux), grads = jax.value_and_grad(shared_loss, has_aux=True)(weights)
        return grads, aux._replace(loss_scale=scale)

    return grad_fn


def from_vjp(pure_fn: Callable[..., tuple[Any, Any]]) -> GradFn:
    """Gradients of a block from its inputs and the cotangent of its outputs.

    The gradient function takes (inputs, cotangent) and gives the inputs' cotangent in
    `Aux.inputs`; the loss block takes cotangent 1.
    """

    def grad_fn(
        weights: Any, state: Any, rng: Any, inputs: Any, cotangent: Any
    ) -> tuple[Any, Aux]:
        outputs, vjp, new_state = jax.vjp(
            lambda x, w: pure_fn(x, w, state, rng), inputs, weights, has_aux=True
        )
        grad_inputs, grads = vjp(cotangent)
        is_loss = isinstance(outputs, jax.Array) and outputs.shape == ()
        loss = outputs if is_loss else None
        return grads, Aux(state=new_state, loss=loss, inputs=grad_inputs)

    return grad_fn


def from_reverse(reverse_and_grad: Callable[..., tuple[Any, Any]]) -> GradFn:
    """Gradients of a reversible block from its outputs and their cotangent.

    Args:
      reverse_and_grad: function of (outputs, cotangent, weights, state, new_state, rng)
        that returns (inputs, (inputs' cotangent, gradients)).

    The gradient function takes (outputs, cotangent, new_state) and gives
    (inputs, cotangent) in `Aux.inputs`.
    """

    def grad_fn(
        weights: Any, state: Any, rng: Any, outputs: Any, cotangent: Any, new_state: Any
    ) -> tuple[Any, Aux]:
        inputs, (grad_inputs, grads) = reverse_and_grad(
            outputs, cotangent, weights, state, new_state, rng
        )
        return grads, Aux(state=new_state, inputs=(inputs, grad_inputs))

    return grad_fn


# --- The update ---------------------------------------------------------------------


def build_update(
    grad_fn: GradFn,
    optimizer_update: Callable[..., tuple[Any, Any, dict[str, Any]]],
    reduce: Reduce,
    trainable: list[bool],
    state_sync: list[str | None],
    accumulate: int = 1,
    skip_nonfinite: bool = True,
    packed: bool = False,
) -> Callable[[Carry, Any, Any], tuple[Carry, dict[str, Any]]]:
    """Builds `update(carry, shared, xs) -> (carry, out)`.

    The carry is a `Carry`, `shared` is (opt_params, rng, step) with the run's key, and
    `xs` is what `grad_fn` takes after (weights, state, rng).
    `out` has 'loss', 'gradients_l2', 'weights_l2', 'grads_finite', 'skipped_steps',
    the metrics, summaries and values of rows of the gradient function, 'inputs' if it
    gives any, and if rows have weights of their own 'loss/weight' and 'empty_batch' (0
    or 1): a batch that weighs nothing has loss and gradients 0. A metric that has a
    weight is followed by '{name}/weight'.

    Order: forward and gradient of the scaled loss on each micro-batch, reduce, unscale,
    finite test on the reduced gradients, optimizer (which clips). After a step that is
    not finite everything but the count of skipped steps and the loss scale is as
    before, bit for bit, and the optimizer's step number does not advance.

    Args:
      grad_fn: a gradient source.
      optimizer_update: (step, grads, weights, slots, opt_params) -> (weights, slots,
        stats), as `Optimizer.tree_update`; it gets the trainable leaves only.
      reduce: how replicas agree.
      trainable: for each leaf of the weights, whether it is trained.
      state_sync: for each leaf of the state, how replicas agree on it.
      accumulate: number of micro-batches the batch is cut into, one after the other.
      skip_nonfinite: keep everything when a gradient is not finite.
      packed: the carry is kept in few buffers (see `Packing`), where choosing between
        old and new values is free and a branch is not.
    """
    choose = _select_if if packed else _apply_if

    def update(carry: Carry, shared: Any, xs: Any) -> tuple[Carry, dict[str, Any]]:
        weights, state, slots, n_skipped, weights_l2, loss_scale = carry
        opt_params, rng, step = shared
        trained, fixed = trees.partition(weights, trainable)
        forward_rng, _ = step_rngs(reduce.key(rng), step)

        def trained_grads(state: Any, rng: Any, xs: Any) -> tuple[Any, Aux]:
            grads, aux = grad_fn(weights, state, rng, *xs)
            _check_structure("gradients", "weights", grads, weights)
            return trees.partition(grads, trainable)[0], aux

        with loss_scale_context(loss_scale):
            grads, aux = _accumulated(trained_grads, reduce, accumulate)(
                state, forward_rng, xs
            )
        grads = reduce.gradients(grads)
        if aux.loss_scale is not None:
            grads = aux.loss_scale.unscale(grads)
        gradients_l2 = l2_norm(grads)
        finite = _all_finite(grads, gradients_l2, loss_scale)

        def apply(old: Any) -> tuple[Any, Any]:
            trained, slots, state = old
            at_step = jnp.maximum(step - n_skipped, 1)
            new, slots_new, stats = optimizer_update(
                at_step, grads, trained, slots, opt_params
            )
            _check_structure("new weights", "weights", new, trained)
            _check_structure("new slots", "slots", slots_new, slots)
            _check_structure("new state", "state", aux.state, state)
            for name in ("gradients_l2", "weights_l2"):  # Known already, at no cost.
                stats.pop(name, None)
            return (new, slots_new, reduce.state(aux.state, state, state_sync)), stats

        old = (trained, slots, state)
        if skip_nonfinite:
            new, out = choose(finite, apply, old)
            n_skipped = n_skipped + (1 - finite.astype(jnp.int32))
        else:
            new, out = apply(old)
        trained, slots, state = new
        out |= _reported(aux, reduce)
        out |= {"gradients_l2": gradients_l2, "weights_l2": weights_l2}
        out |= {"grads_finite": finite, "skipped_steps": n_skipped}
        out |= loss_scale.stats()
        weights = trees.combine(trained, fixed)
        loss_scale = loss_scale.update(finite)
        new = Carry(weights, state, slots, n_skipped, l2_norm(trained), loss_scale)
        return new, out

    return update


def _reported(aux: Aux, reduce: Reduce) -> dict[str, Any]:
    """Joins what the gradient function tells over the replicas."""
    out = reduced_metrics(aux.metrics, reduce)
    out |= {n: reduce.summary(x) for n, x in aux.summaries.items()}
    out |= {n: reduce.joined(x) for n, x in aux.per_example.items()}
    if aux.weight is not None and not trees.is_concrete(aux.weight):
        total = reduce.sum(jnp.float32(aux.weight))
        out |= {"loss/weight": total, "empty_batch": jnp.float32(total == 0)}
    if aux.loss is not None:
        out["loss"] = reduce.losses(aux.loss)
    if aux.inputs is not None:
        out["inputs"] = aux.inputs
    return out


def _all_finite(grads: Any, norm: Any, loss_scale: LossScale) -> Any:
    """Whether to take the step.

    One test does for all gradients: a norm that overflows float32 is no step to take
    either. Only a loss scale is not to shrink for it, so then each is looked at.
    """
    finite = jnp.isfinite(norm)
    if isinstance(loss_scale, NoLossScale):
        return finite

    def look_at_each(grads: Any) -> Any:
        each = [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]
        return jnp.all(jnp.stack(each)) if each else jnp.bool_(True)

    return jax.lax.cond(finite, lambda _: jnp.bool_(True), look_at_each, grads)


def _accumulated(
    grad_fn: Callable[[Any, Any, Any], tuple[Any, Aux]], reduce: Reduce, k: int
) -> Callable[[Any, Any, Any], tuple[Any, Aux]]:
    """Runs k micro-batches under one scan and joins their gradients by weight."""
    if k == 1:
        return grad_fn

    scales: list[Any] = []  # Set while tracing; the same for all micro-batches.

    def accumulated(state: Any, rng: Any, xs: Any) -> tuple[Any, Aux]:
        scale = current_loss_scale()
        micro = jax.tree.map(
            lambda x: x.reshape((k, x.shape[0] // k, *x.shape[1:])), xs
        )

        def one(i: Any, state: Any, xs: Any) -> tuple[Any, Any, Any]:
            grads, aux = grad_fn(state, jax.random.fold_in(rng, i), xs)
            scales.append(aux.loss_scale if aux.loss_scale is None else scale)
            total = reduce.total(aux.weight)
            metrics = {n: as_pair(v) for n, v in aux.metrics.items()}
            metrics = {n: (v * w, w) for n, (v, w) in metrics.items()}
            sums = jax.tree.map(lambda x: x * total.astype(x.dtype), (grads, aux.loss))
            own = None if trees.is_concrete(aux.weight) else jnp.float32(aux.weight)
            kept = aux.summaries, aux.per_example
            return (total, own, sums, metrics), aux.state, kept

        def body(carry: Any, item: Any) -> tuple[Any, Any]:
            acc, state = carry
            more, state, kept = one(item[0], state, item[1])
            return (jax.tree.map(jnp.add, acc, more), state), kept

        first = jax.tree.map(lambda x: x[0], micro)
        shapes, *_ = jax.eval_shape(lambda s, x: one(0, s, x), state, first)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        (acc, state), kept = jax.lax.scan(body, (zeros, state), (jnp.arange(k), micro))
        total, weight, sums, metrics = acc
        summaries, per_example = jax.tree.map(_of_micro_batches, kept)
        grads, loss = jax.tree.map(lambda x: ratio(x, total.astype(x.dtype)), sums)
        metrics = {n: (ratio(v, w), w) for n, (v, w) in metrics.items()}
        aux = Aux(state, loss, weight, metrics, summaries, per_example)
        return grads, aux._replace(loss_scale=scales[-1])

    return accumulated


def _of_micro_batches(x: Any) -> Any:
    """Averages a number of (k,) micro-batches; joins an array along its first axis."""
    if x.ndim == 1:
        return jnp.mean(x)
    return x.reshape((-1, *x.shape[2:]))


def _apply_if(
    finite: Any, apply: Callable[[Any], tuple[Any, Any]], old: Any
) -> tuple[Any, dict[str, Any]]:
    """Applies the optimizer, or returns `old` bit for bit and NaN (0) for its stats.

    A branch and not a select: a select would read the old values that the new ones are
    written over, and so cost a copy of weights and slots.
    """
    _, stats = jax.eval_shape(apply, old)

    def keep(old: Any) -> tuple[Any, Any]:
        unknown = jax.tree.map(_unknown, stats)
        return old, unknown

    return jax.lax.cond(finite, apply, keep, old)


def _select_if(
    finite: Any, apply: Callable[[Any], tuple[Any, Any]], old: Any
) -> tuple[Any, dict[str, Any]]:
    """Does what `_apply_if` does, by a select of each value."""
    new, stats = apply(old)
    return jax.tree.map(
        lambda a, b: jnp.where(finite, a, b),
        (new, stats),
        (old, jax.tree.map(_unknown, stats)),
    )


def _unknown(stat: Any) -> Any:
    is_float = jnp.issubdtype(stat.dtype, jnp.floating)
    return jnp.full(stat.shape, jnp.nan if is_float else 0, stat.dtype)


def _check_structure(what: str, of: str, tree: Any, wanted: Any) -> None:
    wrong = trees.difference(wanted, tree)
    if wrong:
        raise ValueError(f"{what} do not match the {of}: {wrong}.")


def _unique(name: str, taken: dict[str, Any]) -> str:
    candidate, i = name, 0
    while candidate in taken:
        i += 1
        candidate = f"{name}_{i}"
    return candidate

"""Any Optax transformation as an optimizer of this package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import gin
import jax
import jax.numpy as jnp
import optax

from retrax import trees
from retrax.optimizers.base import Optimizer, OptParams, Slots, Stats, Weights

__all__ = ["FromOptax"]


@gin.configurable(module="retrax.optimizers")
class FromOptax(Optimizer):
    """Wraps an `optax.GradientTransformation`; new weights are weights + updates.

    The transformation sees the whole tree, so chains, masks and per-group rules work.
    Slots are the flat tuple of the leaves of its state (plain arrays; typed random keys
    as their uint32 data), so a checkpoint holds no Optax class; `optax_state` gives
    the state back in Optax's form.

    Which learning rate counts, in this order:

    1. The transformation holds a number injected by
       `optax.inject_hyperparams(...)(learning_rate=0.1)`, at any depth: the trainer's
       rate, `opt_params['learning_rate']`, is written there before each step. It
       starts as the injected number, or as the argument learning_rate if given.
    2. Else, if the argument learning_rate is given: updates are multiplied by
       `opt_params['learning_rate']`. Build the transformation with rate 1, e.g.
       `FromOptax(optax.adamw(1.0), learning_rate=1e-3)`.
    3. Else the transformation's own rate or schedule counts, and
       `opt_params['learning_rate']` (1.0) is not used; `uses_learning_rate` is False.

    Example:
      >>> opt = FromOptax(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
      >>> weights = {'w': jnp.array([1.0])}
      >>> slots, opt_params = opt.tree_init(weights)
      >>> f"{float(opt_params['learning_rate']):.1f}"
      '0.1'
      >>> opt_params['learning_rate'] = jnp.float32(0.5)
      >>> grads = {'w': jnp.array([1.0])}
      >>> opt.tree_update(1, grads, weights, slots, opt_params)[0]['w'].tolist()
      [0.5]
    """

    def __init__(
        self,
        transformation: optax.GradientTransformation,
        learning_rate: float | None = None,
        clip_grad_norm: float | None = None,
    ) -> None:
        """Wraps a transformation.

        Args:
          transformation: e.g. `optax.adamw(1e-3)`; its update may need the weights, but
            no other extra arguments.
          learning_rate: see the class; None: the transformation's own.
          clip_grad_norm: largest global gradient norm, applied before it.

        Raises:
          TypeError: transformation is something else.
        """
        if not isinstance(transformation, optax.GradientTransformation):
            raise TypeError(_not_a_transformation(transformation))
        rate = 1.0 if learning_rate is None else learning_rate
        super().__init__(learning_rate=rate, clip_grad_norm=clip_grad_norm)
        self._tx = optax.with_extra_args_support(transformation)
        self._rate_given = learning_rate is not None
        self._injected: bool | None = None
        self._layouts: dict[Any, _Layout] = {}

    @property
    def uses_learning_rate(self) -> bool | None:
        """Says whether `opt_params['learning_rate']` has an effect.

        None: not known before the first `tree_init` or `tree_update`.
        """
        return True if self._rate_given else self._injected

    def optax_state(self, weight_tree: Weights, slots: Slots = None) -> Any:
        """Returns slots (by default `self.slots`) in Optax's own form."""
        slots = self.slots if slots is None else slots
        if slots is None:
            raise ValueError("no slots yet: call tree_init first, or pass slots.")
        return _unpack(self._layout(weight_tree), slots)

    def init(self, weights: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the slots of one array, taken as a tree of one leaf."""
        return _pack(self._tx.init(weights))

    def update(
        self,
        step: Any,
        grads: jax.Array,
        weights: jax.Array,
        slots: Slots,
        opt_params: OptParams,
    ) -> tuple[jax.Array, Slots]:
        """Returns (new weights, new slots) of one array, taken as a tree."""
        return self._apply(grads, weights, slots, opt_params)

    def tree_init(self, weight_tree: Weights) -> tuple[tuple[Slots, ...], OptParams]:
        """Returns (leaves of the Optax state, opt_params)."""
        weights = jax.tree.map(jnp.asarray, weight_tree)
        self._layout(weights)
        state = self._tx.init(weights)
        opt_params = dict(self._opt_params)
        if self._injected and not self._rate_given:
            rate = jnp.asarray(_injected_rates(state)[0], jnp.float32)
            opt_params["learning_rate"] = rate
            if trees.is_concrete(rate):
                self._opt_params = dict(opt_params)
        slots = _pack(state)
        self._store(slots)
        return slots, opt_params

    def tree_update(
        self,
        step: Any,
        grad_tree: Weights,
        weight_tree: Weights,
        slots: Sequence[Slots],
        opt_params: OptParams,
        store_slots: bool = True,
    ) -> tuple[Weights, tuple[Slots, ...], Stats]:
        """Returns (new weight tree, new slots, stats); see `Optimizer.tree_update`.

        The transformation counts steps itself, so step is only checked.
        """
        grads, weights, stats = self._prepare(step, grad_tree, weight_tree)
        treedef = jax.tree.structure(weight_tree)
        new_tree, new_slots = self._apply(
            jax.tree.unflatten(treedef, grads),
            jax.tree.unflatten(treedef, weights),
            slots,
            opt_params,
        )
        self._check_kept(weight_tree, weights, jax.tree.leaves(new_tree))
        if store_slots:
            self._store(new_slots)
        return new_tree, new_slots, stats

    def _apply(
        self, grads: Weights, weights: Weights, slots: Slots, opt_params: OptParams
    ) -> tuple[Weights, tuple[Slots, ...]]:
        layout = self._layout(weights)
        state = _unpack(layout, slots)
        rate = opt_params["learning_rate"]
        if self._injected:
            state = _with_rate(state, rate)
        updates, state = self._tx.update(grads, state, weights)
        if jax.tree.structure(state) != layout.treedef:
            raise ValueError(
                "the transformation changed the structure of its state from "
                f"{layout.treedef} to {jax.tree.structure(state)}; a state must keep "
                "its structure from step to step."
            )
        if self._rate_given and not self._injected:
            updates = jax.tree.map(lambda u: u * rate, updates)
        # Mixed precision must not change slots' dtypes, or each step compiles anew.
        slots = tuple(
            new.astype(dtype)
            for new, dtype in zip(_pack(state), layout.dtypes, strict=True)
        )
        return optax.apply_updates(weights, updates), slots

    def _layout(self, weight_tree: Weights) -> _Layout:
        leaves, treedef = jax.tree.flatten(weight_tree)
        signature = tuple((jnp.shape(w), jnp.result_type(w)) for w in leaves)
        if (treedef, signature) not in self._layouts:
            layout = _layout_of(self._tx, weight_tree)
            self._layouts[treedef, signature] = layout
        layout = self._layouts[treedef, signature]
        self._injected = layout.n_rates == 1
        return layout


class _Layout(NamedTuple):
    """What is needed to give a flat tuple of slots the form of an Optax state."""

    treedef: Any
    dtypes: tuple[Any, ...]
    key_impls: tuple[str | None, ...]
    n_rates: int


def _layout_of(tx: optax.GradientTransformation, weight_tree: Weights) -> _Layout:
    found = []

    def look(weights: Weights) -> None:
        state = tx.init(weights)
        leaves, treedef = jax.tree.flatten(state)
        impls = tuple(
            str(jax.random.key_impl(x)) if _is_key(x) else None for x in leaves
        )
        dtypes = tuple(x.dtype for x in _pack(state))
        found.append(_Layout(treedef, dtypes, impls, len(_injected_rates(state))))

    jax.eval_shape(look, weight_tree)
    (layout,) = found
    if layout.n_rates > 1:
        raise ValueError(
            f"the transformation holds {layout.n_rates} injected learning rates, but a "
            "trainer gives one; inject it in one place, and give the others as plain "
            "numbers or schedules."
        )
    return layout


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def _pack(state: Any) -> tuple[jax.Array, ...]:
    leaves = (jnp.asarray(x) for x in jax.tree.leaves(state))
    return tuple(jax.random.key_data(x) if _is_key(x) else x for x in leaves)


def _unpack(layout: _Layout, slots: Slots) -> Any:
    slots = tuple(slots)
    if len(slots) != len(layout.key_impls):
        raise ValueError(
            f"{len(slots)} slots were given, but the state of this transformation has "
            f"{len(layout.key_impls)} arrays; slots come from tree_init(weight_tree) "
            "of the same transformation and weights."
        )
    leaves = [
        jnp.asarray(x) if impl is None else jax.random.wrap_key_data(x, impl=impl)
        for x, impl in zip(slots, layout.key_impls, strict=True)
    ]
    return jax.tree.unflatten(layout.treedef, leaves)


def _is_injected(node: Any) -> bool:
    kinds = (optax.InjectStatefulHyperparamsState, optax.InjectHyperparamsState)
    return isinstance(node, kinds)


def _takes_rate(node: Any) -> bool:
    # Hyper-parameters given as schedules have a state of their own and follow that.
    scheduled = getattr(node, "hyperparams_states", {})
    return "learning_rate" in node.hyperparams and "learning_rate" not in scheduled


def _injected_rates(state: Any) -> list[Any]:
    rates = []
    for node in jax.tree.leaves(state, is_leaf=_is_injected):
        if _is_injected(node):
            if _takes_rate(node):
                rates.append(node.hyperparams["learning_rate"])
            rates += _injected_rates(node.inner_state)
    return rates


def _with_rate(state: Any, rate: jax.Array) -> Any:
    """Writes a learning rate into the injected hyper-parameters of a state."""

    def visit(node: Any) -> Any:
        if not _is_injected(node):
            return node
        node = node._replace(inner_state=_with_rate(node.inner_state, rate))
        if _takes_rate(node):
            dtype = jnp.result_type(node.hyperparams["learning_rate"])
            new = {"learning_rate": jnp.asarray(rate, dtype)}
            node = node._replace(hyperparams={**node.hyperparams, **new})
        return node

    return jax.tree.map(visit, state, is_leaf=_is_injected)


def _not_a_transformation(got: Any) -> str:
    text = (
        "FromOptax takes an optax.GradientTransformation, e.g. "
        f"FromOptax(optax.adam(1e-3)); got {got!r} of type {type(got).__name__}."
    )
    if isinstance(got, Optimizer):
        return text + " This is an optimizer of retrax already: use it as it is."
    if isinstance(got, optax.MultiSteps):
        return text + " Pass its .gradient_transformation()."
    if callable(got):
        return text + " Call the function first, and pass what it returns."
    return text

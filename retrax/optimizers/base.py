"""The optimizer interface: a rule for one array, lifted to a tree of weights.

Every rule of this package builds on it. Needs `retrax.trees`, norms.py and JAX only.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from retrax import trees
from retrax.optimizers.norms import checked_max_norm, clipped, l2_norm

__all__ = ["OptParams", "Optimizer", "Slots", "Weights"]

Weights: TypeAlias = Any
"""A pytree of arrays; gradients have the same structure."""

Slots: TypeAlias = Any
"""What an optimizer remembers between steps: a pytree of arrays, or None."""

OptParams: TypeAlias = dict[str, jax.Array]
"""Hyper-parameters that may change while training runs; float32 scalars by name."""

Stats: TypeAlias = dict[str, jax.Array]


class Optimizer:
    """Updates weights from gradients; subclasses write the rule for one array.

    A subclass defines `init` and `update`. `tree_init` and `tree_update` apply them to
    each leaf of a pytree of weights (nested tuples, lists, dicts; empty containers have
    no leaves). The object itself holds no part of the calculation: `tree_update` is
    a pure function of its arguments, so it can be traced by `jax.jit`.

    Example:
      >>> class SignSGD(Optimizer):
      ...     def init(self, weights):
      ...         return None
      ...     def update(self, step, grads, weights, slots, opt_params):
      ...         return weights - opt_params['learning_rate'] * jnp.sign(grads), None
      >>> opt = SignSGD(learning_rate=0.5)
      >>> weights = {'w': jnp.array([1.0, 2.0])}
      >>> slots, opt_params = opt.tree_init(weights)
      >>> grads = {'w': jnp.array([3.0, -4.0])}
      >>> weights, slots, stats = opt.tree_update(1, grads, weights, slots, opt_params)
      >>> weights['w'].tolist(), float(stats['gradients_l2'])
      ([0.5, 2.5], 5.0)
    """

    def __init__(
        self,
        learning_rate: float = 0.01,
        clip_grad_norm: float | None = None,
        **opt_params: float,
    ) -> None:
        """Sets the hyper-parameters.

        Args:
          learning_rate: step size used until a schedule gives another.
          clip_grad_norm: largest global norm of the gradients; larger ones are scaled
            down to it. None or 0: no clipping.
          **opt_params: more scalars for `update`, changeable while training runs.
        """
        self._clip_grad_norm = checked_max_norm(clip_grad_norm, "clip_grad_norm")
        self._opt_params = _as_scalars({"learning_rate": learning_rate, **opt_params})
        self._slots: Slots = None

    @property
    def opt_params(self) -> OptParams:
        """Hyper-parameters: name -> float32 scalar; 'learning_rate' is always there."""
        return self._opt_params

    @opt_params.setter
    def opt_params(self, opt_params: Mapping[str, Any]) -> None:
        if "learning_rate" not in opt_params:
            raise ValueError(
                "opt_params must hold 'learning_rate'; got only "
                f"{sorted(opt_params)}. Add it, e.g. {{**opt.opt_params, ...}}."
            )
        self._opt_params = _as_scalars(opt_params)

    @property
    def clip_grad_norm(self) -> float | None:
        """Largest global gradient norm, or None when gradients are not clipped."""
        return self._clip_grad_norm

    @property
    def slots(self) -> Slots:
        """The slots of the last `tree_init` or `tree_update`; None before the first."""
        return self._slots

    @slots.setter
    def slots(self, slots: Slots) -> None:
        self._slots = slots

    def init(self, weights: jax.Array) -> Slots:
        """Returns the slots of one array of weights (None if it needs none)."""
        raise NotImplementedError(
            f"{type(self).__name__} has no init(weights); define it, returning the "
            "slots of one array (None if the rule needs none)."
        )

    def update(
        self,
        step: Any,
        grads: jax.Array,
        weights: jax.Array,
        slots: Slots,
        opt_params: OptParams,
    ) -> tuple[jax.Array, Slots]:
        """Returns (new weights, new slots) of one array.

        Args:
          step: int scalar, 1 in the first update.
          grads: gradient, same shape as weights.
          weights: the array to update; its shape and dtype must be kept.
          slots: what `init`, or the last update, returned.
          opt_params: current hyper-parameters, float32 scalars by name.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no update(step, grads, weights, slots, "
            "opt_params); define it, returning (new_weights, new_slots) of one array."
        )

    def tree_init(self, weight_tree: Weights) -> tuple[tuple[Slots, ...], OptParams]:
        """Returns (slots, opt_params) for a tree of weights.

        Slots are a flat tuple: one entry per leaf, in the order of `jax.tree.leaves`.
        """
        slots = tuple(self.init(jnp.asarray(w)) for w in jax.tree.leaves(weight_tree))
        self._store(slots)
        return slots, dict(self._opt_params)

    def tree_update(
        self,
        step: Any,
        grad_tree: Weights,
        weight_tree: Weights,
        slots: Sequence[Slots],
        opt_params: OptParams,
        store_slots: bool = True,
    ) -> tuple[Weights, tuple[Slots, ...], Stats]:
        """Returns (new weight tree, new slots, stats) of one step.

        Args:
          step: int scalar, 1 in the first update (Trax's classic Trainer gives 0 there,
            and its Adam adds 1; here no rule adds 1).
          grad_tree: gradients; structure and shapes of weight_tree.
          weight_tree: weights before the step.
          slots: one entry per leaf, from `tree_init` or the step before.
          opt_params: current hyper-parameters.
          store_slots: also keep the new slots in `self.slots`. Values that JAX is
            tracing are never kept.

        Stats are 'gradients_l2', of the gradients before clipping, and 'weights_l2', of
        the weights before the step.

        Raises:
          ValueError: structure or shapes differ, slots do not belong to the weights, or
            `update` changed a leaf's shape or dtype; the text names the leaf.
        """
        grads, weights, stats = self._prepare(step, grad_tree, weight_tree)
        slots = tuple(slots)
        if len(slots) != len(weights):
            raise ValueError(
                f"{len(slots)} slots were given for {len(weights)} arrays of weights; "
                "slots come from tree_init(weight_tree) of the same weights."
            )
        pairs = [
            self.update(step, g, w, s, opt_params)
            for g, w, s in zip(grads, weights, slots, strict=True)
        ]
        new_weights = [w for w, _ in pairs]
        new_slots = tuple(s for _, s in pairs)
        self._check_kept(weight_tree, weights, new_weights)
        if store_slots:
            self._store(new_slots)
        new_tree = jax.tree.unflatten(jax.tree.structure(weight_tree), new_weights)
        return new_tree, new_slots, stats

    def _prepare(
        self, step: Any, grad_tree: Weights, weight_tree: Weights
    ) -> tuple[list[jax.Array], list[jax.Array], Stats]:
        """Returns (clipped gradient leaves, weight leaves, stats), all checked."""
        if isinstance(step, (int, np.integer)) and step < 1:
            raise ValueError(
                f"step is {step}, but steps count from 1: bias corrections need "
                "step=1 in the first update."
            )
        _check_same_structure(weight_tree, grad_tree)
        grads = [jnp.asarray(g) for g in jax.tree.leaves(grad_tree)]
        weights = [jnp.asarray(w) for w in jax.tree.leaves(weight_tree)]
        for i, (g, w) in enumerate(zip(grads, weights, strict=True)):
            if g.shape != w.shape:
                raise ValueError(
                    f"gradient '{_leaf_path(weight_tree, i)}' has shape {g.shape}, but "
                    f"its weights have {w.shape}; take gradients of these weights."
                )
        norm = l2_norm(grads)
        stats = {"gradients_l2": norm, "weights_l2": l2_norm(weights)}
        if self._clip_grad_norm is not None:
            grads = clipped(grads, norm, self._clip_grad_norm)
        return grads, weights, stats

    def _check_kept(
        self, weight_tree: Weights, old: Sequence[jax.Array], new: Sequence[Any]
    ) -> None:
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            if isinstance(b, jax.Array) and (a.shape, a.dtype) == (b.shape, b.dtype):
                continue
            if isinstance(b, jax.Array):
                got = f"{b.dtype}{b.shape}"
            else:
                got = f"{type(b).__name__}, not a jax array"
            raise ValueError(
                f"{type(self).__name__} changed weights '{_leaf_path(weight_tree, i)}' "
                f"from {a.dtype}{a.shape} to {got}; update() must return an array of "
                "the old shape and dtype, e.g. new_weights.astype(weights.dtype)."
            )

    def _store(self, slots: Slots) -> None:
        if trees.is_concrete(slots):
            self._slots = slots


def _check_same_structure(weight_tree: Weights, grad_tree: Weights) -> None:
    if jax.tree.structure(weight_tree) == jax.tree.structure(grad_tree):
        return
    weights, grads = (jax.tree.map(lambda _: 0, t) for t in (weight_tree, grad_tree))
    raise ValueError(
        "gradients do not have the structure of the weights; first difference at "
        f"{trees.difference(weights, grads)}. Take gradients of these weights."
    )


def _leaf_path(tree: Weights, index: int) -> str:
    return trees.leaves_with_path(tree)[index][0] or "(root)"


def _as_scalars(opt_params: Mapping[str, Any]) -> OptParams:
    scalars = {}
    for name, value in opt_params.items():
        is_number = isinstance(value, (numbers.Real, np.generic, np.ndarray, jax.Array))
        if not is_number or getattr(value, "shape", ()) != ():
            raise TypeError(
                f"optimizer parameter {name!r} must be a number, got {value!r}; other "
                "settings belong in attributes of the optimizer."
            )
        scalars[name] = jnp.asarray(value, jnp.float32)
    return scalars

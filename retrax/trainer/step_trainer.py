"""`StepTrainer`: one model with its loss, one optimizer, one compiled step.

It holds the weights, model state and optimizer slots while they are trained, and lends
them back to the layers when somebody reads `model.weights`. `Trainer` and `Loop` drive
it; a custom experiment overrides `loss`, `gradients`, `update` or `metrics`.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from retrax import trees
from retrax.errors import ConfigError, DataError
from retrax.layers import tree as layer_tree
from retrax.layers.base import Layer
from retrax.layers.running import MEMORY_MODES, batch_context, memory_context
from retrax.optimizers import l2_norm
from retrax.optimizers.base import Optimizer
from retrax.shapes import signature
from retrax.trainer.devices import Devices
from retrax.trainer.lender import Lender
from retrax.trainer.loss_scale import LossScale
from retrax.trainer.packing import Packing
from retrax.trainer.padding import cut_rows, divides, pad_rows
from retrax.trainer.precision import Policy, as_loss_scale, as_policy
from retrax.trainer.reduce import Reduce
from retrax.trainer.sharding import Sharding, as_sharding
from retrax.trainer.step import (
    Aux,
    Carry,
    aux_of,
    build_update,
    from_loss,
)

__all__ = ["StepTrainer"]


class StepTrainer(Lender):
    """Updates the weights of one model, one batch at a time.

    Example:
      >>> import jax, numpy as np
      >>> from retrax import layers as tl, optimizers, shapes
      >>> model = tl.Serial(tl.Dense(1), tl.L2Loss())
      >>> batch = (np.ones((4, 2), 'f'), np.ones((4, 1), 'f'), np.ones((4, 1), 'f'))
      >>> _ = model.init(shapes.signature(batch), rng=jax.random.key(0))
      >>> trainer = StepTrainer(model, optimizers.SGD(0.1), n_devices=1)
      >>> key = jax.random.key(1)
      >>> losses = [float(trainer.one_step(batch, key)[0]) for _ in range(3)]
      >>> losses[2] < losses[0]
      True

    Methods to override, all traced, so pure functions of their arguments:
      loss(weights, state, rng, batch) -> (loss, Aux)
      gradients(weights, state, rng, batch) -> (grads, Aux)
      update(step, grads, weights, slots, opt_params) -> (weights, slots, stats)
      metrics(aux) -> dict of scalars or (mean, weight) pairs
    What they read beside their arguments is fixed by tracing; see `variant`.
    """

    def __init__(
        self,
        model_with_loss: Layer,
        optimizer: Optimizer,
        n_devices: int | None = None,
        adasum: bool = False,
        *,
        reduce: str = "weight",
        accumulate: int = 1,
        backend: str | None = None,
        skip_nonfinite: bool = True,
        memory: str = "reversible",
        precision: str | Policy | None = None,
        loss_scale: LossScale | None = None,
        sharding: str | Sharding | None = None,
        hooks: Any = None,
    ) -> None:
        """Makes a trainer for an initialised model that ends with a loss layer.

        Args:
          model_with_loss: layer from a whole batch to one number, initialised.
          optimizer: turns gradients into new weights.
          n_devices: number of devices; None means all.
          adasum: Trax's flag for reduce='adasum'.
          reduce: how replicas agree: 'weight', 'mean' or 'adasum'; see `Reduce`.
          accumulate: number of micro-batches a batch is cut into.
          backend: 'shard_map' or 'pmap', for several devices; see `Devices`.
          skip_nonfinite: leave everything as it was when a gradient is not finite.
          memory: what is kept for the backward pass: 'reversible': nothing of
            reversible layers, they are reversed; 'remat': only the inputs of such
            layers and of the blocks of `Repeat`, which are computed again; 'plain':
            everything.
          precision: 'float32', 'mixed_bfloat16', 'mixed_float16', or a `Policy`.
          loss_scale: what losses are multiplied by before they are differentiated; by
            default a `DynamicLossScale` for float16 and none for others.
          sharding: how weights, slots and gradients are cut over several devices:
            'fsdp', or a `Sharding` with rules by path; None keeps weights whole.
          hooks: object whose `gradients` replaces ours, such as a Trainer.
        """
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be an Optimizer such as Adam(1e-3), got {optimizer!r}."
            )
        if type(accumulate) is not int or accumulate < 1:
            raise ConfigError(
                f"accumulate must be a whole number of at least 1, got {accumulate!r}."
            )
        if memory not in MEMORY_MODES:
            raise ConfigError(f"memory must be one of {MEMORY_MODES}, got {memory!r}.")
        self._memory = memory
        self.policy = as_policy(precision)
        self._first_loss_scale = as_loss_scale(loss_scale, self.policy)
        self._optimizer = optimizer
        self._accumulate = accumulate
        self._skip_nonfinite = skip_nonfinite
        self._hooks = hooks if hooks is not None else self
        self.devices = Devices(n_devices, backend, as_sharding(sharding))
        kind = "adasum" if adasum else reduce
        self._check_reduce(kind)
        self.reduce = Reduce(self.devices.axis, self.devices.n_cuts, kind)
        self._programs: dict[Hashable, dict[bool, Any]] = {}
        self.variant = None
        self._maskable: bool | None = None
        self._carry: Any = None
        self._packing: Packing | None = None
        self._placement: Any = None  # Of the carry, if weights are cut.
        self._learning_rate: tuple[float | None, Any] = (None, None)
        self._step = 0
        self._opt_params: dict[str, Any] = {}
        super().__init__(model_with_loss)

    def _check_reduce(self, kind: str) -> None:
        if self.devices.sharding is not None and kind != "weight":
            raise ConfigError(
                f"reduce={kind!r} joins gradients of devices that have all weights; "
                "with a sharding it must be 'weight'."
            )

    # --- Training -------------------------------------------------------------------

    def one_step(
        self,
        batch: tuple[Any, ...],
        rng: Any,
        step: int | None = None,
        learning_rate: float | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Updates the weights once.

        Args:
          batch: tuple of arrays with a common first axis.
          rng: the run's random key; the step's own keys are derived from it and `step`.
          step: number of this step, from 1; by default one more than at the last call.
          learning_rate: per step; by default the optimizer's own.

        Returns:
          (loss, stats), as device values still being computed. Stats holds 'loss',
          'gradients_l2' and 'weights_l2' (before clipping and update), 'grads_finite',
          'skipped_steps', what the loss scale shows, and the model's own metrics,
          'forward/...' summaries and 'per_example/...' values. If rows have weights,
          also 'loss/weight' (of the batch) and 'empty_batch' (1 if that is 0).
        """
        if self._reload_needed:
            self._reload()
        self._step = step = self._step + 1 if step is None else step
        opt_params = self._opt_params
        if learning_rate is not None:
            # A new host value each step would be one more transfer each step.
            if learning_rate != self._learning_rate[0]:
                self._learning_rate = (learning_rate, jnp.float32(learning_rate))
            opt_params = {**opt_params, "learning_rate": self._learning_rate[1]}
        shared = (opt_params, rng, np.int32(step))
        pieces = self.devices.n_cuts * self._accumulate
        if pieces > 1:
            fn, xs = self._fitted(batch, pieces)
        else:
            fn, xs = self._compiled.get(True), (batch, None)
        if fn is None:
            self._check_batch(batch)
            fn = self._compile(split=True)
        self._carry, out = fn(self._carry, shared, xs)
        self._layers_current = False
        if pieces > 1:
            out = cut_rows(out, batch[0].shape[0], pieces, self.devices.shard[1])
        return out["loss"], out

    def loss(self, weights: Any, state: Any, rng: Any, batch: Any) -> tuple[Any, Aux]:
        """Computes the loss of a batch, or of this device's part of it."""
        loss, new_state, emitted = self.policy.run_loss(
            self._model, batch, weights, state, rng
        )
        return loss, aux_of(new_state, emitted)

    def gradients(self, weights: Any, state: Any, rng: Any, batch: Any) -> Any:
        """Computes (gradients, Aux); by default those of `loss`."""
        return from_loss(self.loss, self.reduce)(weights, state, rng, batch)

    def update(
        self, step: Any, grads: Any, weights: Any, slots: Any, opt_params: Any
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Computes new trainable weights and slots; by default by the optimizer."""
        return self._optimizer.tree_update(
            step, grads, weights, slots, opt_params, store_slots=False
        )

    def metrics(self, aux: Aux) -> dict[str, Any]:
        """Names the values reported with each step beside the loss."""
        return aux.metrics

    @property
    def variant(self) -> Hashable:
        """What the methods above depend on beside their arguments; None at first.

        They are traced and compiled once for each value, and what was compiled is kept.
        So a step that is to compute something else (more passes, another loss) sets
        another value first.
        """
        return self._variant

    @variant.setter
    def variant(self, value: Hashable) -> None:
        self._variant = value
        self._compiled = self._programs.setdefault(value, {})

    def _forget_programs(self) -> None:
        for compiled in self._programs.values():
            compiled.clear()

    # --- What a person or a checkpoint reads and sets ---------------------------------

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        return self._optimizer

    @property
    def skip_nonfinite(self) -> bool:
        """Whether steps with gradients that are not finite are left out."""
        return self._skip_nonfinite

    @property
    def n_devices(self) -> int:
        """Number of devices."""
        return self.devices.n

    @property
    def carry(self) -> Carry:
        """Weights, state, slots and counters as they are; the next step uses them up.

        Copy what has to outlive the next step.
        """
        if self._reload_needed:
            self._reload()
        return self._unpacked()

    @property
    def slots(self) -> Any:
        """A copy of the optimizer's slots."""
        return self.devices.fetch(self.carry.slots)

    @slots.setter
    def slots(self, value: Any) -> None:
        carry = self.carry
        where = self._placement and self._placement.slots
        self._hold(carry._replace(slots=self.devices.put(value, where)))

    @property
    def n_skipped(self) -> int:
        """Number of steps skipped because a gradient was not finite."""
        return int(self.devices.fetch(self.carry.n_skipped))

    @n_skipped.setter
    def n_skipped(self, value: int) -> None:
        n_skipped = self.devices.put(jnp.int32(value))
        self._hold(self.carry._replace(n_skipped=n_skipped))

    @property
    def loss_scale(self) -> LossScale:
        """What losses are multiplied by before they are differentiated."""
        return self.devices.fetch(self.carry.loss_scale)

    @loss_scale.setter
    def loss_scale(self, value: LossScale) -> None:
        self._hold(self.carry._replace(loss_scale=self.devices.put(value)))

    @property
    def opt_params(self) -> dict[str, Any]:
        """The optimizer's hyper-parameters, among them 'learning_rate'."""
        if self._reload_needed:
            self._reload()
        return self._opt_params

    @opt_params.setter
    def opt_params(self, value: dict[str, Any]) -> None:
        self._opt_params = {k: jnp.asarray(v) for k, v in value.items()}

    def reset_optimizer(self, reread_trainable: bool = False) -> None:
        """Makes the optimizer begin anew: slots, hyper-parameters and step numbers.

        Args:
          reread_trainable: also see anew which layers are trainable, and compile anew.
        """
        self.pull(about_to_change=True)
        self._carry, self._step = None, 0
        if reread_trainable:
            self._forget_programs()

    def trainable_paths(self) -> list[str]:
        """Paths of the weights that are trained, in the order of their slots."""
        weights = self.carry.weights
        named = layer_tree.named_leaves(self._model, weights)
        mask = layer_tree.trainable_list(self._model, weights)
        return [path for (path, _), on in zip(named, mask, strict=True) if on]

    # --- The layers' side: they ask for values they do not hold -----------------------

    def _copy_of(self, what: str) -> Any:
        return self.devices.fetch(getattr(self.carry, what))

    def _reload(self) -> None:
        """Makes the carry from what the layers hold; slots stay if they still fit."""
        weights, state = self._take()
        mask = layer_tree.trainable_list(self._model, weights)
        trained = trees.partition(weights, mask)[0]
        if self._carry is None:
            slots, opt_params = self._new_slots(trained)
            self._opt_params = {k: jnp.asarray(v) for k, v in opt_params.items()}
            placed = self._place(weights, mask, slots)
            slots = self.devices.put(slots, placed.slots)
            n_skipped = self.devices.put(jnp.int32(0))
            loss_scale = self.devices.put(self._first_loss_scale)
        else:
            _, _, slots, n_skipped, _, loss_scale = self._unpacked()
            placed = self._place(weights, mask, slots)
        self._hold(
            Carry(
                self.devices.put(weights, placed.weights),
                self.devices.put(state),
                slots,
                n_skipped,
                self.devices.put(l2_norm(trained)),
                loss_scale,
            )
        )
        self._let_go()

    def _place(self, weights: Any, mask: list[bool], slots: Any) -> Carry:
        """Decides where the carry lies, if weights are cut; else all Nones."""
        if self.devices.sharding is None:
            return Carry(*(None,) * len(Carry._fields))
        named = layer_tree.named_leaves(self._model, weights)
        own, placed_slots, whole = self.devices.placement(named, mask, slots)
        own = jax.tree.unflatten(jax.tree.structure(weights), own)
        self._placement = Carry(own, whole, placed_slots, whole, whole, whole)
        return self._placement

    def _hold(self, carry: Carry) -> None:
        """Keeps a carry for the next step; a small one in few buffers."""
        packs = self._placement is None and Packing.suits(carry)
        packing = Packing(carry, _kind) if packs else None
        if packing != self._packing:
            self._packing = packing
            self._forget_programs()
        self._carry = self.devices.put(packing.pack(carry)) if packing else carry

    def _unpacked(self) -> Carry:
        return self._packing.unpack(self._carry) if self._packing else self._carry

    # --- Compiling --------------------------------------------------------------------

    def lowered(self, batch_signature: Any) -> Any:
        """Returns the step lowered for XLA, without any values.

        It is what `one_step` compiles for a batch that divides over the devices; the
        trainer need hold no weights for it.

        Args:
          batch_signature: shapes and dtypes of the parts of a batch.

        Raises:
          ConfigError: the trainer runs on several devices.
        """
        if self.devices.n > 1:
            raise ConfigError(
                f"a step is lowered for one device, this trainer has {self.devices.n}: "
                "set n_devices=1."
            )
        batch = tuple(map(_struct, batch_signature))
        self._check_batch(batch)
        carry, opt_params = jax.eval_shape(self._first_carry, batch)
        packing = Packing(carry, _kind) if Packing.suits(carry) else None
        fn = self._step_fn(carry.weights, carry.state, packing)
        if packing:
            carry = jax.eval_shape(packing.pack, carry)
        key = jax.eval_shape(lambda: jax.random.key(0))
        shared = (opt_params, key, jax.ShapeDtypeStruct((), np.int32))
        return self.devices.compile(fn).lower(carry, shared, (batch, None))

    def _first_carry(self, batch: Any) -> tuple[Carry, Any]:
        """Makes (carry, hyper-parameters) as they are before the first step."""
        sig = signature(batch[0] if len(batch) == 1 else batch)
        weights, state = self._model.init(sig, jax.random.key(0))
        mask = layer_tree.trainable_list(self._model, weights)
        trained = trees.partition(weights, mask)[0]
        slots, opt_params = self._new_slots(trained)
        norm, scale = l2_norm(trained), self._first_loss_scale
        carry = Carry(weights, state, slots, jnp.int32(0), norm, scale)
        return carry, jax.tree.map(jnp.asarray, opt_params)

    def _new_slots(self, trained: Any) -> tuple[Any, Any]:
        """Makes (slots, hyper-parameters)."""
        # By a copy, since an optimizer holds the slots that it made last: a second set
        # would take memory for as long as the trainer lives.
        return copy.copy(self._optimizer).tree_init(trained)

    def _compile(self, split: bool) -> Any:
        fn = self._step_fn(*self._unpacked()[:2], self._packing)
        self._compiled[split] = self.devices.compile(
            fn, split=split, placement=self._placement
        )
        return self._compiled[split]

    def _step_fn(self, weights: Any, state: Any, packing: Packing | None) -> Any:
        """Makes what is compiled, for weights and state of such structure."""
        syncs = layer_tree.state_sync_list(self._model, state)
        update = build_update(
            self._masked_gradients,
            self.update,
            self.reduce,
            layer_tree.trainable_list(self._model, weights),
            [sync for _, sync in syncs],
            self._accumulate,
            self._skip_nonfinite,
            packed=packing is not None,
        )
        return packing.over(update) if packing else update

    def _masked_gradients(
        self, weights: Any, state: Any, rng: Any, batch: Any, mask: Any
    ) -> tuple[Any, Aux]:
        with memory_context(self._memory), batch_context(self.devices.axis, mask):
            grads, aux = self._hooks.gradients(weights, state, rng, batch)
        return grads, aux._replace(metrics=self.metrics(aux))

    def _fitted(self, batch: tuple[Any, ...], pieces: int) -> tuple[Any, Any]:
        """Makes a batch divide into equal pieces: padded and masked, never dropped."""
        first = not self._compiled
        if first:
            self._check_batch(batch)
        rows, shard = batch[0].shape[0], self.devices.shard
        if first and self.devices.axis is not None:
            self._check_state_sync(batch)
        if not divides(rows, pieces) and not self._can_mask(batch):
            # A loss that cannot leave rows out: every device takes the whole batch.
            if self._accumulate > 1:
                raise DataError(
                    f"a batch of {rows} rows does not divide into accumulate="
                    f"{self._accumulate} micro-batches for each of {self.devices.n} "
                    "devices, and the loss cannot leave padding out; use a loss that "
                    "reports its weight, or batches that divide."
                )
            return self._compiled.get(False) or self._compile(False), (batch, None)
        fn = self._compiled.get(True) or self._compile(True)
        return fn, pad_rows(batch, pieces, shard)

    def _can_mask(self, batch: tuple[Any, ...]) -> bool:
        """Whether the loss says how much a batch weighs when rows are masked."""
        if self._maskable is None:
            found: list[Any] = []

            def probe(weights: Any, state: Any, rng: Any, mask: Any, xs: Any) -> Any:
                with batch_context(None, mask):
                    loss, aux = self.loss(weights, state, rng, xs)
                found.append(aux.weight)
                return loss

            mask = np.ones(batch[0].shape[0], np.float32)
            weights, state = self._unpacked()[:2]
            jax.eval_shape(probe, weights, state, jax.random.key(0), mask, batch)
            self._maskable = found[0] is not None
        return self._maskable

    def _check_state_sync(self, batch: tuple[Any, ...]) -> None:
        """Refuses float state that changes without saying how replicas agree on it."""
        weights, state = self._unpacked()[:2]
        syncs = layer_tree.state_sync_list(self._model, state)
        leaves = jax.tree.leaves(state)
        open_ends = [
            sync is None and jnp.issubdtype(leaf.dtype, jnp.floating)
            for (_, sync), leaf in zip(syncs, leaves, strict=True)
        ]
        if not any(open_ends):
            return

        def new_state(state: Any, weights: Any, rng: Any, xs: Any) -> Any:
            return jax.tree.leaves(self.loss(weights, state, rng, xs)[1].state)

        traced = jax.make_jaxpr(new_state)(state, weights, jax.random.key(0), batch)
        before = traced.jaxpr.invars[: len(leaves)]
        for i, after in enumerate(traced.jaxpr.outvars):
            if open_ends[i] and after is not before[i]:
                raise ConfigError(
                    f"the state at {syncs[i][0]} changes in training, but its layer "
                    f"does not say how {self.devices.n} devices agree on it: set "
                    "state_sync = 'mean', 'sum' or 'same' in the layer's class."
                )


def _kind(path: tuple[Any, ...]) -> Any:
    """Which leaves of a carry lie together: all weights, all first slots, ..."""
    field, *rest = path
    return (field, *rest[1:]) if field.name == "slots" else field


def _struct(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)

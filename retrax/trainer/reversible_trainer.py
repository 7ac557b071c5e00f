"""`ReversibleSerialTrainer`: a model deeper than the memory of its device.

Weights and slots live on the host; each unit (see `blocks`) visits the device for its
forward pass, and again for its backward pass and update. Reversible layers keep nothing
in between, others their inputs. The interface is that of `StepTrainer`, the numbers
are too; `block_step` has the order of a step, `block_programs` what is compiled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from retrax.layers import tree as layer_tree
from retrax.layers.base import Layer
from retrax.optimizers.base import Optimizer
from retrax.trainer.arguments import check_clipping
from retrax.trainer.block_programs import UnitPrograms
from retrax.trainer.block_step import BlockStep, UnitValues
from retrax.trainer.blocks import (
    Unit,
    assembled,
    extract_reversible_blocks,
    model_of,
)
from retrax.trainer.devices import Devices
from retrax.trainer.lender import Lender
from retrax.trainer.loss_scale import LossScale
from retrax.trainer.padding import pad_rows
from retrax.trainer.precision import Policy, as_loss_scale, as_policy
from retrax.trainer.reduce import Reduce
from retrax.trainer.step import Carry
from retrax.trainer.visits import HostMemory, Visits

__all__ = ["ReversibleSerialTrainer"]


class ReversibleSerialTrainer(Lender):
    """Trains one layer after the other, with everything else on the host.

    Example:
      >>> import jax, numpy as np
      >>> from retrax import layers as tl, optimizers, shapes, trainer
      >>> half = lambda: tl.ReversibleHalfResidual(tl.Dense(2), tl.Relu())
      >>> model = tl.Serial(tl.Dup(), half(), tl.ReversibleSwap(), half(), tl.Add())
      >>> blocks, loss = trainer.extract_reversible_blocks([model, tl.L2Loss()])
      >>> batch = tuple(np.ones((4, 2), 'f') for _ in range(3))
      >>> sig, key = shapes.signature(batch), jax.random.key(0)
      >>> trainer.init_reversible_blocks(blocks, loss, sig, key)
      >>> deep = ReversibleSerialTrainer(blocks, loss, optimizers.SGD, n_devices=1)
      >>> losses = [float(deep.one_step(batch, key)[0]) for _ in range(3)]
      >>> losses[2] < losses[0]
      True
    """

    def __init__(
        self,
        blocks: Sequence[Any],
        loss_layer: Layer,
        optimizer_fn: Callable[[], Optimizer],
        n_devices: int | None = None,
        memoize_jit: bool = True,
        free_accelerators_on_step: bool = False,
        adasum: bool = False,
        *,
        reduce: str = "weight",
        skip_nonfinite: bool = True,
        global_norm: str | None = None,
        check_reverse: bool = False,
        precision: str | Policy | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        """Makes a trainer for initialised layers.

        Args:
          blocks: list of (standard layers, reversible layers), best from
            `extract_reversible_blocks`.
          loss_layer: what comes after the blocks and gives the loss.
          optimizer_fn: makes the optimizer, such as a class; called once. Its rule is
            applied to each layer on its own.
          n_devices: number of devices; None means all.
          memoize_jit: equal layers share compiled programs.
          free_accelerators_on_step: leave nothing on the device between two steps; else
            the first layer is brought there while nobody waits.
          adasum: Trax's flag for reduce='adasum'.
          reduce: how replicas agree: 'weight', 'mean' or 'adasum'; see `Reduce`.
          skip_nonfinite: leave everything as it was when a gradient of any layer is not
            finite; the host then holds old and new values until the last gradient.
            False lets go of the old ones at once.
          global_norm: for optimizers that clip by the norm of all gradients, which is
            known only after the backward pass: 'two_pass' goes through it twice;
            'per_layer' clips each layer by its own norm, as Trax does.
          check_reverse: in the first step, compare what reversing finds with what was
            there, layer by layer.
          precision: 'float32', 'mixed_bfloat16', 'mixed_float16', or a `Policy`.
          loss_scale: see `StepTrainer`.

        Raises:
          TypeError: blocks, loss or optimizer_fn are something else.
          ValueError: the loss is reversible, or a reversible block is not.
          ConfigError: layers share weights, or the optimizer clips by the global norm
            and global_norm does not say how.
        """
        if isinstance(optimizer_fn, Optimizer) or not callable(optimizer_fn):
            raise TypeError(
                "optimizer_fn must be a function or class that makes an optimizer, "
                f"such as Adam or lambda: Adam(1e-3), got {optimizer_fn!r}."
            )
        if not isinstance(loss_layer, Layer):
            raise TypeError(f"loss_layer must be a layer, got {loss_layer!r}.")
        self._optimizer = optimizer_fn()
        check_clipping(self._optimizer, global_norm)
        self.policy = as_policy(precision)
        self._loss_scale = as_loss_scale(loss_scale, self.policy)
        self._first_loss_scale = self._loss_scale
        model, self._units = model_of(blocks, loss_layer)
        self._two_pass = global_norm == "two_pass"
        self._memoize, self._frees = memoize_jit, free_accelerators_on_step
        self._skips, self._checks_reverse = skip_nonfinite, check_reverse
        self.devices = Devices(n_devices)
        kind = "adasum" if adasum else reduce
        self.reduce = Reduce(self.devices.axis, self.devices.n, kind)
        self._is_first_step = check_reverse or self.devices.n > 1
        self._memory = HostMemory(self.devices)
        self._visits = Visits(self._memory, threaded=self.devices.n == 1)
        self._programs: dict[Any, Any] = {}
        self._values: list[UnitValues] | None = None
        self._makers: list[UnitPrograms] = []
        self._first: Any = None  # Values of the first unit, ahead of the next step.
        self._step, self._n_skipped = 0, 0
        self._opt_params: dict[str, Any] = {}
        super().__init__(model)

    @classmethod
    def from_model(
        cls,
        model_with_loss: Layer,
        optimizer: Optimizer,
        n_devices: int | None = None,
        loss_chunk_size: int = 0,
        **options: Any,
    ) -> ReversibleSerialTrainer:
        """Makes a trainer where a StepTrainer would stand, for the same arguments.

        `Trainer.make_step_trainer` may return it; options are those of the class.
        """
        blocks, loss = extract_reversible_blocks(model_with_loss, loss_chunk_size)
        return cls(blocks, loss, lambda: optimizer, n_devices, **options)

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
          (loss, stats) on the host. Stats holds what `StepTrainer` gives, and
          'layer{i}/gradients_l2', 'layer{i}/weights_l2' of the units with weights,
          counted from the input, and 'host_memory_bytes', of the process.

        Raises:
          ValueError: with check_reverse, a layer whose inputs are not found again.
        """
        self._current()
        self._step = step = self._step + 1 if step is None else step
        opt_params = self._opt_params
        if learning_rate is not None:
            opt_params = {**opt_params, "learning_rate": jnp.float32(learning_rate)}
        batch, mask = self._fitted(batch)
        run = BlockStep(
            self._units,
            self._current(),
            self._program,
            self._visits,
            (opt_params, rng, np.int32(step)),
            self._n_skipped,
            None if mask is None else self.devices.cut(mask),
            self._loss_scale,
        )
        check = self._check_unit if self._is_first_step else None
        run.forward(list(self.devices.cut(batch)), self._first, check)
        self._first = None
        if self._two_pass:
            limit = self._optimizer.clip_grad_norm
            run.measure_gradients(limit)
        if not self._skips:
            run.commit_at_once()
        stats = run.backward()
        finite = bool(stats["grads_finite"])
        if finite or not self._skips:
            run.commit()
            self._layers_current = False
        else:
            self._n_skipped += 1
        self._loss_scale = self._loss_scale.update(jnp.bool_(finite))
        self._is_first_step = False
        stats["skipped_steps"] = np.int32(self._n_skipped)
        if not self._frees:
            self._first = run.bring_first()
        return stats["loss"], stats

    def _check_unit(
        self, run: BlockStep, i: int, inputs: Any, outputs: Any, new_state: Any
    ) -> None:
        """Looks at what only a first batch shows."""
        unit, values = self._units[i], run.values[i]
        if self.devices.n > 1:
            self._makers[i].check_state_sync(
                unit, values.weights, values.state, inputs, self.devices.n
            )
        if self._checks_reverse and unit.kind == "reversible":
            run.check_reverse(i, inputs, outputs, new_state)

    def _fitted(self, batch: tuple[Any, ...]) -> tuple[Any, Any]:
        """Makes a batch divide over the devices: padded and masked, never dropped."""
        self._check_batch(batch)
        batch = self.policy.cast_inputs(self._model, batch)
        return pad_rows(batch, self.devices.n, self.devices.shard)

    def _program(self, i: int, what: str) -> Any:
        """Returns a compiled program of unit i; equal units share it."""
        maker = self._makers[i]
        key = (what, maker.key if self._memoize else i)
        if key not in self._programs:
            fn = getattr(maker, what)
            self._programs[key] = self.devices.compile_block(fn, what == "update")
        return self._programs[key]

    # --- What a person or a checkpoint reads and sets -------------------------------

    @property
    def units(self) -> list[Unit]:
        """What visits the device, one after the other; the last one is the loss."""
        return self._units

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        return self._optimizer

    @property
    def n_devices(self) -> int:
        """Number of devices."""
        return self.devices.n

    @property
    def n_programs(self) -> int:
        """Number of different programs compiled so far."""
        return len(self._programs)

    def _current(self) -> list[UnitValues]:
        if self._reload_needed or self._values is None:
            self._reload()
        return self._values or []

    @property
    def carry(self) -> Carry:
        """Weights, state, slots and counters as they are, on the host."""
        values = self._current()
        norms = [v.weights_l2 for v in values]
        return Carry(
            assembled(self._model, self._units, [v.weights for v in values]),
            assembled(self._model, self._units, [v.state for v in values]),
            tuple(v.slots for v in values),
            np.int32(self._n_skipped),
            np.sqrt(np.sum(np.square(norms, dtype=np.float64))).astype(np.float32),
            self._loss_scale,
        )

    @property
    def slots(self) -> Any:
        """The optimizer's slots, a tuple of those of each unit."""
        return self.carry.slots

    @slots.setter
    def slots(self, value: Any) -> None:
        values = self._current()
        if len(value) != len(values):
            raise ValueError(f"{len(value)} units' slots given for {len(values)}.")
        for own, slots in zip(values, value, strict=True):
            own.slots = self._memory.own(slots)

    @property
    def n_skipped(self) -> int:
        """Number of steps skipped because a gradient was not finite."""
        return self._n_skipped

    @n_skipped.setter
    def n_skipped(self, value: int) -> None:
        self._n_skipped = int(value)

    @property
    def loss_scale(self) -> LossScale:
        """What losses are multiplied by before they are differentiated."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, value: LossScale) -> None:
        self._loss_scale = value

    @property
    def opt_params(self) -> dict[str, Any]:
        """The optimizer's hyper-parameters, among them 'learning_rate'."""
        self._current()
        return self._opt_params

    @opt_params.setter
    def opt_params(self, value: dict[str, Any]) -> None:
        self._opt_params = {k: jnp.asarray(v) for k, v in value.items()}

    def reset_optimizer(self) -> None:
        """Makes the optimizer begin anew: slots, hyper-parameters and step numbers."""
        self.pull(about_to_change=True)
        self._values, self._step, self._n_skipped = None, 0, 0
        self._loss_scale = self._first_loss_scale

    def trainable_paths(self) -> list[str]:
        """Paths of the weights that are trained, in the order of their slots."""
        return [
            path
            for unit, own in zip(self._units, self._current(), strict=True)
            for (path, _), on in zip(
                unit.named_leaves(own.weights),
                unit.trainable_list(own.weights),
                strict=True,
            )
            if on
        ]

    # --- The layers' side: they ask for values they do not hold ---------------------

    def _copy_of(self, what: str) -> Any:
        return getattr(self.carry, what)

    def _reload(self) -> None:
        """Takes the values from the layers; slots stay if there are any."""
        weights, state = self._take()
        old = self._values
        self._values, self._makers, self._first = [], [], None
        for i, unit in enumerate(self._units):
            own = unit.take(weights), unit.take(state)
            slots = None if old is None else old[i].slots
            self._values.append(self._unit_values(unit, *own, slots))
        self._let_go()

    def _unit_values(
        self, unit: Unit, weights: Any, state: Any, slots: Any
    ) -> UnitValues:
        trainable = unit.trainable_list(weights)
        syncs = [
            sync
            for place, own in zip(unit.places, state, strict=True)
            for _, sync in layer_tree.state_sync_list(place.layer, own)
        ]
        self._makers.append(
            UnitPrograms(
                unit,
                self.reduce,
                self._optimizer_update,
                trainable,
                syncs,
                self.policy,
            )
        )
        values = UnitValues(self._memory.own(weights), self._memory.own(state))
        trained = values.trained(trainable)
        if slots is None:
            slots, opt_params = self._optimizer.tree_init(trained)
            slots = self._memory.own(slots)
            if not self._opt_params:
                self._opt_params = {k: jnp.asarray(v) for k, v in opt_params.items()}
        values.slots = slots
        values.measure(trained)
        return values

    def _optimizer_update(self, step: Any, grads: Any, *args: Any) -> Any:
        """Updates one unit; where clipping is done by the trainer, without it."""
        optimizer = self._optimizer
        if self._two_pass:
            optimizer = copy.copy(optimizer)
            optimizer._clip_grad_norm = None
        return optimizer.tree_update(step, grads, *args, store_slots=False)

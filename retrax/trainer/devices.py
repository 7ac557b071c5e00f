"""Compiling for one device or many: the only module that calls jit, shard_map, pmap.

A function to compile takes (carry, shared, batch) and returns (carry, out). The carry
goes round from step to step and is donated; `shared` is the same on all devices; every
array of the batch is cut along its first axis, one piece for each device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from retrax.errors import ConfigError
from retrax.trainer.sharding import BATCH as AXIS
from retrax.trainer.sharding import MODEL, Sharding, plan

__all__ = ["AXIS", "Devices"]

BACKENDS = ("shard_map", "pmap")

StepFn = Callable[[Any, Any, Any], tuple[Any, Any]]


class Devices:
    """The devices a trainer runs on, and how functions are compiled for them."""

    def __init__(
        self,
        n_devices: int | None = None,
        backend: str = "shard_map",
        sharding: Sharding | None = None,
    ) -> None:
        """Chooses devices.

        Args:
          n_devices: how many local devices to use; None means all of them.
          backend: what splits the batch over several devices: 'shard_map', or 'pmap',
            which gives the same numbers the older way. One device always uses jit.
          sharding: which weights are cut over the devices; None for none of them. The
            step is then compiled as one of a single device, and XLA cuts it.

        Raises:
          ConfigError: there are fewer devices, or the backend is unknown.
        """
        if backend not in BACKENDS:
            raise ConfigError(f"backend must be one of {BACKENDS}, got {backend!r}.")
        local = jax.local_devices()
        n = len(local) if n_devices is None else n_devices
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
            raise ConfigError(f"n_devices must be a positive whole number, got {n!r}.")
        if n > len(local):
            raise ConfigError(
                f"n_devices={n} but there are {len(local)} ({local[0].platform}). To "
                "try several devices on the CPU start the process with "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={n}."
            )
        self.n = int(n)
        self.sharding = sharding if self.n > 1 else None
        self.backend = backend if n > 1 else "jit"
        self.axis = AXIS if n > 1 and sharding is None else None
        self._devices = local[: self.n]
        self._mesh: Any = None
        self.n_cuts = self.n  # How many pieces a batch is cut into.
        if self.sharding is not None:
            shape = self.sharding.mesh_shape(self.n)
            self.n_cuts = shape[0]
            self._mesh = Mesh(
                np.array(self._devices).reshape(shape),
                (AXIS, MODEL),
                axis_types=(AxisType.Auto,) * 2,
            )
        elif self.n > 1:
            self._mesh = Mesh(
                np.array(self._devices), (AXIS,), axis_types=(AxisType.Auto,)
            )
        # JAX 0.10 can deadlock its own thread pool when several multi-device CPU
        # programs are in flight, so there each call is waited for.
        self._wait = self.n > 1 and local[0].platform == "cpu"

    def compile(
        self,
        fn: StepFn,
        donate: bool = True,
        split: bool = True,
        placement: Any = None,
    ) -> StepFn:
        """Compiles a step function.

        Args:
          fn: function of (carry, shared, batch) that returns (carry, out); over
            several devices it runs once on each and must itself reduce over the axis
            `self.axis` whatever it returns.
          donate: give the carry's memory to the result; the caller must not use the
            carry it passed again.
          split: False gives every device the whole batch.
          placement: with a sharding, where the carry is to lie, as `plan` says.
        """
        donated = (0,) if donate else ()
        if self._mesh is None:
            return jax.jit(fn, donate_argnums=donated)
        if self.sharding is not None:
            return self._compile_sharded(fn, donated, split, placement)
        if self.backend == "pmap" and split:
            return self._compile_pmap(fn)
        one, cut = PartitionSpec(), PartitionSpec(AXIS)
        mapped = jax.shard_map(
            fn,
            mesh=self._mesh,
            in_specs=(one, one, cut if split else one),
            out_specs=one,
            check_vma=False,
        )
        return self._waiting(jax.jit(mapped, donate_argnums=donated))

    def compile_block(self, fn: StepFn, donate: bool = True) -> StepFn:
        """Compiles a function whose result in part stays where it is.

        Args:
          fn: function of (carry, shared, xs) that returns (carry, (kept, out)); arrays
            of `kept` stay cut along their first axis as those of `xs` are, the rest is
            the same on all devices.
          donate: give the carry's memory to the result.
        """
        donated = (0,) if donate else ()
        if self._mesh is None:
            return jax.jit(fn, donate_argnums=donated)
        one, cut = PartitionSpec(), PartitionSpec(AXIS)
        mapped = jax.shard_map(
            fn,
            mesh=self._mesh,
            in_specs=(one, one, cut),
            out_specs=(one, (cut, one)),
            check_vma=False,
        )
        return self._waiting(jax.jit(mapped, donate_argnums=donated))

    def cut(self, tree: Any) -> Any:
        """Copies a tree to the devices, each array cut along its first axis."""
        if self._mesh is None:
            return jax.device_put(tree, self._devices[0])
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec(AXIS)))

    def _compile_sharded(
        self, fn: StepFn, donated: tuple[int, ...], split: bool, placement: Any
    ) -> StepFn:
        one = NamedSharding(self._mesh, PartitionSpec())
        cut = NamedSharding(self._mesh, PartitionSpec(AXIS))
        compiled = jax.jit(fn, donate_argnums=donated, out_shardings=(placement, one))

        def call(carry: Any, shared: Any, batch: Any) -> tuple[Any, Any]:
            batch = jax.device_put(batch, cut if split else one)
            return compiled(carry, shared, batch)

        return self._waiting(call)

    def placement(self, named_weights: Any, trainable: Any, slots: Any) -> Any:
        """Returns (placement of each weight, of the slots, of what is whole)."""
        sharding = self.sharding or Sharding()
        weights, placed = plan(sharding, self._mesh, named_weights, trainable, slots)
        return weights, placed, NamedSharding(self._mesh, PartitionSpec())

    def _compile_pmap(self, fn: StepFn) -> StepFn:
        mapped = jax.pmap(
            fn,
            axis_name=AXIS,
            in_axes=(None, None, 0),
            out_axes=None,
            devices=self._devices,
        )

        def call(carry: Any, shared: Any, batch: Any) -> tuple[Any, Any]:
            pieces = jax.tree.map(
                lambda x: x.reshape((self.n, x.shape[0] // self.n, *x.shape[1:])), batch
            )
            return mapped(carry, shared, pieces)

        return self._waiting(call)

    def _waiting(self, fn: StepFn) -> StepFn:
        if not self._wait:
            return fn
        return lambda carry, shared, batch: jax.block_until_ready(
            fn(carry, shared, batch)
        )

    def put(self, tree: Any, placement: Any = None) -> Any:
        """Copies a tree to the devices, whole on each; the caller owns the result.

        Args:
          tree: arrays.
          placement: with a sharding, where they lie instead: one for all, or a tree.
        """
        # A donated copy must not take the original with it. On several devices
        # may_alias=False is not enough: the copy on the original's device is no copy.
        if self._mesh is None:
            return jax.device_put(tree, self._devices[0], may_alias=False)
        own = jax.tree.map(lambda x: jax.numpy.array(x, copy=True), tree)
        if placement is None:
            placement = NamedSharding(self._mesh, PartitionSpec())
        return jax.device_put(own, placement)

    def fetch(self, tree: Any) -> Any:
        """Copies a tree to the default device, from one device if it is whole there."""
        return jax.tree.map(_fetched, tree)


def _fetched(x: Any) -> Any:
    if not isinstance(x, jax.Array):
        return x
    if x.is_fully_replicated:
        return jax.numpy.array(x.addressable_shards[0].data, copy=True)
    return jax.numpy.array(np.asarray(x), copy=True)

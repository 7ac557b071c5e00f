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

__all__ = ["AXIS", "Devices"]

AXIS = "batch"
BACKENDS = ("shard_map", "pmap")

StepFn = Callable[[Any, Any, Any], tuple[Any, Any]]


class Devices:
    """The devices a trainer runs on, and how functions are compiled for them."""

    def __init__(
        self, n_devices: int | None = None, backend: str = "shard_map"
    ) -> None:
        """Chooses devices.

        Args:
          n_devices: how many local devices to use; None means all of them.
          backend: what splits the batch over several devices: 'shard_map', or 'pmap',
            which gives the same numbers the older way. One device always uses jit.

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
        self.backend = backend if n > 1 else "jit"
        self.axis = AXIS if n > 1 else None
        self._devices = local[: self.n]
        self._mesh: Mesh | None = None
        if self.n > 1:
            self._mesh = Mesh(
                np.array(self._devices), (AXIS,), axis_types=(AxisType.Auto,)
            )
        # JAX 0.10 can deadlock its own thread pool when several multi-device CPU
        # programs are in flight, so there each call is waited for.
        self._wait = self.n > 1 and local[0].platform == "cpu"

    def compile(self, fn: StepFn, donate: bool = True, split: bool = True) -> StepFn:
        """Compiles a step function.

        Args:
          fn: function of (carry, shared, batch) that returns (carry, out); over
            several devices it runs once on each and must itself reduce over the axis
            `self.axis` whatever it returns.
          donate: give the carry's memory to the result; the caller must not use the
            carry it passed again.
          split: False gives every device the whole batch.
        """
        donated = (0,) if donate else ()
        if self._mesh is None:
            return jax.jit(fn, donate_argnums=donated)
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

    def put(self, tree: Any) -> Any:
        """Copies a tree to the devices, whole on each; the caller owns the result."""
        # A donated copy must not take the original with it. On several devices
        # may_alias=False is not enough: the copy on the original's device is no copy.
        if self._mesh is None:
            return jax.device_put(tree, self._devices[0], may_alias=False)
        own = jax.tree.map(lambda x: jax.numpy.array(x, copy=True), tree)
        return jax.device_put(own, NamedSharding(self._mesh, PartitionSpec()))

    def fetch(self, tree: Any) -> Any:
        """Copies a tree that is whole on each device to the default device."""
        return jax.tree.map(
            lambda x: (
                jax.numpy.array(x.addressable_shards[0].data, copy=True)
                if isinstance(x, jax.Array)
                else x
            ),
            tree,
        )

"""Compiling for one device or many: the only module that calls jit, shard_map, pmap.

A function to compile takes (carry, shared, batch) and returns (carry, out). The carry
goes round from step to step and is donated; `shared` is the same on all devices; every
array of the batch is cut along its first axis, one piece for each device. Where several
processes train together, each hands in its own rows of the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from retrax.errors import ConfigError, DataError
from retrax.trainer import hosts
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
        backend: str | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        """Chooses devices.

        Args:
          n_devices: how many devices to use, of all processes together; None means all
            of them.
          backend: what splits the batch over the devices: 'shard_map', or 'pmap', which
            gives the same numbers the older way, in one process. None is 'shard_map'
            for several, and plain jit for one.
          sharding: which weights are cut over the devices; None for none of them. The
            step is then compiled as one of a single device, and XLA cuts it.

        Raises:
          ConfigError: there are fewer devices, or the backend is unknown, or processes
            cannot have equal parts of what is to be cut.
        """
        if backend not in (None, *BACKENDS):
            raise ConfigError(f"backend must be one of {BACKENDS}, got {backend!r}.")
        self.shard = hosts.shard()
        if backend == "pmap" and self.shard[1] > 1:
            raise ConfigError("several processes need backend='shard_map', got 'pmap'.")
        self._devices = _chosen(n_devices)
        self.n = len(self._devices)
        self.sharding = sharding if self.n > 1 else None
        several = self.n > 1 or backend == "shard_map"
        self.backend = backend or "shard_map" if several else "jit"
        self.axis = AXIS if several and self.sharding is None else None
        self._mesh: Any = None
        self.n_cuts = self.n  # How many pieces a batch is cut into.
        if self.sharding is not None:
            shape = self.sharding.mesh_shape(self.n)
            self._check_grid(shape)
            self.n_cuts = shape[0]
            self._mesh = Mesh(
                np.array(self._devices).reshape(shape),
                (AXIS, MODEL),
                axis_types=(AxisType.Auto,) * 2,
            )
        elif several:
            self._mesh = Mesh(
                np.array(self._devices), (AXIS,), axis_types=(AxisType.Auto,)
            )
        # JAX 0.10 can deadlock its own thread pool when several multi-device CPU
        # programs are in flight, so there each call is waited for.
        self._wait = self.n > 1 and self._devices[0].platform == "cpu"

    def _check_grid(self, shape: tuple[int, int]) -> None:
        n_own = self.n // self.shard[1]
        if n_own % shape[1]:
            raise ConfigError(
                f"n_model={shape[1]} does not divide the {n_own} devices of a process; "
                "the devices that share one part of a batch must be of one process."
            )

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
        compiled = self._waiting(jax.jit(mapped, donate_argnums=donated))
        if self.shard[1] == 1:
            return compiled
        place = self.cut if split else _refused
        return lambda carry, shared, batch: compiled(carry, shared, place(batch))

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
        """Copies a tree to the devices, each array cut along its first axis.

        Args:
          tree: arrays; of several processes each gives its own rows, equally many.
        """
        if self._mesh is None:
            return jax.device_put(tree, self._devices[0])
        where = NamedSharding(self._mesh, PartitionSpec(AXIS))
        if self.shard[1] == 1:
            return jax.device_put(tree, where)

        def joined(x: Any) -> Any:
            x = np.asarray(x)
            x = x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)
            shape = (x.shape[0] * self.shard[1], *x.shape[1:])
            return jax.make_array_from_process_local_data(where, x, shape)

        return jax.tree.map(joined, tree)

    def _compile_sharded(
        self, fn: StepFn, donated: tuple[int, ...], split: bool, placement: Any
    ) -> StepFn:
        one = NamedSharding(self._mesh, PartitionSpec())
        compiled = jax.jit(fn, donate_argnums=donated, out_shardings=(placement, one))
        if split:
            place = self.cut
        elif self.shard[1] == 1:
            place = functools.partial(jax.device_put, device=one)
        else:
            place = _refused

        def call(carry: Any, shared: Any, batch: Any) -> tuple[Any, Any]:
            return compiled(carry, shared, place(batch))

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
            return fn if self.shard[1] == 1 else hosts.telling(fn)

        def call(carry: Any, shared: Any, batch: Any) -> tuple[Any, Any]:
            return jax.block_until_ready(fn(carry, shared, batch))

        return call if self.shard[1] == 1 else hosts.telling(call)

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
        own = jax.tree.map(_own_copy, tree)
        if placement is None:
            placement = NamedSharding(self._mesh, PartitionSpec())
        if self.shard[1] == 1:
            return jax.device_put(own, placement)
        # Not device_put: it would compare the values of all processes each time.
        if isinstance(placement, NamedSharding):
            return jax.tree.map(lambda x: _placed(x, placement), own)
        return jax.tree.map(_placed, own, placement)

    def fetch(self, tree: Any) -> Any:
        """Copies a tree to the default device, from one device if it is whole there.

        What is cut over the devices of several processes is joined by all of them; so
        all have to call this.
        """
        return jax.tree.map(lambda x: _fetched(self.whole(x)), tree)

    def whole(self, tree: Any) -> Any:
        """Joins what is cut over the devices of several processes, which all call it.

        Other arrays are returned as they are.
        """
        one = None
        if self.shard[1] > 1:
            one = NamedSharding(self._mesh, PartitionSpec())

        def join(x: Any) -> Any:
            here = not isinstance(x, jax.Array) or x.is_fully_addressable
            if one is None or here or x.is_fully_replicated:
                return x
            joined = jax.jit(lambda x: x, out_shardings=one)(x)
            return jax.block_until_ready(joined) if self._wait else joined

        return jax.tree.map(join, tree)


def _chosen(n_devices: int | None) -> list[Any]:
    """The devices to use: equally many of each process, in the order of processes."""
    n_hosts = hosts.count()
    there = jax.local_devices() if n_hosts == 1 else jax.devices()
    n = len(there) if n_devices is None else n_devices
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
        raise ConfigError(f"n_devices must be a positive whole number, got {n!r}.")
    if n > len(there):
        where = "" if n_hosts == 1 else f" in {n_hosts} processes"
        raise ConfigError(
            f"n_devices={n} but there are {len(there)} ({there[0].platform}){where}. "
            "To try several devices on the CPU start the process with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={n}."
        )
    if n_hosts == 1:
        return there[:n]
    own = [[d for d in there if d.process_index == i] for i in range(n_hosts)]
    fewest = min(map(len, own))
    if n % n_hosts or n // n_hosts > fewest:
        raise ConfigError(
            f"n_devices={n} over {n_hosts} processes with {[*map(len, own)]} devices: "
            "each process must give as many as the others."
        )
    return [device for devices in own for device in devices[: n // n_hosts]]


def _refused(batch: Any) -> Any:
    """Refuses to give each device the whole batch, of which processes have parts."""
    if jax.tree.leaves(batch):
        raise DataError(
            "a batch does not divide over the devices, and the loss (or a metric) "
            "cannot leave padding out: with several processes use one that reports its "
            "weight, or batches that divide."
        )
    return batch


def _own_copy(x: Any) -> Any:
    if hosts.count() == 1:
        return jax.numpy.array(x, copy=True)
    return np.array(x, jax.dtypes.canonicalize_dtype(jax.numpy.result_type(x)))


def _placed(x: Any, where: NamedSharding) -> Any:
    return jax.make_array_from_callback(x.shape, where, lambda part: x[part])


def _fetched(x: Any) -> Any:
    if not isinstance(x, jax.Array):
        return x
    if x.is_fully_replicated:
        return jax.numpy.array(x.addressable_shards[0].data, copy=True)
    return jax.numpy.array(np.asarray(x), copy=True)

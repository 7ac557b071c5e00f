"""Values that live on the host and visit the device, one unit after the other.

While a unit is computed the values of the next one are brought in, and those of the
last one taken out, by one worker that does so in order: so never more than two units
are on the device. Several CPU devices work without it (see `devices`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from retrax.trainer.devices import Devices

__all__ = ["HostMemory", "Visits"]


class HostMemory:
    """Where values are while they are not on the device.

    NumPy arrays; on one accelerator that has it memory of the host that its copies
    need not go around (`pinned_host`).
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._pinned: Any = None
        device = jax.local_devices()[0]
        kinds = [memory.kind for memory in device.addressable_memories()]
        if devices.n == 1 and device.platform != "cpu" and "pinned_host" in kinds:
            self._pinned = jax.sharding.SingleDeviceSharding(
                device, memory_kind="pinned_host"
            )

    def own(self, tree: Any) -> Any:
        """Copies values of anybody's to the host."""
        host = jax.tree.map(lambda x: np.array(x, copy=True), tree)
        return host if self._pinned is None else jax.device_put(host, self._pinned)

    def take(self, tree: Any) -> Any:
        """Brings results from the device to the host; waits for them."""
        if self._pinned is not None:
            return jax.block_until_ready(jax.device_put(tree, self._pinned))
        return jax.tree.map(np.asarray, jax.device_get(tree))

    def bring(self, tree: Any) -> Any:
        """Copies values to the device."""
        return self._devices.put(tree)


class Visits:
    """Brings and takes values in the order of the calls, beside the computation."""

    def __init__(self, memory: HostMemory, threaded: bool) -> None:
        self._memory = memory
        self._worker = ThreadPoolExecutor(1, "retrax-visits") if threaded else None

    def bring(self, tree: Any) -> Future[Any]:
        """Begins to copy values to the device."""
        return self._do(self._memory.bring, tree)

    def take(self, tree: Any) -> Future[Any]:
        """Begins to copy results to the host, when they are there."""
        return self._do(self._memory.take, tree)

    def close(self) -> None:
        """Ends the worker."""
        if self._worker is not None:
            self._worker.shutdown()

    def _do(self, fn: Callable[[Any], Any], tree: Any) -> Future[Any]:
        # The width of floats is a setting of each thread.
        wide = jax.dtypes.canonicalize_dtype("float64") == "float64"

        def run() -> Any:
            with jax.enable_x64(wide):
                return fn(tree)

        if self._worker is not None:
            return self._worker.submit(run)
        done: Future[Any] = Future()
        done.set_result(run())
        return done

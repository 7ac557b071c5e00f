"""`HostCopy`: a copy of a run's arrays that training does not touch.

Used by `Checkpointer`, whose writer thread reads the copy while training goes on.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

__all__ = ["HostCopy"]

_LARGE = 1 << 20  # bytes
_MAX_THREADS = 4  # More would only wait for the memory.


class HostCopy:
    """Copies payloads to the host, into the memory of the copy before where it fits.

    New memory costs more than copying into memory that was used before, and a step
    that finds its weights looked at from the host cannot write over them. So there is
    one copy, and it is overwritten by the next call.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], list[np.ndarray]] = {}
        self._jobs: list[tuple[np.ndarray, np.ndarray]] = []

    def __call__(self, payload: Any) -> Any:
        """Returns `payload` with arrays and containers of its own.

        The arrays stay as they are until the next call.
        """
        _start_transfers(payload)
        free, used, self._jobs = self._buffers, {}, []
        done: dict[int, Any] = {}

        def copy(value: Any) -> Any:
            if type(value) in (list, tuple):
                return type(value)(map(copy, value))
            if type(value) is dict:
                return {key: copy(child) for key, child in value.items()}
            if not isinstance(value, np.ndarray | jax.Array):
                return value
            if id(value) not in done:  # What is shared stays shared.
                done[id(value)] = self._copied(value, free, used)
            return done[id(value)]

        copied = copy(payload)
        _copy_all(self._jobs)
        self._jobs, self._buffers = [], used  # Lets go of the originals.
        return copied

    def _copied(
        self,
        value: Any,
        free: dict[tuple[Any, ...], list[np.ndarray]],
        used: dict[tuple[Any, ...], list[np.ndarray]],
    ) -> Any:
        try:
            array = np.asarray(value)
        except TypeError:  # A random key: who writes the file says what is wrong.
            return value
        if isinstance(value, jax.Array) and not _on_cpu(value):
            return array  # Came from the device just now; nobody else writes to it.
        key = array.shape, array.dtype
        found = free.get(key)
        buffer = found.pop() if found else np.empty_like(array, order="C", subok=False)
        self._jobs.append((buffer, array))
        used.setdefault(key, []).append(buffer)
        return buffer


def _start_transfers(value: Any) -> None:
    """Lets all arrays come from their devices at once, before one is waited for."""
    if type(value) in (list, tuple, dict):
        for child in value.values() if type(value) is dict else value:
            _start_transfers(child)
    elif isinstance(value, jax.Array) and not _on_cpu(value):
        value.copy_to_host_async()


def _copy_all(jobs: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copies second arrays into first ones, large ones by several threads at once."""
    n_threads = min(_MAX_THREADS, os.cpu_count() or 1)
    large = [job for job in jobs if job[0].nbytes >= _LARGE]
    if len(large) > 1 and n_threads > 1:
        jobs = [job for job in jobs if job[0].nbytes < _LARGE]
        with ThreadPoolExecutor(n_threads, "retrax-copy") as threads:
            list(threads.map(lambda job: np.copyto(*job), large))
    for buffer, array in jobs:
        np.copyto(buffer, array)


def _on_cpu(array: jax.Array) -> bool:
    return next(iter(array.devices())).platform == "cpu"

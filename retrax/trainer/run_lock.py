"""`RunLock`: one run at a time in one output directory.

Used by `Checkpointer`. The lock is a file that names the process that holds it, so that
a person can see whose it is, and a later run can see whether that one still lives.
"""

from __future__ import annotations

import json
import os
import platform
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from retrax.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows: the file alone must do.
    fcntl = None

__all__ = ["LOCK_NAME", "RunLock", "live_owner"]

LOCK_NAME = "run.lock"
_SAME_START = 60.0  # seconds
# Locks of this process, and which RunLock has each: a later one takes it over.
_held: dict[str, int] = {}


class RunLock:
    """Holds an output directory from `acquire` to `release`, or to the process's end.

    A run that died left its lock behind; it is recognised on the same host, by process
    number and start time, and taken over. A lock that the same process holds is taken
    over, too: a notebook that makes its trainer again goes on.
    """

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder) / LOCK_NAME
        self._finalizer: Any = None

    def acquire(self) -> None:
        """Takes the lock; does nothing if this object has it.

        Raises:
          ConfigError: a living process holds it, or one on another host; names it.
        """
        key = str(self.path.absolute())
        if _held.get(key) == id(self):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _opened(self.path) as descriptor:
            owner = _read(descriptor)
            if owner is not None and not _is_own(owner) and _may_live(owner):
                raise ConfigError(_refusal(self.path, owner))
            text = json.dumps(
                {
                    "pid": os.getpid(),
                    "host": platform.node(),
                    "started": _start_time(os.getpid()),
                    "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
                }
            )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode() + b"\n", 0)
        _held[key] = id(self)
        # Also at exit, after the threads that still write have been waited for.
        self._finalizer = weakref.finalize(
            self, _release, key, id(self), os.getpid(), self.path
        )

    def release(self) -> None:
        """Gives the lock back; does nothing if this object does not have it."""
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None


def live_owner(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Returns pid, host and since of the run that has `folder`, None if none lives."""
    try:
        owner = _parsed((Path(folder) / LOCK_NAME).read_bytes())
    except OSError:
        return None
    return owner if owner is not None and _may_live(owner) else None


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Opens the file at `path` for one process at a time, where the system can."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if fcntl is not None:
                with suppress(OSError):  # Some network file systems have no locks.
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):  # Else the one before us has removed it.
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _release(key: str, holder: int, pid: int, path: Path) -> None:
    if _held.get(key) != holder or pid != os.getpid():
        return  # Taken over, or this is a forked child.
    del _held[key]
    with suppress(OSError), _opened(path) as descriptor:
        owner = _read(descriptor)
        if owner is None or _is_own(owner):
            path.unlink(missing_ok=True)


def _read(descriptor: int) -> dict[str, Any] | None:
    return _parsed(os.pread(descriptor, 4096, 0))


def _parsed(data: bytes) -> dict[str, Any] | None:
    """The owner a lock names; None if it is cut off, as dying in writing leaves it."""
    try:
        owner = json.loads(data)
    except ValueError:
        return None
    known = isinstance(owner, dict) and isinstance(owner.get("pid"), int)
    return owner if known else None


def _is_own(owner: dict[str, Any]) -> bool:
    return owner["pid"] == os.getpid() and owner.get("host") == platform.node()


def _may_live(owner: dict[str, Any]) -> bool:
    """Whether the owner lives; of a process on another host nobody here can tell."""
    if owner.get("host") != platform.node():
        return True
    started, noted = _start_time(owner["pid"]), owner.get("started")
    if started is None or not isinstance(noted, int | float):
        return started is not None
    # Another process may have the number by now. Clocks may have been set meanwhile.
    return abs(started - noted) < _SAME_START


def _start_time(pid: int) -> float | None:
    """When a process began, in seconds since 1970; None if there is none that runs."""
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process.create_time()
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return None


def _refusal(path: Path, owner: dict[str, Any]) -> str:
    here = owner.get("host") == platform.node()
    end = (
        "Wait for it, end it, or choose another output_dir."
        if here
        else f"If that run is dead, delete {path}; else choose another output_dir."
    )
    return (
        f"output_dir {path.parent} is in use: process {owner['pid']} on host "
        f"{owner.get('host')!r} has trained there since {owner.get('since')}. {end}"
    )

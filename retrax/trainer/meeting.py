"""How the processes of one run find each other, before JAX joins their devices.

JAX aborts a process whose partners do not come. So process 0 first calls the roll over
a socket, at the address where JAX's coordinator will be, with a limit of time and with
errors that say who is missing. Under `hosts`; the command line calls `connect`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import jax

from retrax.errors import ConfigError, HostError

__all__ = ["Place", "connect", "find_place"]

_HEARTBEAT_S = 20  # A process that is silent for so long is taken for dead.
_SHUTDOWN_S = 10


class Place(NamedTuple):
    """A process's place among those of a run.

    Attributes:
      address: 'host:port' of process 0.
      n: number of processes.
      i: number of this one.
    """

    address: str
    n: int
    i: int


def connect(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: float = 60.0,
) -> Place | None:
    """Joins this process with the others of its run; call it before all use of JAX.

    What is not given is read from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID, or from SLURM in a job step of several tasks.

    Args:
      coordinator: 'host:port' of process 0, reachable from all.
      num_processes: how many there are.
      process_id: number of this one, from 0.
      timeout: seconds in which all have to come.

    Returns:
      the place; None, and nothing is done, where nothing says that there are several.

    Raises:
      ConfigError: what is given does not fit together.
      HostError: not all came in time; names the address and who is missing.
    """
    place = find_place(os.environ, coordinator, num_processes, process_id)
    if place is None or place.n == 1:
        return None
    host, port = _split(place.address)
    # Else JAX would take SIGTERM for itself, which ends a run here.
    jax.config.update("jax_enable_preemption_service", False)
    deadline = time.monotonic() + timeout
    bound = None
    if place.i == 0:
        bound = _call_roll(place, host, port, deadline, timeout)
    else:
        _answer(place, host, port, deadline, timeout)
    try:
        jax.distributed.initialize(
            place.address,
            place.n,
            place.i,
            coordinator_bind_address=bound,
            initialization_timeout=60,
            heartbeat_timeout_seconds=_HEARTBEAT_S,
            shutdown_timeout_seconds=_SHUTDOWN_S,
        )
    except RuntimeError as e:
        raise HostError(
            f"JAX cannot join process {place.i} of {place.n} to the others: {e} If JAX "
            "was used before, call connect() first."
        ) from e
    return place


def find_place(
    environ: Mapping[str, str],
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> Place | None:
    """Returns the place that arguments, environment or SLURM say; None if none does.

    Raises:
      ConfigError: only a part is said, or numbers do not fit.

    Example:
      >>> find_place({}, 'node7:1234', 4, 3)
      Place(address='node7:1234', n=4, i=3)
    """
    slurm = _slurm_place(environ)
    parts: dict[str, Any] = {
        "coordinator": (coordinator, "JAX_COORDINATOR_ADDRESS", "address"),
        "num_processes": (num_processes, "JAX_NUM_PROCESSES", "n"),
        "process_id": (process_id, "JAX_PROCESS_ID", "i"),
    }
    found = {}
    for name, (given, variable, field) in parts.items():
        if given is None:
            given = environ.get(variable) or None
        found[name] = getattr(slurm, field, None) if given is None else given
    if all(x is None for x in found.values()):
        return None
    missing = [name for name, x in found.items() if x is None]
    if missing:
        said = ", ".join(f"{name}={x}" for name, x in found.items() if x is not None)
        raise ConfigError(
            f"{said} without {', '.join(missing)}: to train with several processes "
            "give each --coordinator=HOST:PORT (of process 0), --num_processes and its "
            "own --process_id, or set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and "
            "JAX_PROCESS_ID."
        )
    _split(found["coordinator"])
    n, i = (_number(name, found[name]) for name in ("num_processes", "process_id"))
    if n < 1 or not 0 <= i < n:
        raise ConfigError(
            f"process_id={i} of num_processes={n}: processes are numbered from 0 to "
            f"{max(n, 1) - 1}."
        )
    return Place(found["coordinator"], n, i)


def _slurm_place(environ: Mapping[str, str]) -> Place | None:
    """The place in a job step of several tasks, as `srun` makes them."""
    n = environ.get("SLURM_STEP_NUM_TASKS", "1")
    nodes, job = environ.get("SLURM_STEP_NODELIST"), environ.get("SLURM_JOB_ID")
    if n == "1" or nodes is None or job is None or "SLURM_PROCID" not in environ:
        return None
    # 'node[003-005,9],x7' begins with node003. Ports of several steps should differ.
    first = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", nodes).split(",")[0]
    step = int(environ.get("SLURM_STEP_ID", "0"))
    port = 61440 + (int(job) * 7 + step) % 4096
    return Place(f"{first}:{port}", int(n), int(environ["SLURM_PROCID"]))


def _number(name: str, value: Any) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{name} must be a whole number, got {value!r}.") from None


def _split(address: str) -> tuple[str, int]:
    host, _, port = str(address).rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"coordinator must be HOST:PORT, such as node7:12345, got {address!r}."
        )
    return host.strip("[]"), int(port)


# --- The roll call --------------------------------------------------------------------


def _call_roll(
    place: Place, host: str, port: int, deadline: float, timeout: float
) -> str:
    """Waits for all others; returns the address that this host can listen at."""
    waiting: dict[int, tuple[socket.socket, str]] = {}
    server, bound = _listening(host, port)
    try:
        while len(waiting) < place.n - 1:
            left = deadline - time.monotonic()
            server.settimeout(max(left, 0.01))
            try:
                peer, _ = server.accept()
            except TimeoutError:
                missing = [i for i in range(1, place.n) if i not in waiting]
                raise HostError(
                    f"{len(waiting) + 1} of {place.n} processes came to "
                    f"{place.address} within {timeout:g} s; missing: process "
                    f"{', '.join(map(str, missing))}."
                ) from None
            said = _heard(peer, deadline)
            wrong = _wrong(place, said, waiting)
            if wrong is not None:
                _tell(peer, wrong)
                peer.close()
                if said is not None:  # Else somebody else knocked at the port.
                    raise HostError(wrong)
            elif said is not None:
                waiting[said["i"]] = peer, said["host"]
        for peer, _ in waiting.values():
            _tell(peer, "")
    except HostError as e:
        for peer, _ in waiting.values():
            _tell(peer, str(e))
        raise
    finally:
        server.close()
        for peer, _ in waiting.values():
            peer.close()
    return bound


def _answer(
    place: Place, host: str, port: int, deadline: float, timeout: float
) -> None:
    """Reports to process 0, and returns when all have."""
    why = "nobody answers"
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise HostError(
                f"process {place.i} found no coordinator at {place.address} within "
                f"{timeout:g} s ({why}). Does process 0 run there, and can that port "
                "be reached from here?"
            )
        try:
            with socket.create_connection((host, port), min(left, 5.0)) as peer:
                _send(peer, {**_mine(place), "i": place.i})
                reply = _heard(peer, deadline)
        except OSError as e:
            why = e.strerror or str(e)
            time.sleep(min(0.1, left))
            continue
        if reply is None:
            why = "it hung up"
            time.sleep(min(0.1, max(left, 0)))
            continue
        if reply["wrong"]:
            raise HostError(reply["wrong"])
        return


def _listening(host: str, port: int) -> tuple[socket.socket, str]:
    # The address may be one that only others know this host by.
    error: OSError | None = None
    for name in (host, ""):
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((name, port))
            server.listen(64)
            return server, f"{name or '0.0.0.0'}:{port}"
        except OSError as e:
            server.close()
            error = e
    raise HostError(
        f"process 0 cannot listen at port {port} ({error}): choose another port for "
        "--coordinator, or end what uses it."
    )


def _mine(place: Place) -> dict[str, Any]:
    return {"n": place.n, "host": platform.node(), "jax": jax.__version__}


def _wrong(place: Place, said: Any, waiting: Mapping[int, Any]) -> str | None:
    """What is wrong with a process that came; None if nothing is."""
    if said is None:
        return "this is where processes of a retrax run meet"
    who, mine = f"process {said['i']} on host {said['host']!r}", _mine(place)
    for name, what in (("n", "num_processes"), ("jax", "the JAX version")):
        if said[name] != mine[name]:
            return (
                f"{what} is {said[name]} in {who} and {mine[name]} in process 0 on "
                f"host {mine['host']!r}."
            )
    if said["i"] in waiting:
        return f"{who} came, but one came from {waiting[said['i']][1]!r} before."
    return None


def _send(peer: socket.socket, message: dict[str, Any]) -> None:
    peer.sendall(json.dumps(message).encode() + b"\n")


def _tell(peer: socket.socket, wrong: str) -> None:
    with suppress(OSError):
        _send(peer, {"wrong": wrong})


def _heard(peer: socket.socket, deadline: float) -> Any:
    """Returns a message; None if what comes is none, or nothing in time."""
    data = b""
    while not data.endswith(b"\n") and len(data) < 10_000:
        # Whoever knocks at the port and says nothing must not hold up the others.
        peer.settimeout(min(max(deadline - time.monotonic(), 0.01), 5.0))
        try:
            piece = peer.recv(4096)
        except OSError:
            return None
        if not piece:
            return None
        data += piece
    try:
        message = json.loads(data)
        return (
            message
            if {"i", "n", "host", "jax"} <= {*message} or ("wrong" in message)
            else None
        )
    except (ValueError, TypeError):
        return None

"""Several processes that train together: how they meet, and what they tell each other.

Every process runs the same program on the same global batches; JAX joins their devices.
Here is what JAX leaves open: a roll call with a time limit, values that come from the
first process, and comparing what should be equal. With one process all of it does
nothing. `devices` places arrays, `session` decides who writes.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from retrax.errors import CheckpointError, ConfigError, DataError, HostError

__all__ = [
    "barrier",
    "check_equal",
    "check_same_weights",
    "count",
    "from_first",
    "gathered",
    "index",
    "is_first",
    "shard",
    "share_weights",
    "telling",
]

_PIECE = 1 << 26  # bytes that travel at once
_SHARED_ERRORS = {
    error.__name__: error
    for error in (CheckpointError, ConfigError, DataError, FileNotFoundError)
}


def count() -> int:
    """Number of processes that train together."""
    return jax.process_count()


def index() -> int:
    """Number of this process, from 0."""
    return jax.process_index()


def shard() -> tuple[int, int]:
    """(number of this process, number of processes), as streams take it."""
    return jax.process_index(), jax.process_count()


def is_first() -> bool:
    """Whether this is process 0, which alone writes files and text."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Returns when all processes have come here."""
    if count() > 1:
        telling(multihost_utils.sync_global_devices)(name)


def telling(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `fn` say what it means when another process is gone meanwhile."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except jax.errors.JaxRuntimeError as e:
            if not re.search("Gloo|[Cc]onnection|NCCL|coordination", str(e)):
                raise
            raise HostError(
                f"another process of this run is gone ({str(e).splitlines()[0]}). "
                "Start all processes again, as many as before, with the same "
                "output_dir: the run continues from its last checkpoint."
            ) from e

    return call


def gathered(values: Sequence[int]) -> np.ndarray:
    """Returns (n_processes, n) int32: what each process gave.

    Args:
      values: as many in every process.
    """
    mine = np.asarray(values, np.int32)
    if count() == 1:
        return mine[None]
    return telling(lambda: np.asarray(multihost_utils.process_allgather(mine)))()


def from_first(make: Callable[[], bytes]) -> bytes:
    """Returns what `make()` returns in process 0; it is called there only.

    Raises:
      the error it raised, in every process: of the same class if that is one of ours.
    """
    if count() == 1:
        return make()
    data, error = b"", None
    if is_first():
        try:
            data = b"+" + make()
        except Exception as e:
            error = e
            data = f"-{_kind(e)}:{e}".encode()
    data = _share_bytes(data)
    if error is not None:
        raise error
    if data[:1] == b"-":
        kind, _, text = data[1:].decode().partition(":")
        raise _SHARED_ERRORS.get(kind, HostError)(text)
    return data[1:]


def check_equal(what: str, text: str) -> None:
    """Compares a text, such as a configuration, with those of the other processes.

    Raises:
      ConfigError: they differ; names both processes, and the first line that differs.
    """
    if count() == 1:
        return
    mine = hashlib.sha256(text.encode()).digest()
    hashes = gathered(np.frombuffer(mine, np.int32))  # type: ignore[arg-type]
    odd = [i for i in range(count()) if (hashes[i] != hashes[0]).any()]
    if not odd:
        return
    first, other = _text_of(text, 0), _text_of(text, odd[0])
    names = _names()
    raise ConfigError(
        f"{what} differs between processes: {names[odd[0]]} has another than "
        f"{names[0]}. {_first_difference(first, other)} Start all processes with the "
        "same configuration."
    )


def share_weights(tree: Any) -> Any:
    """Returns the values of process 0; every process has a tree of the same shapes.

    Raises:
      ConfigError: the trees differ in structure.
    """
    if count() == 1:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    check_equal("the model", "\n".join(_shape_text(x) for x in leaves))
    plain = [_plain(x) for x in leaves]
    data = from_first(lambda: b"".join(x.tobytes() for x in plain))
    start, values = 0, []
    for leaf, like in zip(leaves, plain, strict=True):
        flat = np.frombuffer(data, like.dtype, like.size, start)
        start += like.nbytes
        value = flat.reshape(like.shape)
        if _is_key(leaf):
            value = jax.numpy.asarray(value)
            value = jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf))
        values.append(value)
    return treedef.unflatten(values)


def check_same_weights(named: Sequence[tuple[str, Any]]) -> None:
    """Compares weights with those of the other processes.

    Args:
      named: (path, array) of each; those that are cut over devices are passed over,
        since no other process has the same part.

    Raises:
      HostError: they differ; names the processes and the first weight.
    """
    if count() == 1:
        return
    named = [(path, x) for path, x in named if x.is_fully_replicated]
    sums = [zlib.crc32(_plain(x).tobytes()) for _, x in named]
    sums = gathered(np.array(sums, np.uint32).view(np.int32))  # type: ignore[arg-type]
    differs = sums != sums[0]
    if not differs.any():
        return
    names = _names()
    odd = [names[i] for i in range(count()) if differs[i].any()]
    paths = [named[k][0] for k in np.flatnonzero(differs.any(axis=0))]
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    raise HostError(
        f"weights differ between processes: {' and '.join(odd)} and {names[0]} have "
        f"different values of {paths[0]}{more}. Something there sets weights, or draws "
        "random numbers, on its own; or its hardware is at fault. Continue from a "
        "checkpoint, which is that of process 0."
    )


# --- What travels ---------------------------------------------------------------------


def _share_bytes(data: bytes) -> bytes:
    """Returns the bytes that process 0 gave."""
    share = functools.partial(
        multihost_utils.broadcast_one_to_all, is_source=is_first()
    )
    size = np.array(divmod(len(data), _PIECE), np.int32)
    n_whole, rest = map(int, share(size))
    pieces = []
    for k in range(n_whole + 1):
        length = _PIECE if k < n_whole else rest
        if not length:
            continue
        piece = np.zeros(length, np.uint8)
        if is_first():
            piece[:] = np.frombuffer(data, np.uint8, length, k * _PIECE)
        pieces.append(np.asarray(share(piece)).tobytes())
    return b"".join(pieces)


def _text_of(text: str, i: int) -> str:
    """Returns the text of process i, in every process."""
    mine = text.encode()
    longest = int(gathered([len(mine)]).max())
    padded = np.zeros(longest, np.uint8)
    padded[: len(mine)] = np.frombuffer(mine, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return rows[i].tobytes().rstrip(b"\0").decode()


def _names() -> list[str]:
    """What to call the processes: number and host."""
    mine = f"process {index()} (host {platform.node()})"
    return [_text_of(mine, i) for i in range(count())]


def _first_difference(first: str, other: str) -> str:
    pairs = zip([*first.splitlines(), ""], [*other.splitlines(), ""], strict=False)
    for a, b in pairs:
        if a != b:
            return f"The first line that differs: {a!r} in process 0, {b!r} there."
    return ""


def _kind(error: Exception) -> str:
    for cls in type(error).__mro__:
        if cls.__name__ in _SHARED_ERRORS:
            return cls.__name__
    return type(error).__name__


def _is_key(x: Any) -> bool:
    return jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def _plain(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if _is_key(x) else x)


def _shape_text(x: Any) -> str:
    return f"{x.dtype}{tuple(x.shape)}"

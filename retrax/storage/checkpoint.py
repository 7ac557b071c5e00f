"""The checkpoint file: one file, whole or absent, of plain containers and arrays.

A file is two pickles in a row, a header and a payload:

    {'format': 'retrax', 'version': 1, 'sha256': ..., 'length': ..., 'pad': ...}
    {'step': 100, 'weights': {...}, ...}

so a person in a hurry reads one that they trust without this package:

    with open("model.pkl", "rb") as f:
        header, payload = pickle.load(f), pickle.load(f)

`load` trusts no file: it compares length and hash first and then reads with
`safe_pickle`, which knows plain containers and numpy arrays and nothing else.
Stands on `atomic`, `plain` and `safe_pickle`; knows no layers. What goes into a
payload is decided by those who save; `match` tells whether it fits a model.
"""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from absl import logging

from retrax.errors import CheckpointError
from retrax.storage import plain, safe_pickle
from retrax.storage.atomic import previous_path, writing
from retrax.storage.matching import Matched, match

__all__ = [
    "FORMAT",
    "VERSION",
    "CheckpointDamaged",
    "CheckpointError",
    "Matched",
    "exists",
    "load",
    "load_newest",
    "match",
    "previous_path",
    "save",
]

FORMAT = "retrax"
VERSION = 1

_HEADER_BYTES = 256
_MAX_HEADER_BYTES = 4096
_PIECE = 1 << 20  # bytes


class CheckpointDamaged(CheckpointError):
    """A checkpoint file is not whole: cut short, altered, or no checkpoint at all."""


def save(
    path: str | os.PathLike[str], payload: dict[str, Any], keep_previous: bool = True
) -> None:
    """Writes `payload` to one file that is whole at every moment.

    The file is written beside `path`, fsynced and renamed. What was at `path` becomes
    `previous_path(path)` ('model.pkl' -> 'model.previous.pkl'). The bytes are hashed
    while they stream to disk; only arrays that are not C-contiguous are copied.

    Args:
      path: the file; its folder is made if missing.
      payload: None, bool, int, float, str, bytes, lists, tuples, dicts (keys: str,
        int, tuples of them), numpy arrays and scalars of any dtype without objects or
        fields, ml_dtypes included. Arrays of other libraries (JAX) are saved as numpy.
      keep_previous: keep the file that was there before.

    Raises:
      TypeError: a value of another kind; the text holds its path in the payload.
      CheckpointError: the file cannot be written. Nothing has changed on disk then.

    Example:
      >>> import tempfile, numpy as np
      >>> path = tempfile.mkdtemp() + "/model.pkl"
      >>> save(path, {"step": 3, "weights": {"0/w": np.ones(2, np.float32)}})
      >>> load(path)["weights"]["0/w"]
      array([1., 1.], dtype=float32)
    """
    if type(payload) is not dict:
        raise TypeError(f"a payload is a dict, not {type(payload).__name__}")
    n_bytes = plain.check(payload)
    try:
        with writing(path, keep=keep_previous) as file:
            file.write(_header("0" * 64, 0))
            body = _HashingFile(file)
            plain.Writer(body).dump(payload)
            file.seek(0)
            file.write(_header(body.sha256.hexdigest(), body.length))
    except OSError as error:
        raise CheckpointError(
            f"cannot save the checkpoint {path} (about {n_bytes} bytes): {error}. "
            + _save_hint(error)
        ) from error


def exists(path: str | os.PathLike[str]) -> bool:
    """True if `load_newest(path)` has a file to try: `path` or the one before it."""
    return Path(path).exists() or previous_path(path).exists()


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the payload of a checkpoint; every array in it is writable.

    Length and sha256 are compared before anything of the payload is read.

    Raises:
      FileNotFoundError: there is no such file.
      CheckpointDamaged: the file is cut short, altered, empty, or no checkpoint.
      CheckpointError: it comes from a newer version, or holds something other than
        plain containers and numpy arrays (nothing of that is run).
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            _verify(path, file)
            payload = _read_payload(path, file)
    except FileNotFoundError:
        raise FileNotFoundError(
            errno.ENOENT, f"no checkpoint; {_missing_hint(path)}", str(path)
        ) from None
    except OSError as error:
        raise CheckpointDamaged(f"cannot read the checkpoint {path}: {error}") from None
    return payload


def load_newest(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Path]:
    """Reads the checkpoint at `path`, or the one before it if that is damaged.

    Falling back is logged as an error, and shows in the second value.

    Returns:
      (payload, path_used); `path_used` is `path` or `previous_path(path)`.

    Raises:
      FileNotFoundError: there is neither.
      CheckpointDamaged: none can be used; the text says why for each.
      CheckpointError: as `load`, for files that are whole but must not be used.
    """
    path = Path(path)
    previous = previous_path(path)
    try:
        return load(path), path
    except (CheckpointDamaged, FileNotFoundError) as error:
        cause: Exception = error
    if not previous.exists():
        raise cause
    if isinstance(cause, FileNotFoundError):
        cause_text = f"{path} is missing"
    else:
        cause_text = str(cause)
    logging.error("%s; falling back to %s", cause_text, previous)
    try:
        return load(previous), previous
    except CheckpointDamaged as error:
        raise CheckpointDamaged(
            f"no usable checkpoint: {cause_text}; and the one before it: {error}"
        ) from cause


class _HashingFile:
    """What a pickler needs of a file; counts and hashes what passes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.length = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        # Piece by piece, so that what is hashed is still in the processor's cache
        # when it is written.
        for start in range(0, view.nbytes, _PIECE):
            piece = view[start : start + _PIECE]
            self.sha256.update(piece)
            self._file.write(piece)
        self.length += view.nbytes
        return view.nbytes


def _header(sha256: str, length: int) -> bytes:
    """Returns the header pickle, always `_HEADER_BYTES` long."""
    header = {"format": FORMAT, "version": VERSION, "sha256": sha256}
    header |= {"length": length, "pad": ""}
    header["pad"] = " " * (_HEADER_BYTES - len(pickle.dumps(header, protocol=4)))
    return pickle.dumps(header, protocol=4)


def _verify(path: Path, file: BufferedReader) -> None:
    """Leaves `file` at the start of a payload whose length and hash are right."""
    start = file.read(_MAX_HEADER_BYTES)
    if not start:
        raise CheckpointDamaged(f"{path} is empty (0 bytes); {_damage_hint(path)}")
    try:
        header, end = safe_pickle.read_plain(start)
    except Exception as error:
        kind = (
            "is a gzip file, not" if start[:2] == b"\x1f\x8b" else "does not start as"
        )
        raise CheckpointDamaged(
            f"{path} {kind} a retrax checkpoint ({error}); {_damage_hint(path)}"
        ) from None
    if type(header) is not dict or header.get("format") != FORMAT:
        raise CheckpointDamaged(
            f"{path} is a pickle but no retrax checkpoint: it has no header with "
            f"format {FORMAT!r}; give a file written by retrax"
        )
    version, length = header.get("version"), header.get("length")
    if type(version) is not int or type(length) is not int:
        raise CheckpointDamaged(f"{path} has a broken header; {_damage_hint(path)}")
    if version > VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, this retrax reads up to {VERSION}; "
            "install a newer retrax"
        )
    if start[:end] != _header(str(header.get("sha256")), length):
        raise CheckpointDamaged(f"{path} has a broken header; {_damage_hint(path)}")
    found = os.fstat(file.fileno()).st_size - end
    if found != length:
        what = "is cut short" if found < length else "has extra bytes at its end"
        raise CheckpointDamaged(
            f"{path} {what}: {found} bytes of payload where its header says {length}; "
            + _damage_hint(path)
        )
    file.seek(end)
    if hashlib.file_digest(file, "sha256").hexdigest() != header.get("sha256"):
        raise CheckpointDamaged(
            f"{path} has been altered: its sha256 is not the one in its header; "
            + _damage_hint(path)
        )
    file.seek(end)


def _read_payload(path: Path, file: BufferedReader) -> dict[str, Any]:
    try:
        payload = safe_pickle.read(file)
    except OSError:
        raise
    except safe_pickle.Refused as error:
        raise CheckpointError(f"{path} is refused: {error}") from None
    except Exception as error:
        raise CheckpointError(
            f"{path} is refused: its payload is no pickle that this retrax can read "
            f"({type(error).__name__}: {error})"
        ) from None
    if type(payload) is not dict:
        raise CheckpointError(
            f"{path} is refused: its payload is {type(payload).__name__}, not a dict"
        )
    return payload


def _save_hint(error: OSError) -> str:
    hints = {
        errno.ENOSPC: "Free some disk space",
        errno.EDQUOT: "Free some of your disk quota",
        errno.EROFS: "The file system is read-only",
        errno.EACCES: "You may not write there",
        errno.EISDIR: "Move the directory away",
    }
    hint = hints.get(error.errno or 0)
    rest = "or choose another output directory; earlier checkpoints are unchanged"
    return f"{hint}, {rest}" if hint else f"Mend that {rest}"


def _damage_hint(path: Path) -> str:
    previous = previous_path(path)
    if previous.exists():
        return f"the checkpoint before it is {previous}"
    return "restore it from a copy, or start again without it"


def _missing_hint(path: Path) -> str:
    if previous_path(path).exists():
        return f"the one before it is {previous_path(path)}"
    others = sorted(p.name for p in path.parent.glob("*.pkl"))[:8]
    if others:
        return f"{path.parent} holds {', '.join(others)}"
    return "check the path, or train first"

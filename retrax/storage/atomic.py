"""Files that are either wholly written or not there.

Used for checkpoints, curves and logs. Knows the operating system only.
"""

from __future__ import annotations

import errno
import itertools
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["append_bytes", "link", "previous_path", "write_bytes", "writing"]

_counter = itertools.count()
_HOST = re.sub(r"[^A-Za-z0-9-]", "-", platform.node()) or "host"
# Names of temporary files this process is writing; any other with our pid is left
# over from a dead process that had the same pid (usual in containers).
_active: set[str] = set()


@contextmanager
def writing(
    path: str | os.PathLike[str], keep: bool = False, sync: bool = True
) -> Iterator[BinaryIO]:
    """Opens a file that appears at `path`, fsynced, when the block ends well.

    The bytes go to a temporary file beside `path`, which is renamed at the end; when
    the block raises, or the process dies, what was at `path` stays as it was.
    Leftovers of dead processes are removed on the way in.

    Args:
      path: where the file shall be; its folder is made if missing.
      keep: also keep the old file at `path`, as `previous_path(path)`.
      sync: wait until the bytes are on the disk. Without, a power failure may leave an
        empty file.

    Raises:
      OSError: the file cannot be written; nothing has changed then.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    with _temporary(path) as temporary:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        _put(temporary, path, keep, sync)


def link(
    source: str | os.PathLike[str], path: str | os.PathLike[str], keep: bool = False
) -> None:
    """Gives the file at `source` a second name, in one step; copies it if it must.

    The two are one file on the disk until one of the names is written anew.

    Raises:
      OSError: the name cannot be given; nothing has changed then.
    """
    path = Path(path)
    _remove_leftovers(path)
    with _temporary(path) as temporary:
        _link_or_copy(Path(source), temporary)
        _put(temporary, path, keep)


def _put(temporary: Path, path: Path, keep: bool, sync: bool = True) -> None:
    """Renames a finished temporary file to `path`; see `writing`."""
    if path.is_dir():
        raise IsADirectoryError(f"a directory is in the way at {path}")
    keep = keep and path.exists()
    with _temporary(path) as old:
        if keep:
            _link_or_copy(path, old)
        # In this order a kill between the two lines leaves the new file whole at
        # `path`, even if the one it replaces was damaged.
        os.replace(temporary, path)
        if keep:
            os.replace(old, previous_path(path))
    if sync:
        _sync_folder(path.parent)


def write_bytes(path: str | os.PathLike[str], data: bytes, sync: bool = True) -> None:
    """Writes `data` to `path` in one step; raises OSError as `writing` does."""
    with writing(path, sync=sync) as file:
        file.write(data)


def append_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Adds `data` to the end of the file at `path`: all of it, or nothing.

    The file is not held open in between, so that nothing is lost or leaked when a run
    is killed or forgotten.

    Raises:
      OSError: the data cannot be written.
    """
    with open(path, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            n = file.write(data)
            if n != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise


def previous_path(path: str | os.PathLike[str]) -> Path:
    """Returns where the file that was at `path` before is kept.

    Example:
      >>> previous_path("run/model.pkl").as_posix()
      'run/model.previous.pkl'
    """
    path = Path(path)
    return path.with_name(f"{path.stem}.previous{path.suffix}")


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Gives a fresh name beside `path`; removes the file if it is still there."""
    name = f".{path.name}.{_HOST}.{os.getpid()}.{next(_counter)}.tmp"
    _active.add(name)
    temporary = path.with_name(name)
    try:
        yield temporary
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        _active.discard(name)


def _remove_leftovers(path: Path) -> None:
    """Removes temporary files for `path` whose process, on this host, is dead."""
    pattern = re.compile(
        rf"\.{re.escape(path.name)}\.{re.escape(_HOST)}\.(\d+)\.\d+\.tmp"
    )
    for entry in os.listdir(path.parent):
        found = pattern.fullmatch(entry)
        if found and entry not in _active and not _is_alive(int(found[1])):
            with suppress(OSError):
                path.with_name(entry).unlink()


def _is_alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # The caller knows the names that this process uses.
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True  # Not ours to signal, so it lives.
    return True


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
        return
    except OSError:
        pass  # No hard links on this file system: copy.
    shutil.copyfile(source, target)
    with open(target, "rb+") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself survive a power failure, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # Some network file systems refuse it.
            os.fsync(descriptor)
    finally:
        os.close(descriptor)

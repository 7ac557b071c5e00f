"""Which checkpoints lie in an output directory: listed, thinned out, indexed.

Used by `Checkpointer`. The directory itself says what is there; `checkpoints.json` is
written for people and other programs, and never read here.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from retrax.storage.atomic import previous_path, write_bytes

__all__ = ["INDEX_NAME", "candidates", "kept_steps", "prune_recent", "write_index"]

INDEX_NAME = "checkpoints.json"
_NUMBERED = re.compile(r"(model|recent)_(\d+)\.pkl")


def candidates(folder: Path, newest: str) -> list[Path]:
    """Checkpoints that a run can go on from, the ones to try first in front.

    Example: model.pkl, model.previous.pkl, recent_80.pkl, model_60.pkl.
    """
    first = [folder / newest, previous_path(folder / newest)]
    numbered = sorted(_numbered(folder), key=lambda item: (-item[0], item[1]))
    return [p for p in first if p.exists()] + [folder / name for _, name in numbered]


def kept_steps(folder: Path) -> dict[int, Path]:
    """Returns step -> file of the checkpoints that have their step in their name."""
    return {step: folder / name for step, name in sorted(_numbered(folder))}


def prune_recent(folder: Path, n_kept: int, newest: int) -> None:
    """Removes recent_{step}.pkl but for the last `n_kept`; touches no other files.

    Those of steps above the newest go, too: a run that went back, since they were
    damaged, will make them again. To be called when the newest checkpoint is on the
    disk: so the last good one stays.

    Raises:
      OSError: one cannot be removed.
    """
    recent = [item for item in sorted(_numbered(folder)) if item[1].startswith("rec")]
    n_past = sum(step <= newest for step, _ in recent)
    kept = recent[max(n_past - n_kept, 0) : n_past]
    for item in recent:
        if item not in kept:
            (folder / item[1]).unlink(missing_ok=True)


def write_index(folder: Path, newest: dict[str, Any]) -> None:
    """Lists the checkpoints in checkpoints.json; a disk that refuses changes nothing.

    Args:
      folder: the run's output directory.
      newest: what to say of the newest one, such as its step.
    """
    files = []
    with suppress(OSError):
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.name.endswith(".pkl") and entry.is_file():
                stat = entry.stat()
                files.append(
                    {
                        "file": entry.name,
                        "bytes": stat.st_size,
                        "time": round(stat.st_mtime, 3),  # seconds since 1970
                    }
                )
        index = {"newest": newest, "files": files}
        text = json.dumps(index, indent=1) + "\n"
        write_bytes(folder / INDEX_NAME, text.encode(), sync=False)


def _numbered(folder: Path) -> list[tuple[int, str]]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    found = [(_NUMBERED.fullmatch(name), name) for name in names]
    return [(int(match[2]), name) for match, name in found if match]

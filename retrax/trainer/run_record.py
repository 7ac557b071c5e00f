"""How a run stands: `run.json` in its output directory, for `retrax runs`.

Written by `Checkpointer` when a run begins and ends. A convenience: nothing that trains
reads it, and a run that was killed is told by the lock that its process left behind.
"""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from retrax.storage.atomic import write_bytes

__all__ = ["RECORD_NAME", "Status", "read_record", "write_record"]

RECORD_NAME = "run.json"
Status = Literal["running", "done", "interrupted", "failed"]


def write_record(folder: Path, status: Status, step: int, reason: str = "") -> None:
    """Notes how the run in `folder` stands; a disk that refuses it changes nothing.

    Args:
      folder: the run's output directory.
      status: 'running' at its start; else how it ended.
      step: training steps done.
      reason: why it did not end well, in one line.
    """
    record = {
        "status": status,
        "step": step,
        "reason": " ".join(reason.split())[:500],
        "pid": os.getpid(),
        "host": platform.node(),
        "time": round(time.time(), 3),  # seconds since 1970
    }
    with suppress(OSError):
        text = json.dumps(record) + "\n"
        write_bytes(folder / RECORD_NAME, text.encode(), sync=False)


def read_record(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Returns what was noted last, or None if there is nothing that can be read."""
    try:
        record = json.loads((Path(folder) / RECORD_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and "status" in record else None

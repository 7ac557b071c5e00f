"""TensorBoard event files, one folder per mode, written at once and in this thread.

tensorboardX's own `SummaryWriter` rewrites tags ('steps per second'), and blocks
training for good once its writer thread has met a full disk. Here its messages and
checksum are used, and each record is appended whole. `run_log` stands on this module.
"""

from __future__ import annotations

import itertools
import os
import platform
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from retrax.storage.atomic import append_bytes

__all__ = ["EventFiles"]

_counter = itertools.count()


class EventFiles:
    """Writes scalars and texts to `output_dir/<mode>/events.out.tfevents.*`.

    tensorboardX is imported, and a file made, when first something is written.
    """

    def __init__(self, output_dir: str | os.PathLike[str]) -> None:
        self._output_dir = Path(output_dir)
        self._paths: dict[str, Path] = {}
        self._purge_step: int | None = None

    def scalars(self, mode: str, step: int, values: Mapping[str, float]) -> None:
        """Writes values under their exact tags; raises OSError if it cannot."""
        summary = _messages().Summary
        entries = [
            summary.Value(tag=tag, simple_value=value) for tag, value in values.items()
        ]
        self._write(mode, step, summary(value=entries))

    def text(self, mode: str, tag: str, text: str) -> None:
        """Writes a text at step 0; raises OSError if it cannot."""
        from tensorboardX import summary

        self._write(mode, 0, summary.text(tag, text))

    def purge_after(self, step: int) -> None:
        """Makes TensorBoard hide what a dead run wrote for steps above `step`."""
        self._purge_step = step + 1
        self._paths.clear()

    def _write(self, mode: str, step: int, summary: Any) -> None:
        event = _messages().Event(wall_time=time.time(), step=step, summary=summary)
        if mode not in self._paths:
            self._paths[mode] = self._new_file(mode)
        append_bytes(self._paths[mode], _record(event))

    def _new_file(self, mode: str) -> Path:
        messages = _messages()
        folder = self._output_dir / mode
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        # Readers order files by name, that is by time; the rest keeps two files of the
        # same second apart.
        name = f"{int(now)}.{platform.node()}.{os.getpid()}.{next(_counter)}"
        path = folder / f"events.out.tfevents.{name}"
        records = _record(messages.Event(wall_time=now, file_version="brain.Event:2"))
        if self._purge_step is not None:
            start = messages.SessionLog(status=messages.SessionLog.START)
            records += _record(
                messages.Event(wall_time=now, step=self._purge_step, session_log=start)
            )
        append_bytes(path, records)
        return path


def _messages() -> Any:
    """Returns TensorBoard's message classes by name."""
    from tensorboardX.proto import event_pb2, summary_pb2

    # The classes are made at import, where type checkers do not see them.
    event: Any = event_pb2
    summary: Any = summary_pb2
    return SimpleNamespace(
        Event=event.Event, SessionLog=event.SessionLog, Summary=summary.Summary
    )


def _record(event: Any) -> bytes:
    """Returns a TFRecord: length, its checksum, data, their checksum."""
    from tensorboardX.record_writer import masked_crc32c

    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return b"".join(
        (
            length,
            struct.pack("<I", masked_crc32c(length)),
            data,
            struct.pack("<I", masked_crc32c(data)),
        )
    )

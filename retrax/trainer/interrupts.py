"""Ctrl-C and SIGTERM: the running step ends, then the run."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupted", "Interrupts"]


class Interrupted(Exception):
    """A run ended early because a signal asked for it; its state is saved.

    Attributes:
      exit_code: what the process should exit with: 128 + the signal's number.
    """

    def __init__(self, text: str, signum: int) -> None:
        super().__init__(text)
        self.exit_code = 128 + signum


class Interrupts:
    """Notes SIGINT and SIGTERM while the block runs; a second SIGINT ends it at once.

    Python handlers can be set in the main thread only; elsewhere nothing is changed.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before.clear()

    @property
    def name(self) -> str:
        """Name of the signal that came, such as 'SIGTERM'."""
        return "" if self.signum is None else signal.Signals(self.signum).name

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signum = signum

"""`Writer`: runs what must not hold up training in a thread, one job at a time.

Used by `Checkpointer`; knows neither files nor checkpoints. There is a thread only
while there is a job: so none is left to end, and an exiting interpreter waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Writer"]


class Writer:
    """Runs jobs in the background, in order, at most one at a time.

    Example:
      >>> writer = Writer()
      >>> done = []
      >>> writer.start(lambda: done.append(1))
      >>> writer.wait()
      >>> done
      [1]
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None]) -> None:
        """Waits for the job before, then starts this one and returns.

        A job tells of failures that can be expected in its own way; what it raises all
        the same is raised by the next `wait`.
        """
        self.wait()
        # Not a daemon: an exiting interpreter would cut it off in the middle.
        thread = threading.Thread(target=self._run, args=(job,), name="retrax-writer")
        try:
            thread.start()
        except RuntimeError:  # No threads at exit, or no more of them: do it here.
            self._run(job)
            return
        self._thread = thread

    def wait(self) -> None:
        """Returns when no job is running; raises what the last one raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # Raised where somebody can see it.
            self._error = error

"""`PrefetchStream`: reads ahead of training in a thread.

Third in the order of `retrax.data`: wraps any source of batches.
"""

import threading
import weakref
from collections import deque
from typing import Any

from retrax.data.sources import as_stream
from retrax.data.streams import Batch, Position, Stream


class PrefetchStream(Stream):
    """Reads up to `n_ahead` batches of a stream ahead, in one thread.

    The state is that of the consumer: batches read ahead but not yet taken are read
    again after a restore. An exception in the thread is raised by `next`, after the
    batches before it, and again by every later `next`. The thread starts with the
    first `next`, and never keeps a process from exiting.

    Args:
      source: a Stream or whatever `as_stream` takes; not to be used directly while
        it is wrapped.
      n_ahead: how many batches may wait.

    Raises:
      ValueError: n_ahead is below 1.
    """

    def __init__(self, source: Any, n_ahead: int = 2):
        if n_ahead < 1:
            raise ValueError(f"n_ahead must be at least 1, got {n_ahead}")
        self._stream, self._n_ahead = as_stream(source), n_ahead
        self.n_batches = self._stream.n_batches
        self.n_examples = self._stream.n_examples
        self.is_endless = self._stream.is_endless
        self._position = self._stream.state()
        self._worker: _Worker | None = None
        self._closed = False

    def read(self) -> Batch:
        if self._closed:
            raise StopIteration
        if self._worker is None:
            self._worker = _Worker(self._stream, self._n_ahead)
            weakref.finalize(self, self._worker.stop)
            self._worker.thread.start()
        batch, self._position = self._worker.get()
        return batch

    def position(self) -> Position:
        return self._position

    def seek(self, position: Position) -> None:
        if position == self._position:
            return
        if self._worker is not None:
            self._worker.stop()
            self._worker.thread.join()  # it may be inside the stream's own `next`
            self._worker = None
        self._stream.restore(position)
        self._position = self._stream.state()

    def fresh(self) -> Stream:
        return PrefetchStream(self._stream.fresh(), self._n_ahead)

    def close(self) -> None:
        """Ends the stream at once, and its thread and source as soon as they return.

        A source that is waiting for data inside its own `next` is not waited for: the
        thread closes it when that call comes back.
        """
        super().close()
        self._closed = True
        if self._worker is None:
            self._stream.close()
        else:
            self._worker.stop(close=True)
            if threading.current_thread() is not self._worker.thread:
                self._worker.thread.join(timeout=0.2)


class _Worker:
    """Fills a bounded buffer from a stream. Holds no reference to its consumer, so
    that a stream which is merely forgotten is collected and its thread ends."""

    def __init__(self, stream: Stream, n_ahead: int):
        self._stream, self._n_ahead = stream, n_ahead
        self._ready: deque[tuple[Batch, Position]] = deque()
        self._error: BaseException | None = None
        self._stopped = self._close = self._done = False
        self._changed = threading.Condition()
        self.thread = threading.Thread(
            target=self._run, name="retrax-prefetch", daemon=True
        )

    def get(self) -> tuple[Batch, Position]:
        with self._changed:
            while not self._ready:
                if self._stopped:
                    raise StopIteration
                if isinstance(self._error, StopIteration):
                    raise StopIteration
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            item = self._ready.popleft()
            self._changed.notify_all()
            return item

    def stop(self, close: bool = False) -> None:
        with self._changed:
            self._stopped, self._close = True, self._close or close
            self._ready.clear()
            self._changed.notify_all()
            close = close and self._done
        if close:
            self._stream.close()

    def _run(self) -> None:
        try:
            while self._wait_for_room():
                batch = next(self._stream)
                position = self._stream.state()
                with self._changed:
                    if not self._stopped:
                        self._ready.append((batch, position))
                        self._changed.notify_all()
        except BaseException as error:  # the consumer decides, KeyboardInterrupt too
            with self._changed:
                self._error = error
                self._changed.notify_all()
        with self._changed:
            self._done = True
            close = self._close
        if close:
            self._stream.close()

    def _wait_for_room(self) -> bool:
        with self._changed:
            while len(self._ready) >= self._n_ahead and not self._stopped:
                self._changed.wait()
            return not self._stopped

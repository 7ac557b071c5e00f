"""`checked`: reports a batch that does not fit, before a compiled step sees it.

Third in the order of `retrax.data`: wraps any source of batches.
"""

from typing import Any

from retrax.data.sources import as_stream
from retrax.data.streams import Batch, Position, Stream, as_batch
from retrax.errors import DataError


def checked(source: Any, same_shapes: bool = True) -> Stream:
    """Returns a stream that raises on a batch unlike the first one.

    Every batch must have as many parts as the first, each of the same dtype and
    rank, and all parts of one batch must share their leading dimension (which may
    change from batch to batch: a last batch is often smaller). The state is the
    wrapped stream's, so wrapping changes no checkpoint. Batches are counted from 0
    at the point where this wrapper starts or is restored.

    Args:
      source: a Stream or whatever `as_stream` takes.
      same_shapes: whether dimensions after the first must be equal too; False for
        bucketed sequences, whose lengths vary.

    Raises:
      DataError: from `next`, naming the batch, the part, expected and got.
    """
    return CheckedStream(as_stream(source), same_shapes)


class CheckedStream(Stream):
    """Compares every batch of a stream with its first; made by `checked`."""

    def __init__(self, stream: Stream, same_shapes: bool = True):
        self._stream, self._same_shapes = stream, same_shapes
        self.n_batches, self.n_examples = stream.n_batches, stream.n_examples
        self.is_endless = stream.is_endless
        self._expected: list[tuple[Any, Any]] | None = None
        self._count = 0

    def read(self) -> Batch:
        batch = as_batch(next(self._stream))
        first = batch[0].shape[:1]
        if self._same_shapes:
            got = [(part.dtype, part.shape[1:]) for part in batch]
        else:
            got = [(part.dtype, part.ndim - 1) for part in batch]
        leading = {part.shape[:1] for part in batch}
        if got != self._expected or len(leading) != 1 or not first:
            self._compare(batch, got)
        self._count += 1
        return batch

    def position(self) -> Position:
        return self._stream.state()

    def seek(self, position: Position) -> None:
        self._stream.restore(position)
        self._count = 0

    def fresh(self) -> Stream:
        return CheckedStream(self._stream.fresh(), self._same_shapes)

    def close(self) -> None:
        super().close()
        self._stream.close()

    def _compare(self, batch: Batch, got: list[tuple[Any, Any]]) -> None:
        """Raises for whatever is wrong with the batch; keeps the first one's form."""
        where = f"batch {self._count}"
        for i, part in enumerate(batch):
            if part.ndim == 0:
                raise DataError(
                    f"{where}, part {i} is a scalar; every part needs a leading batch "
                    "dimension"
                )
            if len(part) != len(batch[0]):
                raise DataError(
                    f"{where}, part {i} has {len(part)} examples, part 0 has "
                    f"{len(batch[0])} (shapes {[p.shape for p in batch]}); all parts "
                    "must share their leading dimension"
                )
        if self._expected is None:
            self._expected = got
            return
        if len(got) != len(self._expected):
            raise DataError(
                f"{where} has {len(got)} parts, the first batch had "
                f"{len(self._expected)}; every batch must have the same structure"
            )
        for i, (expected, mine) in enumerate(zip(self._expected, got, strict=True)):
            if expected != mine:
                raise DataError(
                    f"{where}, part {i}: expected {self._text(expected)} as in the "
                    f"first batch, got {self._text(mine)} (shape {batch[i].shape}); "
                    + _FIX
                )

    def _text(self, form: tuple[Any, Any]) -> str:
        dtype, rest = form
        if self._same_shapes:
            sizes = ", ".join(str(n) for n in rest)
            return f"{dtype} of shape (batch{', ' if rest else ','}{sizes})"
        return f"{dtype} of rank {rest + 1}"


_FIX = (
    "cast or pad in the pipeline (data.CastTo, data.PadToLength); where lengths are "
    "meant to vary use checked(stream, same_shapes=False)"
)

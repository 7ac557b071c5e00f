"""`shakespeare`: about 1 MB of real text that needs no download, and crops of text.

Last in the order of `retrax.data`, beside `digits`. The file is
`embedded/shakespeare.txt.xz`; its source, licence and split are described in
`embedded/shakespeare.md` beside it. `lm_inputs` does the same for tokens of one's own.

Batches are (tokens, tokens, weights) as Trax's language models take them: the model
shifts its input right by itself, so that inputs and targets are the same array. Id 0 is
padding and what the shift puts first, id 1 the end of a sequence.
"""

import hashlib
import lzma
import operator
from importlib import resources
from typing import Any

import gin
import numpy as np

from retrax.data.arrays import ArrayStream
from retrax.data.inputs import Inputs
from retrax.data.streams import Batch, Position, Stream, check_kind

PAD_ID, EOS_ID = 0, 1

SHAKESPEARE_CHARACTERS = (
    "\n !\"&'(),-.12:;?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz"
)
"""All 70 characters of `shakespeare`; the first has id 2, so there are 72 ids."""

SHAKESPEARE_SHA256 = "cc53c99bff0fc2375ff7206e49381afce8bc10077a066f5f238b732dbcf39d15"
"""SHA-256 of the unpacked file."""

_N_VALIDATION_PLAYS = 1  # the last of the file


@gin.configurable(module="retrax.data")
def shakespeare(
    batch_size: int = 12, length: int = 64, eval_batch_size: int = 64, seed: int = 0
) -> Inputs:
    """Returns eight plays of Shakespeare, character by character, as `Inputs`.

    Seven plays (933,729 characters) to train on, *Twelfth Night* (113,922) to validate
    on. See `lm_inputs` for the streams, `CharTokenizer` for the 72 ids. The loss of a
    language model on the evaluation stream is in nats per character.

    Args:
      batch_size: crops in a training batch, over all devices together.
      length: characters in a crop or window.
      eval_batch_size: windows in an evaluation batch; the last one is smaller.
      seed: with the number of the batch it fixes the crops of training.

    Batches are (tokens: (batch, length) int32, the same tokens, weights: (batch,
    length) float32). Source: Open Shakespeare 0.6, works in the public domain, texts
    CC BY 2.5.

    >>> tokens, targets, weights = next(shakespeare(batch_size=3).train_stream())
    >>> tokens.shape, tokens.dtype.name, weights.dtype.name
    ((3, 64), 'int32', 'float32')
    """
    tokenizer = CharTokenizer()
    train, validation = (tokenizer.encode(text) for text in shakespeare_text())
    return lm_inputs(
        train, validation, batch_size, length, eval_batch_size, seed, tokenizer
    )


def shakespeare_text() -> tuple[str, str]:
    """Returns the plays as (training text, validation text).

    Raises:
      ValueError: the data file is damaged.

    >>> train, validation = shakespeare_text()
    >>> len(train), len(validation), validation[:6]
    (933729, 113922, 'ACT I.')
    """
    path = resources.files("retrax.data") / "embedded" / "shakespeare.txt.xz"
    raw = lzma.decompress(path.read_bytes())
    digest = hashlib.sha256(raw).hexdigest()
    if digest != SHAKESPEARE_SHA256:
        raise ValueError(
            f"{path} is damaged: its text has SHA-256 {digest}, expected "
            f"{SHAKESPEARE_SHA256}; install the package again"
        )
    # Each play is a form feed, its title, a line end, and its text.
    plays = [play.split("\n", 1)[1] for play in raw.decode("ascii").split("\f")[1:]]
    train, validation = plays[:-_N_VALIDATION_PLAYS], plays[-_N_VALIDATION_PLAYS:]
    return "".join(train), "".join(validation)


def lm_inputs(
    train_tokens: Any,
    eval_tokens: Any,
    batch_size: int,
    length: int,
    eval_batch_size: int = 64,
    seed: int = 0,
    tokenizer: Any = None,
) -> Inputs:
    """Returns `Inputs` of a language model from one long row of tokens for each part.

    The training stream is endless and of fixed shape: random crops, see `CropStream`.
    The evaluation stream goes once through all evaluation tokens, in windows one after
    another; what lacks in the last window is padding of weight 0. The train-evaluation
    stream does the same with as many of the first training tokens.

    Args:
      train_tokens: (n,) int, n >= length; ids from 2 on if 0 and 1 are to keep their
        meaning.
      eval_tokens: (n,) int.
      batch_size: crops in a training batch, over all devices together.
      length: tokens in a crop or window.
      eval_batch_size: windows in an evaluation batch; the last one is smaller.
      seed: with the number of the batch it fixes the crops of training.
      tokenizer: what made the tokens, for `retrax predict`; see `Inputs`.

    Raises:
      ValueError: a part is not one row of integers, or too short; a bad size or seed.
    """
    train, evaluation = _row(train_tokens), _row(eval_tokens)

    def once(tokens: np.ndarray) -> ArrayStream:
        arrays = _windows(tokens, length)
        return ArrayStream(arrays, eval_batch_size, shuffle=False, repeat=False)

    return Inputs(
        train_stream=CropStream(train, batch_size, length, seed),
        eval_stream=once(evaluation),
        train_eval_stream=once(train[: len(evaluation)]),
        tokenizer=tokenizer,
    )


class CropStream(Stream):
    """Streams random crops of one long row of tokens, without end.

    A batch is (crops: (batch_size, length) int32, the same crops, ones: float32), for
    models that shift their input right. Every start is equally likely. The crops of a
    batch depend on the seed and the number of the batch alone, so the position is that
    number, and a restored stream goes on at once, on any NumPy version.

    Args:
      tokens: (n,) int.
      batch_size: crops in a batch.
      length: tokens in a crop, at most n.
      seed: non-negative.

    Raises:
      ValueError: the tokens are not one row of integers, too few, or a size or the
        seed is out of range.

    >>> stream = CropStream(np.arange(100), batch_size=2, length=4)
    >>> crops, targets, weights = next(stream)
    >>> (crops - crops[:, :1]).tolist()
    [[0, 1, 2, 3], [0, 1, 2, 3]]
    """

    def __init__(self, tokens: Any, batch_size: int, length: int, seed: int = 0):
        self._tokens = _row(tokens)
        self._batch_size = operator.index(batch_size)
        self._length, self._seed = operator.index(length), operator.index(seed)
        if self._batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if not 1 <= self._length <= len(self._tokens):
            raise ValueError(
                f"length must be between 1 and the number of tokens, "
                f"{len(self._tokens)}; got {length}"
            )
        if self._seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        self._next = 0
        self._closed = False

    def read(self) -> Batch:
        if self._closed:
            raise StopIteration
        # NumPy promises these raw bits for ever; n / 2^64 of unevenness is nothing.
        bits = np.random.PCG64([self._seed, self._next]).random_raw(self._batch_size)
        n_starts = len(self._tokens) - self._length + 1
        starts = (bits % np.uint64(n_starts)).astype(np.intp)
        self._next += 1
        crops = self._tokens[starts[:, None] + np.arange(self._length)]
        return crops, crops, np.ones(crops.shape, np.float32)

    def position(self) -> Position:
        return {
            "kind": "crops",
            "batches": self._next,
            "seed": self._seed,
            "n_tokens": len(self._tokens),
            "batch_size": self._batch_size,
            "length": self._length,
        }

    def seek(self, position: Position) -> None:
        mine = self.position()
        check_kind(position, "crops", tuple(mine))
        for key in ("seed", "n_tokens", "batch_size", "length"):
            if position[key] != mine[key]:
                raise ValueError(
                    f"the state was saved with {key}={position[key]}, this stream has "
                    f"{key}={mine[key]}; build the stream as it was, or do not restore"
                )
        self._next = position["batches"]

    def fresh(self) -> "CropStream":
        return CropStream(self._tokens, self._batch_size, self._length, self._seed)

    def close(self) -> None:
        super().close()
        self._closed = True


class CharTokenizer:
    """Maps characters to ids and back; the first character has id 2.

    Id 0 is padding, id 1 the end of a sequence.

    Args:
      characters: the vocabulary, each character once; by default that of
        `shakespeare`.

    Raises:
      ValueError: a character occurs twice, or there is none.

    >>> tokenizer = CharTokenizer()
    >>> tokenizer.vocab_size, tokenizer.encode("To be").tolist()
    (72, [37, 60, 3, 47, 50])
    >>> tokenizer.decode([37, 60, 3, 47, 50, 1, 0, 0])
    'To be'
    """

    def __init__(self, characters: str = SHAKESPEARE_CHARACTERS):
        twice = sorted(c for c in set(characters) if characters.count(c) > 1)
        if twice or not characters:
            raise ValueError(
                f"a vocabulary needs each character once, got {twice} more than once"
                if twice
                else "a vocabulary needs at least one character, got ''"
            )
        self.characters = characters
        self._order = np.argsort(_code_points(characters))
        self._sorted = _code_points(characters)[self._order]

    @property
    def vocab_size(self) -> int:
        """Number of ids, padding and the end included."""
        return len(self.characters) + 2

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of a text, (len(text),) int32, without an end id.

        Raises:
          ValueError: the text has characters that are not in the vocabulary.
        """
        codes = _code_points(text)
        places = np.searchsorted(self._sorted, codes) % len(self._sorted)
        unknown = sorted({chr(c) for c in codes[self._sorted[places] != codes]})
        if unknown:
            raise ValueError(
                f"characters {unknown} are not in the vocabulary {self.characters!r}; "
                "remove them from the text, or make a CharTokenizer with them"
            )
        return (self._order[places] + 2).astype(np.int32)

    def decode(self, ids: Any) -> str:
        """Returns the text of (n,) ids up to the first end id; padding is left out.

        Raises:
          ValueError: the ids are not one row of integers in [0, vocab_size).
        """
        ids = _row(ids) if np.size(ids) else np.zeros(0, np.int32)
        wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
        if wrong.size:
            raise ValueError(f"ids must be in [0, {self.vocab_size}), got {wrong[0]}")
        ends = np.flatnonzero(ids == EOS_ID)
        ids = ids[: ends[0]] if ends.size else ids
        return "".join(self.characters[i - 2] for i in ids if i != PAD_ID)


def _row(tokens: Any) -> np.ndarray:
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            "tokens must be one row of integers, got shape "
            f"{tokens.shape} of {tokens.dtype}"
        )
    if not tokens.size:
        raise ValueError("there must be at least one token, got none")
    return tokens.astype(np.int32, copy=False)


def _windows(tokens: np.ndarray, length: int) -> Batch:
    """Cuts tokens into rows; the last one is padded and weighs nothing there."""
    weights = np.ones(len(tokens), np.float32)
    tail = (0, -len(tokens) % length)
    rows = np.pad(tokens, tail).reshape(-1, length)
    return rows, rows, np.pad(weights, tail).reshape(-1, length)


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)

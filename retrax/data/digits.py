"""`digits`: a real image data set of 49 KB that needs no download.

Last in the order of `retrax.data`, after `inputs`. The file is `embedded/digits.npz`;
its source, licence and split are described in `embedded/digits.md` beside it.
"""

import hashlib
import io
from importlib import resources

import gin
import numpy as np

from retrax.data.arrays import ArrayStream
from retrax.data.inputs import Inputs

DIGITS_SHA256 = "f354e945ec41a58aef5cd8cc479023d9154fa56a623fadfc4047844f44b7de5d"
"""SHA-256 of the bytes of images, labels, train_index and test_index, joined."""

_N_TRAIN_EVAL = 360  # as many as there are test images, so that both weigh the same


@gin.configurable(module="retrax.data")
def digits(
    batch_size: int = 32,
    eval_batch_size: int = 256,
    seed: int = 0,
    flatten: bool = False,
    channels: bool = False,
) -> Inputs:
    """Returns the handwritten digits as `Inputs`: 1,437 to train on, 360 to test.

    The training stream is shuffled, endless and of fixed batch shape. The evaluation
    stream holds each of the 360 test images once, in order; the train-evaluation
    stream the first 360 training images. Each call of them begins anew.

    Args:
      batch_size: training images in a batch, over all devices together.
      eval_batch_size: images in an evaluation batch; the last one is smaller.
      seed: with the epoch number it fixes the order of training.
      flatten: whether images are (64,) instead of (8, 8).
      channels: whether images are (8, 8, 1) instead of (8, 8).

    Batches are (images: (batch, 8, 8) float32 in [0, 1], labels: (batch,) int32).
    Source: Alpaydin and Kaynak (1998), UCI Machine Learning Repository, CC BY 4.0.

    >>> images, labels = next(digits(batch_size=16).train_stream())
    >>> images.shape, images.dtype.name, labels.shape, labels.dtype.name
    ((16, 8, 8), 'float32', (16,), 'int32')
    """
    train, test = digits_arrays(flatten=flatten, channels=channels)
    first = tuple(a[:_N_TRAIN_EVAL] for a in train)

    def once(arrays: tuple[np.ndarray, ...]) -> ArrayStream:
        return ArrayStream(arrays, eval_batch_size, shuffle=False, repeat=False)

    return Inputs(
        train_stream=ArrayStream(train, batch_size, seed=seed, drop_remainder=True),
        eval_stream=once(test),
        train_eval_stream=once(first),
    )


def digits_arrays(
    flatten: bool = False, channels: bool = False
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns the digits as (x_train, y_train), (x_test, y_test).

    Args:
      flatten: whether images are (64,) instead of (8, 8).
      channels: whether images are (8, 8, 1) instead of (8, 8).

    Raises:
      ValueError: both flatten and channels, or a damaged data file.

    >>> (x_train, y_train), (x_test, y_test) = digits_arrays()
    >>> x_train.shape, y_train.shape, x_test.shape, y_test.shape
    ((1437, 8, 8), (1437,), (360, 8, 8), (360,))
    """
    if flatten and channels:
        raise ValueError(
            "flatten=True gives images of shape (64,), channels=True of (8, 8, 1); "
            "choose one"
        )
    raw = _load()
    shape = (-1, 64) if flatten else (-1, 8, 8, 1) if channels else (-1, 8, 8)
    x = (raw["images"].astype(np.float32) / 16).reshape(shape)
    y = raw["labels"].astype(np.int32)
    train, test = raw["train_index"], raw["test_index"]
    return (x[train], y[train]), (x[test], y[test])


def _load() -> dict[str, np.ndarray]:
    path = resources.files("retrax.data") / "embedded" / "digits.npz"
    names = ("images", "labels", "train_index", "test_index")
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in names}
    digest = hashlib.sha256(b"".join(a.tobytes() for a in arrays.values())).hexdigest()
    if digest != DIGITS_SHA256:
        raise ValueError(
            f"{path} is damaged: its arrays have SHA-256 {digest}, expected "
            f"{DIGITS_SHA256}; install the package again"
        )
    return arrays

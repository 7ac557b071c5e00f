"""What the tests of Loop and of callbacks share: a model, data, and loops of them."""

import io

import jax
import numpy as np

from retrax import layers as tl
from retrax import optimizers
from retrax.data.arrays import ArrayStream
from retrax.supervised.training import EvalTask, Loop, TrainTask
from retrax.trainer.run_log import RunLog

RNG = np.random.default_rng(0)
X = RNG.normal(size=(44, 5)).astype(np.float32)
Y = RNG.integers(0, 3, 44).astype(np.int32)
Q = RNG.uniform(0, 4, 44).astype(np.float32)


def noisy(mode="train"):
    return tl.Serial(
        tl.Dense(4),
        tl.BatchNorm(axis=0, mode=mode),
        tl.Dropout(0.5, mode=mode),
        tl.Dense(3),
    )


def train_stream(seed=1, parts=(X, Y)):
    return ArrayStream(tuple(p[:32] for p in parts), 8, seed=seed)


def eval_stream(parts=(X, Y)):
    rows = tuple(p[32:] for p in parts)
    return ArrayStream(rows, 8, shuffle=False, repeat=False)


def task(data=None, optimizer=None, **changes):
    return TrainTask(
        train_stream() if data is None else data,
        tl.CategoryCrossEntropy(),
        optimizers.SGD(0.1) if optimizer is None else optimizer,
        **changes,
    )


def eval_task(data=None, **changes):
    settings = {"n_eval_batches": None, **changes}
    return EvalTask(
        eval_stream() if data is None else data,
        [tl.CategoryCrossEntropy(), tl.CategoryAccuracy()],
        ["loss", "accuracy"],
        **settings,
    )


def make(model=None, tasks=None, kind=Loop, **changes):
    """A loop whose text is in `text()`."""
    stream = io.StringIO()
    settings = {
        "eval_at": lambda step: False,
        "n_devices": 1,
        "log": RunLog(stream=stream),
        **changes,
    }
    loop = kind(tl.Dense(3) if model is None else model, tasks or task(), **settings)
    return loop, stream.getvalue


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def all_of(loop):
    slots = [trainer.slots for trainer in loop.step_trainers]
    return bits((loop.model.weights, loop.model.state, slots))


def names(folder):
    return sorted(p.name for p in folder.iterdir())

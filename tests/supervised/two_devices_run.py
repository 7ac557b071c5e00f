"""Trains by a Loop on 1 and on 2 CPU devices, in a process of its own; compares them.

Two tasks, dropout-free, with an average of the weights; each loop is resumed, too.
"""

import importlib.util
import sys
from pathlib import Path

import jax
import numpy as np

from retrax import optimizers
from retrax.supervised import callbacks

SPEC = importlib.util.spec_from_file_location(
    "loop_runs", Path(__file__).with_name("loop_runs.py")
)
runs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(runs)


def loop_of(n, folder, average):
    tasks = [runs.task(), runs.task(runs.train_stream(2), optimizers.Momentum(0.1))]
    loop, _ = runs.make(
        tasks=tasks,
        eval_tasks=runs.eval_task(),  # 12 rows: uneven on two devices.
        eval_at=[3],
        n_devices=n,
        output_dir=folder,
        callbacks=[average, callbacks.UpdateRatio(2)],
    )
    return loop


found = []
for n in (1, 2):
    folder, average = Path(sys.argv[1]) / str(n), callbacks.ModelEMA(0.5)
    loop = loop_of(n, folder, average)
    loop.run(4)
    loop.close()
    again = loop_of(n, folder, callbacks.ModelEMA(0.5))
    assert again.step == 4 and runs.all_of(again) == runs.all_of(loop)
    leaves = jax.tree.leaves((loop.model.weights, average.weights))
    measured = loop.history.last("eval", "metrics/ema_loss")
    found.append([*map(np.asarray, leaves), np.asarray(measured)])
for one, two in zip(*found, strict=True):
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
print("equal")

"""The toy of the golden weighted steps, made of layers; used by the tests of it.

Prediction (x - m) w + b, loss sum(q e^2) / sum(q), and state m that follows the mean of
the rows: m <- decay m + (1 - decay) mean(x), averaged over devices.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from retrax import layers as tl
from retrax import optimizers
from retrax.layers.running import emit
from retrax.shapes import signature
from retrax.trainer import StepTrainer

VECTORS = json.loads(
    (Path(__file__).with_name("vectors") / "pax_public.json").read_text()
)


class Linear(tl.Layer):
    """(x - m) w + b."""

    state_sync = "mean"

    def __init__(self, decay):
        super().__init__()
        self._decay = decay

    def init_weights_and_state(self, input_signature):
        n = input_signature.shape[-1]
        self.weights, self.state = (jnp.zeros(n), jnp.zeros(())), jnp.zeros(n)

    def forward(self, x):
        (w, b), m = self.weights, self.state
        emit("mean_x", (jnp.mean(x), jnp.float32(x.shape[0])))
        self.state = self._decay * m + (1 - self._decay) * jnp.mean(x, axis=0)
        return (x - m) @ w + b


class Measures(tl.Layer):
    """Hands the errors out by rows, and their weighted mean size."""

    def __init__(self):
        super().__init__(n_in=3, n_out=3)

    def forward(self, inputs):
        y, targets, q = inputs
        emit("per_example/error", y - targets)
        total = jnp.sum(q)
        mean = jnp.sum(q * jnp.abs(y - targets)) / jnp.where(total == 0, 1, total)
        emit("mae", (mean, total))
        return inputs


def batch_of(vector):
    return tuple(
        np.array(vector[part], np.float32) for part in ("x", "y", "example_weight")
    )


def step_of(vector, n_devices, accumulate=1):
    """(trainer, stats) after one step of a vector."""
    batch = batch_of(vector)
    model = tl.Serial(Linear(vector["decay"]), Measures(), tl.L2Loss())
    model.init(signature(batch), rng=jax.random.key(0))
    params = vector["params"]
    own = jnp.float32(params["w"]), jnp.float32(params["b"])
    model.sublayers[0].weights = own
    model.sublayers[0].state = jnp.float32(vector["moving_mean"])
    rate = vector["lr0"] / (1 + vector["step"])
    chain = optax.chain(optax.clip_by_global_norm(vector["clip"]), optax.sgd(rate))
    trainer = StepTrainer(
        model, optimizers.FromOptax(chain), n_devices, accumulate=accumulate
    )
    _, stats = trainer.one_step(batch, jax.random.key(1), vector["step"] + 1)
    return trainer, stats


def results_of(vectors):
    """What `step_of` gives by '{name}/{value}', on as many devices as asked."""
    found = {}
    for vector in vectors:
        trainer, stats = step_of(vector, vector["replicas"])
        (w, b), m = trainer.weights[0], trainer.state[0]
        values = {
            "w": w,
            "b": b,
            "moving_mean": m,
            "loss": stats["loss"],
            "grad_norm": stats["gradients_l2"],
            "per_example": stats["per_example/error"],
            "metrics/mae": [stats["mae"], stats["mae/weight"]],
            "metrics/mean_x": [stats["mean_x"], stats["mean_x/weight"]],
            "metrics/loss": [stats["loss"], stats["loss/weight"]],
        }
        for name, value in values.items():
            found[f"{vector['name']}/{name}"] = np.array(value)
    return found

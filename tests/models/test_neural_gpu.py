"""NeuralGPU: its gate by brute force, and its weights."""

import jax
import numpy as np
import pytest

from retrax import models
from retrax.errors import LayerError
from retrax.models.neural_gpu import DiagonalGate
from retrax.shapes import ShapeDtype


def test_gate_moves_thirds_of_the_channels():
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 6)).astype(np.float32)
    expected = np.zeros_like(x)
    for place in range(5):
        for channel in range(6):
            source = place + channel // 2 - 1
            if 0 <= source < 5:
                expected[:, :, place, channel] = x[:, :, source, channel]
    np.testing.assert_array_equal(DiagonalGate()(x), expected)


def test_steps_share_weights():
    d, v = 6, 4
    sig = ShapeDtype((2, 1, 5), np.int32)
    expected = v * d + 3 * (9 * d * d + d) + (d * v + v)
    for steps in (1, 5):
        model = models.NeuralGPU(d_feature=d, steps=steps, vocab_size=v)
        weights, _ = model.weights_and_state_signature(sig)
        leaves = jax.tree.leaves(weights)
        assert sum(int(np.prod(w.shape)) for w in leaves) == expected


def test_sees_as_far_as_it_has_steps():
    ids = np.zeros((1, 1, 9), np.int32)
    other = ids.copy()
    other[..., -1] = 1
    for steps, far in [(1, 2), (2, 4)]:  # Two convolutions of width 3 in each step.
        model = models.NeuralGPU(d_feature=48, steps=steps, mode="eval")
        model.init(ids, rng=jax.random.key(0))
        f = jax.jit(lambda x, m=model: m.pure_fn(x, m.weights, m.state, None)[0])
        changed = np.abs(f(ids) - f(other))[0, 0].max(-1) > 0
        assert changed.tolist() == [place >= 8 - far for place in range(9)]


def test_errors_name_numbers():
    with pytest.raises(ValueError, match="multiple of 3, got 8"):
        models.NeuralGPU(d_feature=8)
    with pytest.raises(ValueError, match="steps.*-1"):
        models.NeuralGPU(steps=-1)
    with pytest.raises(LayerError, match="divide by 3"):
        DiagonalGate()(np.zeros((1, 1, 2, 4), np.float32))

"""Masks against what they say, and attention that heeds them."""

import jax
import numpy as np
import pytest

from retrax import layers as tl
from retrax.errors import LayerError

KEY = jax.random.key(3)


def test_padding_mask():
    ids = np.array([[3, 1, 0, 0], [5, 0, 2, 0]])
    mask = tl.PaddingMask()(ids)
    assert mask.shape == (2, 1, 1, 4) and mask.dtype == bool
    np.testing.assert_array_equal(mask[:, 0, 0], [[1, 1, 0, 0], [1, 0, 1, 0]])
    np.testing.assert_array_equal(tl.PaddingMask(pad=5)(ids)[1, 0, 0], [0, 1, 1, 1])


def test_causal_mask():
    mask = tl.CausalMask()(np.zeros((2, 3, 7)))
    np.testing.assert_array_equal(mask, [[[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]])


def test_encoder_decoder_mask():
    ids = np.array([[3, 1, 0], [5, 0, 0]])
    layer = tl.EncoderDecoderMask()
    for dtype in (bool, np.int32, np.float32):
        given = np.asarray(tl.PaddingMask()(ids)).astype(dtype)
        mask = layer((np.zeros((2, 4, 8)), given))
        assert mask.shape == (2, 1, 4, 3) and mask.dtype == bool
        for t in range(4):
            np.testing.assert_array_equal(mask[:, 0, t], ids != 0)


def test_hidden_tokens_do_not_matter():
    # Position 0 as any other: the mask alone decides.
    x = np.random.default_rng(0).normal(size=(2, 4, 6)).astype(np.float32)
    layer = tl.Attention(6, n_heads=2)
    for hidden in range(4):
        seen = np.arange(4) != hidden
        mask = np.broadcast_to(seen, (2, 1, 1, 4))
        layer.init((x, mask), rng=KEY)
        changed = x.copy()
        changed[:, hidden] = 100.0
        y, z = (np.asarray(layer((each, mask))[0])[:, seen] for each in (x, changed))
        np.testing.assert_array_equal(y, z)
        changed[:, (hidden + 1) % 4] = -1.0
        assert np.all(np.asarray(layer((changed, mask))[0])[:, seen] != y)


@pytest.mark.parametrize(
    ("layer", "inputs", "text"),
    [
        (tl.PaddingMask(), np.zeros((2, 3, 4)), r"\(batch, length\), got \(2, 3, 4\)"),
        (tl.CausalMask(), np.zeros(3), r"got \(3,\)"),
        (
            tl.EncoderDecoderMask(),
            (np.zeros((2, 3, 4)), np.ones((5, 1, 1, 3))),
            "batch of 2, the encoder mask one of 5",
        ),
        (
            tl.EncoderDecoderMask(),
            (np.zeros((2, 3, 4)), np.ones((2, 3))),
            r"\(2, 3, 4\) and \(2, 3\)",
        ),
    ],
)
def test_errors(layer, inputs, text):
    with pytest.raises(LayerError, match=text):
        layer(inputs)


def test_a_mask_of_another_length_names_the_layer():
    layer = tl.Serial(tl.Attention(4, n_heads=2))
    x, mask = np.zeros((2, 3, 4), np.float32), np.ones((2, 1, 1, 5), bool)
    with pytest.raises(LayerError, match=r"\(2, 1, 1, 5\).*\(2, 2, 3, 3\)") as e:
        layer.init((x, mask))
    assert e.value.path.endswith("PureAttention")

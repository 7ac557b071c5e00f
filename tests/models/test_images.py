"""Models of images: published numbers of weights, shapes, errors."""

import jax
import numpy as np
import pytest

from retrax import models
from retrax.errors import LayerError
from retrax.shapes import ShapeDtype


def n_weights(model, sig):
    weights, _ = model.weights_and_state_signature(sig)
    return sum(int(np.prod(w.shape)) for w in jax.tree.leaves(weights))


def shape_of(model, sig):
    """Shape of the output, without computing anything."""
    weights, state = model.weights_and_state_signature(sig)
    x, weights, state = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), (sig, weights, state)
    )
    return jax.eval_shape(model.pure_fn, x, weights, state, None)[0].shape


IMAGES = ShapeDtype((2, 224, 224, 3))


def test_resnet50_has_as_many_weights_as_published():
    """Keras' ResNet50, whose convolutions have biases too: 25,583,592 trainable."""
    model = models.Resnet50(n_output_classes=1000, scan_layers=True)
    assert n_weights(model, IMAGES) == 25_583_592
    assert shape_of(model, IMAGES) == (2, 1000)


def test_resnet50_scans_equal_blocks():
    plain, scanned = models.Resnet50(), models.Resnet50(scan_layers=True)
    assert len(plain.sublayers) - len(scanned.sublayers) == 2 * (2 + 3 + 5 + 2) - 4


def test_vit_has_as_many_weights_as_published():
    """ViT-B/16 for 1,000 classes and images of 224 x 224: 86,567,656."""
    assert n_weights(models.ViT(scan_layers=True), IMAGES) == 86_567_656


@pytest.mark.parametrize("n, k", [(1, 1), (3, 2)])
def test_weights_of_wide_resnet(n, k):
    def conv(size, d_in, d_out):
        return size * size * d_in * d_out + d_out

    expected, d_in = conv(3, 3, 16), 16
    for width in (16 * k, 32 * k, 64 * k):
        expected += 2 * d_in + conv(3, d_in, width) + conv(1, d_in, width)
        expected += 2 * width + conv(3, width, width)
        expected += (n - 1) * 2 * (2 * width + conv(3, width, width))
        d_in = width
    expected += 2 * d_in + d_in * 10 + 10
    model = models.WideResnet(n_blocks=n, widen_factor=k)
    assert n_weights(model, ShapeDtype((2, 32, 32, 3))) == expected


def test_conv_net_halves_the_image():
    model = models.ConvNet(filters=(4, 6), d_hidden=5, n_output_classes=3)
    sig = ShapeDtype((2, 7, 8, 1))  # 7 -> 4 -> 2, 8 -> 4 -> 2.
    conv = (9 * 1 * 4 + 4) + 2 * 4 + (9 * 4 * 6 + 6) + 2 * 6
    expected = conv + (2 * 2 * 6 * 5 + 5) + (5 * 3 + 3)
    assert n_weights(model, sig) == expected
    assert shape_of(model, sig) == (2, 3)


def test_vit_refuses_wrong_sizes():
    with pytest.raises(ValueError, match="10 and 4"):
        models.ViT(image_size=10, patch_size=4)
    model = models.ViT(
        image_size=8, patch_size=4, d_model=8, d_ff=8, n_layers=1, n_heads=2
    )
    with pytest.raises(LayerError, match="8 x 8.*3 x 2"):
        model.init(ShapeDtype((1, 12, 8, 1)))
    with pytest.raises(ValueError, match="n_blocks.*0"):
        models.WideResnet(n_blocks=0)

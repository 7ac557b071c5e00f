"""What models say to inputs that cannot work: the numbers, and where in the model."""

import jax
import numpy as np
import pytest

from retrax import layers as tl
from retrax import models
from retrax.errors import LayerError

V, MAX_LEN = 10, 6
SIZES = dict(d_model=8, d_ff=16, n_heads=2, max_len=MAX_LEN)


def ids(rows, length, value=1):
    return np.full((rows, length), value, np.int32)


def language_model(name, mode, **kwargs):
    if name in ("TransformerLM", "DecoderLM"):
        kwargs = dict(SIZES, n_layers=1, **kwargs)
    return getattr(models, name)(V, mode=mode, **kwargs)


def translator(name, mode):
    if name == "Transformer":
        sizes = dict(SIZES, n_encoder_layers=1, n_decoder_layers=1)
        return models.Transformer(V, mode=mode, **sizes)
    return models.LSTMSeq2SeqAttn(V, V, 8, 1, 1, mode=mode)


def made(model, x):
    """Initialises in one compiled piece, which is much faster than op by op."""
    init = jax.jit(lambda key: model.init(x, rng=key))
    model.weights, model.state = init(jax.random.key(0))
    return model


def go_on(model, x):
    """Calls a model of mode 'predict', compiled, and keeps its state."""
    y, state = jax.jit(model.pure_fn)(x, model.weights, model.state, None)
    assert np.all(np.isfinite(y[0] if isinstance(y, tuple) else y))
    model.state = state


def check_raises(model, x, text, path):
    """Checks the message, and that the error leaves the model as it was."""
    with pytest.raises(LayerError, match=text) as info:
        model(x)
    assert path in info.value.path, info.value.path
    assert "Traceback" not in str(info.value)


@pytest.fixture(scope="module", autouse=True)
def _compile_fast():
    """Most of the time here goes into compiling."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def lm():
    return made(language_model("TransformerLM", "eval"), ids(1, 3))


@pytest.mark.parametrize("wrong", [10, 12, -2])
def test_an_id_out_of_the_vocabulary(lm, wrong):
    x = ids(2, 3)
    x[1, 1] = wrong  # The last id is shifted out.
    text = f"ids 0 to 9, but 1 of 6 ids are outside, the first of them {wrong};"
    check_raises(lm, x, text, "Serial[1] > Embedding_10_8")


def test_a_sequence_longer_than_max_len(lm):
    jax.eval_shape(lm.pure_fn, ids(1, MAX_LEN), lm.weights, lm.state, None)
    text = r"max_len=6 positions, but the inputs have length 7; .*larger max_len"
    check_raises(lm, ids(1, 7), text, "Serial[3] > PositionalEncoding")


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda scan: models.TransformerLM(V, 9, n_heads=2, scan_layers=scan),
        lambda scan: models.TransformerEncoder(V, 5, 9, n_heads=2, scan_layers=scan),
        lambda scan: models.Transformer(V, V, 9, n_heads=2, scan_layers=scan),
        lambda scan: models.DecoderLM(V, 9, n_heads=2, scan_layers=scan),
        lambda scan: models.BERT(9, V, n_heads=2, scan_layers=scan),
        lambda scan: models.ViT(V, 8, 4, 9, n_heads=2, scan_layers=scan),
        lambda scan: models.LSTMSeq2SeqAttn(
            V, V, 9, n_attention_heads=2, scan_layers=scan
        ),
    ],
)
def test_heads_that_do_not_divide_the_width(make, scan_layers):
    with pytest.raises(ValueError, match="d_feature 9 is not divisible by n_heads=2"):
        make(scan_layers)


@pytest.mark.parametrize(
    ("name", "kwargs", "text", "path"),
    [
        ("TransformerLM", {}, "batch of 3 .*cache was made for 2", "Causal"),
        (
            "TransformerLM",
            {"scan_layers": True},
            "batch of 3 .*cache was made for 2",
            "Repeat[block] > Serial[0] > Serial[0] >",
        ),
        ("DecoderLM", {}, "batch of 3 .*cache was made for 2", "Causal"),
        ("GRULM", {"d_model": 8}, r"\(2, 8\) .*be \(3, 8\).*batch size", "Scan"),
        ("RNNLM", {"d_model": 8}, r"\(2, 32\) .*be \(3, 32\).*batch size", "Scan"),
    ],
)
def test_another_batch_size_than_the_cache(name, kwargs, text, path):
    model = made(language_model(name, "predict", **kwargs), ids(2, 1))
    check_raises(model, ids(3, 1), text, path)


@pytest.mark.parametrize(
    ("name", "scan_layers", "text"),
    [
        ("TransformerLM", False, "6 positions .max_len=6., .*has reached 7"),
        ("DecoderLM", False, "6 positions .max_inference_length=6., .*reached 7"),
        ("DecoderLM", True, "6 positions .max_inference_length=6., .*reached 7"),
    ],
)
def test_a_full_cache_names_its_limit(name, scan_layers, text):
    model = language_model(name, "predict", scan_layers=scan_layers)
    assert tl.longest_sequence(model) == MAX_LEN
    made(model, ids(2, 1))
    go_on(model, ids(2, MAX_LEN))
    check_raises(model, ids(2, 1), text + ".*reset_state", "Serial")
    model.reset_state()
    go_on(model, ids(2, MAX_LEN))


@pytest.mark.parametrize(
    ("name", "text", "path"),
    [
        (
            "Transformer",
            "decoder input has a batch of 2, the encoder mask one of 3",
            "En",
        ),
        ("LSTMSeq2SeqAttn", r"\(2, 3, 1, 8\) and \(3, 4, 1, 8\)", "PureAttention"),
    ],
)
def test_source_and_target_of_other_batch_sizes(name, text, path):
    model = made(translator(name, "eval"), (ids(2, 4), ids(2, 3)))
    check_raises(model, (ids(3, 4), ids(2, 3)), text, path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Transformer", "input has a batch of 3, the encoder mask one of 2.*reset"),
        ("LSTMSeq2SeqAttn", r"\(2, 16\) .*be \(3, 16\).*batch size"),
    ],
)
def test_another_pair_without_a_new_start(name, text):
    model = made(translator(name, "predict"), (ids(2, 4), ids(2, 1)))
    go_on(model, (ids(2, 4), ids(2, 1)))
    check_raises(model, (ids(3, 4), ids(3, 1)), text, "Serial")


@pytest.mark.parametrize("name", ["Transformer", "LSTMSeq2SeqAttn"])
def test_one_input_where_two_are_wanted(name):
    model = made(translator(name, "eval"), (ids(2, 4), ids(2, 3)))
    check_raises(model, ids(2, 4), "takes 2 inputs in a tuple or list, got one", "")

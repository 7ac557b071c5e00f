"""One table of all models, and what holds for each of them."""

import dataclasses
import functools
import inspect
from collections.abc import Callable

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax import models
from retrax.shapes import signature

BATCH, LENGTH, VOCAB = 2, 6, 11
KEY = jax.random.key(3)
SMALL = dict(d_model=8, d_ff=16, n_heads=2)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model: how to make it from mode and options, and what it takes.

    Inputs are 'ids', or 'pairs' (source, target), or a shape of floats.
    """

    name: str
    make: Callable[..., tl.Layer]
    inputs: object
    decodes: bool = False
    scans: bool = False

    def values(self, seed=0):
        rng = np.random.default_rng(seed)
        ids = rng.integers(2, VOCAB, (3, BATCH, LENGTH)).astype(np.int32)
        if self.inputs == "ids":
            return ids[0]
        if self.inputs == "pairs":
            source = np.pad(ids[1], ((0, 0), (0, 2)))  # With padding.
            source[1, 4:] = 0
            return source, ids[0]
        if self.inputs == "bert":
            return ids[0], ids[1] % 2, np.arange(BATCH, dtype=np.int32)
        if self.inputs == "grid":
            return ids[0, :, None] % 2
        return rng.normal(size=self.inputs).astype(np.float32)


def lm(model, **fixed):
    return lambda **kw: model(VOCAB, **fixed, **kw)


def of(model, **fixed):
    return lambda **kw: model(**fixed, **kw)


def decoder(name, make, inputs="ids", scans=True):
    return Case(name, make, inputs, decodes=True, scans=scans)


STACK = dict(n_layers=2, max_len=12, **SMALL)
PAIRS = dict(n_encoder_layers=2, n_decoder_layers=2, **SMALL)
GROUPED = dict(d_model=16, n_heads=4, n_kv_heads=2, n_layers=2, max_len=12)
CASES = [
    decoder("TransformerLM", lm(models.TransformerLM, **STACK)),
    decoder("TransformerDecoder", lm(models.TransformerDecoder, **STACK)),
    decoder("DecoderLM", lm(models.DecoderLM, **GROUPED)),
    decoder("DecoderLM:alibi", lm(models.DecoderLM, positions="alibi", **GROUPED)),
    decoder("GRULM", lm(models.GRULM, d_model=8, n_layers=2)),
    decoder("RNNLM", lm(models.RNNLM, d_model=8), scans=False),
    decoder(
        "RNNLM:gru",
        lm(
            models.RNNLM,
            d_model=8,
            n_layers=3,
            rnn_cell=tl.GRUCell,
            rnn_cell_d_state_multiplier=1,
        ),
        scans=False,
    ),
    decoder("Transformer", lm(models.Transformer, max_len=12, **PAIRS), "pairs"),
    decoder(
        "Transformer:two_vocabularies",
        lm(models.Transformer, output_vocab_size=13, max_len=12, **PAIRS),
        "pairs",
    ),
    decoder(
        "LSTMSeq2SeqAttn",
        of(
            models.LSTMSeq2SeqAttn,
            input_vocab_size=VOCAB,
            target_vocab_size=VOCAB,
            d_model=8,
        ),
        "pairs",
    ),
    Case(
        "TransformerEncoder", lm(models.TransformerEncoder, **STACK), "ids", scans=True
    ),
    Case("MaskedLM", lm(models.MaskedLM, **STACK), "ids", scans=True),
    Case("BERT", of(models.BERT, vocab_size=VOCAB, **STACK), "bert", scans=True),
    Case(
        "ViT",
        of(models.ViT, n_classes=5, image_size=8, patch_size=4, n_layers=2, **SMALL),
        (BATCH, 8, 8, 1),
        scans=True,
    ),
    Case(
        "ViT:mean",
        of(
            models.ViT,
            n_classes=5,
            image_size=8,
            patch_size=4,
            n_layers=2,
            class_token=False,
            **SMALL,
        ),
        (BATCH, 8, 8, 1),
        scans=True,
    ),
    Case("NeuralGPU", of(models.NeuralGPU, d_feature=6, steps=2), "grid"),
    Case("WideResnet", of(models.WideResnet), (BATCH, 8, 8, 1), scans=True),
    Case("ConvNet", of(models.ConvNet, filters=(4, 8)), (BATCH, 8, 8, 1)),
    Case("MLP", of(models.MLP, layer_widths=(8, 3)), (BATCH, 5)),
]
# In files of their own; Resnet50 is too large for values here.
ELSEWHERE = {
    "LatentTransformerLM",
    "Reformer",
    "Reformer2",
    "ReformerLM",
    "ReformerShortenLM",
    "Resnet50",
}
HEADS = {
    "BERTClassifierHead",
    "BERTMLMHead",
    "BERTPretrainingHead",
    "BERTPretrainingLoss",
    "BERTRegressionHead",
}


def cases(**wanted):
    """Parametrizes over the cases whose attributes are as wanted."""
    found = [c for c in CASES if all(getattr(c, k) == v for k, v in wanted.items())]
    return pytest.mark.parametrize("case", found, ids=[c.name for c in found])


def run(model, x, weights=None, state=None, rng=None):
    weights = model.weights if weights is None else weights
    state = model.state if state is None else state
    return jax.jit(model.pure_fn)(x, weights, state, rng)[0]


def first(outputs):
    return outputs[0] if isinstance(outputs, (tuple, list)) else outputs


@functools.cache  # Tests leave it as it is.
def made(case, mode, **kw):
    """The model with random weights, biases too, so that every part matters.

    NumPy's numbers: to compile what draws initial weights takes longer than the rest.
    """
    model = case.make(mode=mode, **kw)
    sig = signature(case.values())
    rng = np.random.default_rng(1)

    def draw(w):
        scale = np.prod(w.shape[-2:]) ** -0.25
        return (scale * rng.normal(size=w.shape)).astype(np.float32)

    model.weights = jax.tree.map(draw, model.weights_and_state_signature(sig)[0])
    model.state = jax.jit(lambda key: model.init(sig, rng=key)[1])(KEY)
    return model


def scanned_if(condition):
    return dict(scan_layers=True) if condition else {}


def test_table_is_complete():
    names = {c.name.split(":")[0] for c in CASES}
    assert names | ELSEWHERE | HEADS == set(models.__all__)


VARIANTS = [c for c in CASES if ":" in c.name]


@pytest.mark.parametrize(
    "case", [c for c in CASES if c not in VARIANTS], ids=lambda c: c.name
)
def test_gradients_are_finite_and_reach_all_weights(case):
    options = scanned_if(case.scans)
    if case.name == "WideResnet":
        options = dict(n_blocks=1)  # The other blocks are like the last one.
    if "dropout" in inspect.signature(getattr(models, case.name)).parameters:
        options["dropout"] = 0.0  # Compiles in half the time.
    model = made(case, "train", **options)
    x = case.values()

    def loss(weights):
        y = first(model.pure_fn(x, weights, model.state, KEY)[0])
        return jnp.sum(jnp.cos(jnp.arange(y.size).reshape(y.shape)) * y)

    grads = jax.tree.leaves(jax.jit(jax.grad(loss))(model.weights))
    assert all(np.all(np.isfinite(g)) for g in grads)
    assert np.mean([np.any(np.asarray(g) != 0) for g in grads]) > 0.9


# Their blocks are in a `Repeat` here, those of the others are not.
SCANNED_IN_PREDICT = {
    "TransformerDecoder",
    "DecoderLM",
    "GRULM",
    "Transformer:two_vocabularies",
    "LSTMSeq2SeqAttn",
}


@cases(decodes=True)
def test_predict_gives_what_eval_gives(case):
    options = scanned_if(case.name in SCANNED_IN_PREDICT)
    model, x = made(case, "eval", **options), case.values()
    expected = first(run(model, x))
    target = x[1] if case.inputs == "pairs" else x
    # The decoder without a shift sees its input as it is.
    shifts = case.name != "TransformerDecoder"
    fed = np.pad(target, ((0, 0), (1, 0)))[:, :-1] if shifts else target

    def with_source(ids):
        return (x[0], ids) if case.inputs == "pairs" else ids

    predictor = case.make(mode="predict", **options)
    sig = signature(with_source(fed[:, :1]))
    predictor.state = jax.jit(lambda key: predictor.init(sig, rng=key)[1])(KEY)
    predictor.weights = model.weights
    step = jax.jit(predictor.pure_fn)
    state = predictor.state
    for sizes in [(3, 1, 1, 1), (3, 1)]:  # A prompt, then one by one; and once more.
        state = tl.initial_state(predictor, state)
        parts = []
        for ids in np.split(fed[:, : sum(sizes)], np.cumsum(sizes)[:-1], axis=1):
            y, state = step(with_source(ids), predictor.weights, state, None)
            parts.append(first(y))
        got = np.concatenate(parts, axis=1)
        np.testing.assert_allclose(got, expected[:, : sum(sizes)], atol=1e-4)


@cases(decodes=True)
def test_no_output_sees_later_ids(case):
    model, x = made(case, "eval", **scanned_if(case.scans)), case.values()
    target = np.array(x[1] if case.inputs == "pairs" else x)
    place = 3
    target[:, place] = 2 + (target[:, place] + 1) % (VOCAB - 2)
    changed = (x[0], target) if case.inputs == "pairs" else target
    f = jax.jit(lambda x: first(model.pure_fn(x, model.weights, model.state, None)[0]))
    difference = np.abs(f(x) - f(changed))
    by_place = difference.max(axis=(0, 2))
    own = 0 if case.name == "TransformerDecoder" else 1
    assert np.all(by_place[: place + own] <= 1e-6)
    assert np.all(by_place[place + own :] > 1e-5)


def stacked(plain, scanned, weights):
    """Weights of the unrolled model in the form of the scanned one."""
    if not scanned.sublayers:
        return weights
    result, i = [], 0
    for layer in scanned.sublayers:
        if isinstance(layer, tl.Repeat):
            bare = str(plain.sublayers[i]) == str(layer.block)
            k = 1 if bare else len(layer.block.sublayers)
            starts = range(i, i + layer.n * k, k)
            blocks = [weights[j] if bare else weights[j : j + k] for j in starts]
            result.append(jax.tree.map(lambda *ws: jnp.stack(ws), *blocks))
            i += layer.n * k
        else:
            result.append(stacked(plain.sublayers[i], layer, weights[i]))
            i += 1
    assert i == len(plain.sublayers)
    return tuple(result)


@cases(scans=True)
def test_scanned_layers_compute_what_unrolled_ones_do(case):
    plain, scanned = made(case, "eval"), made(case, "eval", scan_layers=True)
    assert "Repeat_2" in str(scanned)
    weights = stacked(plain, scanned, plain.weights)
    x = case.values()
    for a, b in zip(
        jax.tree.leaves(run(plain, x)),
        jax.tree.leaves(run(scanned, x, weights)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["TransformerLM", "DecoderLM", "MaskedLM"])
def test_compiled_size_does_not_grow_with_scanned_layers(name):
    x = np.ones((BATCH, LENGTH), np.int32)

    def size(n_layers, scan_layers):
        model = getattr(models, name)(
            VOCAB,
            n_layers=n_layers,
            max_len=LENGTH,
            scan_layers=scan_layers,
            mode="eval",
            **SMALL,
        )
        weights, state = model.weights_and_state_signature(signature(x))
        arguments = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), (x, weights, state)
        )
        return len(jax.jit(model.pure_fn).lower(*arguments, None).as_text())

    assert size(12, True) < 1.05 * size(3, True)
    assert size(12, False) > 2 * size(3, False)


@pytest.mark.parametrize("name", sorted(set(models.__all__) - HEADS))
def test_gin_sets_sizes_but_not_the_mode(name):
    gin.clear_config()
    gin.get_configurable(f"retrax.models.{name}")
    with pytest.raises(ValueError, match="mode"):
        gin.bind_parameter(f"{name}.mode", "eval")


@pytest.mark.parametrize("name", sorted(HEADS))
def test_gin_knows_heads(name):
    assert gin.get_configurable(f"retrax.models.{name}")

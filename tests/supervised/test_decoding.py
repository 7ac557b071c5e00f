"""Decoding: every way against a loop in eval mode, beams against all sequences."""

import gc
import itertools
import random
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax import models
from retrax.shapes import ShapeDtype
from retrax.supervised import decoding

EOS = 1


def recurrent(vocab_size=4, d=8):
    """A small model whose next tokens are far from equally probable."""

    def make(mode):
        return tl.Serial(
            tl.ShiftRight(mode=mode),
            tl.Embedding(vocab_size, d),
            tl.GRU(d, mode=mode),
            tl.Dense(vocab_size),
        )

    return make


@pytest.fixture(scope="module", autouse=True)
def _compile_fast():
    """Most of the time here goes into compiling."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def pair(make, seed=0, scale=1.5):
    """(model of mode 'predict', of mode 'eval') with the same random weights."""
    rng = np.random.default_rng(seed)

    def random_weights(w):
        x = scale * rng.standard_normal(w.shape) / np.sqrt(w.shape[-1])
        return x.astype(w.dtype)

    evaluated, predicting = make(mode="eval"), make(mode="predict")
    weights, _ = jax.eval_shape(lambda: evaluated.init(tokens(evaluated)))
    weights = jax.tree.map(random_weights, weights)
    evaluated.weights = predicting.weights = weights
    evaluated.state = first_state(evaluated)
    return predicting, evaluated


def tokens(model, n_rows=1):
    sig = ShapeDtype((n_rows, 1), np.int32)
    return sig if model.n_in == 1 else (sig,) * model.n_in


def first_state(model, n_rows=1):
    sig = tokens(model, n_rows)
    return jax.jit(lambda key: model.init(sig, rng=key)[1])(jax.random.key(0))


@pytest.fixture(scope="module")
def small():
    return pair(recurrent())


@pytest.fixture(scope="module")
def wide():
    return pair(recurrent(vocab_size=12), seed=2, scale=3.0)


def first_end(row):
    """Length of a row with its end."""
    ends = np.flatnonzero(row == EOS)
    return ends[0] + 1 if len(ends) else len(row)


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))


# --- One result, many ways ----------------------------------------------------------

SIZES = dict(d_model=8, d_ff=16, n_heads=2, max_len=32, dropout=0.0)
MODELS = {
    "TransformerLM": (models.TransformerLM, dict(vocab_size=9, n_layers=1, **SIZES)),
    "TransformerLM scanned": (
        models.TransformerLM,
        dict(vocab_size=9, n_layers=2, scan_layers=True, **SIZES),
    ),
    "DecoderLM": (
        models.DecoderLM,
        dict(vocab_size=9, n_layers=1, n_kv_heads=1, **SIZES),
    ),
    "GRULM": (models.GRULM, dict(vocab_size=9, d_model=8)),
    "RNNLM": (models.RNNLM, dict(vocab_size=9, d_model=8)),
    "Transformer": (
        models.Transformer,
        dict(input_vocab_size=9, n_encoder_layers=1, n_decoder_layers=1, **SIZES),
    ),
    "LSTMSeq2SeqAttn": (
        models.LSTMSeq2SeqAttn,
        dict(input_vocab_size=9, target_vocab_size=9, d_model=8, n_encoder_layers=1),
    ),
}


def plain_greedy(model, inputs, n):
    """The uncached loop, written out: all tokens again for each new one."""
    inputs = jnp.asarray(inputs)
    first = np.zeros((len(inputs), 0), np.int32) if model.n_in == 2 else inputs
    run = jax.jit(lambda x: model.pure_fn(x, model.weights, model.state, None)[0])
    ids = np.zeros((len(inputs), first.shape[1] + n), np.int32)
    ids[:, : first.shape[1]] = first
    for t in range(first.shape[1], ids.shape[1]):
        y = run((inputs, ids)) if model.n_in == 2 else run(ids)
        logits = y[0] if model.n_in == 2 else y
        ids[:, t] = np.argmax(logits[:, t], axis=-1)
    return ids[:, first.shape[1] :]


@pytest.mark.parametrize("name", MODELS)
def test_beam_of_1_is_greedy_is_the_uncached_loop(name):
    make, sizes = MODELS[name]
    model, evaluated = pair(lambda mode: make(**sizes, mode=mode))
    inputs = np.array([[3, 4, 5], [6, 7, 8]])
    wanted = plain_greedy(evaluated, inputs, 6)
    how = dict(max_length=6, eos_id=None)
    greedy = decoding.autoregressive_sample(model, inputs, temperature=0.0, **how)
    np.testing.assert_array_equal(greedy, wanted)
    ((beam, _),) = decoding.beam_search(model, inputs, n_beams=1, **how)
    np.testing.assert_array_equal(beam, wanted)
    uncached = decoding.autoregressive_sample(
        evaluated, inputs, temperature=0.0, eval_mode=True, eval_min_length=16, **how
    )
    np.testing.assert_array_equal(uncached, wanted)


def test_samples_are_the_same_compiled_or_not_cached_or_not_streamed_or_not(wide):
    model, evaluated = wide
    prompt = np.array([[3, 4], [5, 6]])
    how = dict(rng=jax.random.key(5), top_k=5, top_p=0.9, temperature=0.7)
    full = dict(how, max_length=6, eos_id=None)
    sample = decoding.autoregressive_sample(model, prompt, **full)
    assert sample.shape == (2, 6) and sample.dtype == np.int32
    eager = decoding.autoregressive_sample(model, prompt, accelerate=False, **full)
    np.testing.assert_array_equal(eager, sample)
    for least in (1, 8):
        uncached = decoding.autoregressive_sample(
            evaluated, prompt, eval_mode=True, eval_min_length=least, **full
        )
        np.testing.assert_array_equal(uncached, sample)
    stream = decoding.autoregressive_sample_stream(model, prompt, **how)
    np.testing.assert_array_equal(
        np.stack(list(itertools.islice(stream, 6)), axis=1), sample
    )


def test_without_a_prompt_the_start_id_is_what_comes_first(wide):
    model, evaluated = wide
    how = dict(max_length=5, eos_id=None, temperature=0.0)
    from_zero = decoding.autoregressive_sample(model, batch_size=2, **how)
    uncached = decoding.autoregressive_sample(
        evaluated, eval_mode=True, eval_min_length=8, **how
    )
    np.testing.assert_array_equal(from_zero, np.repeat(uncached, 2, axis=0))
    own = decoding.autoregressive_sample(model, batch_size=2, start_id=[7, 0], **how)
    np.testing.assert_array_equal(own[1], from_zero[1])
    column = decoding.autoregressive_sample(
        model, batch_size=1, start_id=np.array([[7]]), **how
    )
    np.testing.assert_array_equal(own[:1], column)


# --- Calls and rows do not touch each other -----------------------------------------


def test_two_calls_give_the_same_and_the_model_stays_as_it_is():
    model, _ = pair(recurrent(vocab_size=12), seed=2)
    # As in the middle of a sequence.
    model.state = jax.tree.map(lambda x: x + 1, first_state(model, n_rows=2))
    before = jax.tree.map(np.asarray, model.state)
    how = dict(batch_size=2, max_length=8)
    first = decoding.autoregressive_sample(model, **how)
    beams = decoding.beam_search(model, **how)
    stream = decoding.autoregressive_sample_stream(model, batch_size=2)
    next(stream)
    np.testing.assert_array_equal(decoding.autoregressive_sample(model, **how), first)
    again = decoding.beam_search(model, **how)
    np.testing.assert_array_equal(again[0][0], beams[0][0])
    jax.tree.map(np.testing.assert_array_equal, before, model.state)


def test_streams_of_one_model_do_not_disturb_each_other(wide):
    model, _ = wide
    alone = decoding.autoregressive_sample_stream(model, np.array([[3, 4]]))
    wanted = [int(next(alone)[0]) for _ in range(5)]
    one = decoding.autoregressive_sample_stream(model, np.array([[3, 4]]))
    other = decoding.autoregressive_sample_stream(model, np.array([[5, 9]]))
    got = [int(x[0]) for x, _ in itertools.islice(zip(one, other, strict=True), 5)]
    assert got == wanted


def test_no_global_random_state_is_read_or_changed(wide):
    model, _ = wide

    def sample():
        return decoding.autoregressive_sample(model, batch_size=3, max_length=6)

    random.seed(1)
    np.random.seed(1)
    first = sample()
    states = random.getstate(), np.random.get_state()[1].tolist()
    random.seed(2)
    np.random.seed(2)
    np.testing.assert_array_equal(sample(), first)
    random.seed(1)
    np.random.seed(1)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states


def test_without_a_key_it_is_key_0(wide):
    model, _ = wide
    how = dict(batch_size=3, max_length=8, eos_id=None)
    default = decoding.autoregressive_sample(model, **how)
    zero = decoding.autoregressive_sample(model, rng=jax.random.key(0), **how)
    other = decoding.autoregressive_sample(model, rng=jax.random.key(1), **how)
    np.testing.assert_array_equal(default, zero)
    assert (default != other).any()


def test_rows_do_not_depend_on_each_other(wide):
    model, _ = wide
    prompts = np.array([[3, 4], [5, 6], [7, 8]])
    how = dict(max_length=10)
    rows = decoding.autoregressive_sample(model, prompts, **how)
    changed = decoding.autoregressive_sample(model, np.array([[3, 4], [9, 9]]), **how)
    n = min(rows.shape[1], changed.shape[1])
    np.testing.assert_array_equal(rows[0, :n], changed[0, :n])
    beams = decoding.beam_search(model, prompts, n_beams=3, **how)
    for i, prompt in enumerate(prompts):
        alone = decoding.beam_search(model, prompt[None], n_beams=3, **how)
        for (ids, scores), (own_ids, own_scores) in zip(beams, alone, strict=True):
            n = own_ids.shape[1]
            np.testing.assert_array_equal(ids[i, :n], own_ids[0])
            assert not ids[i, n:].any()
            np.testing.assert_allclose(scores[i], own_scores[0], rtol=1e-5)


def test_one_prompt_serves_all_rows(wide):
    model, _ = wide
    how = dict(max_length=6, eos_id=None)
    rows = decoding.autoregressive_sample(model, np.array([[3, 4]]), 3, **how)
    wanted = decoding.autoregressive_sample(model, np.array([[3, 4]] * 3), **how)
    np.testing.assert_array_equal(rows, wanted)
    assert len({tuple(row) for row in rows}) > 1


# --- Ends ---------------------------------------------------------------------------


def test_rows_stop_at_their_own_end(small):
    model, _ = small
    how = dict(batch_size=8, max_length=30)
    endless = decoding.autoregressive_sample(model, eos_id=None, **how)
    lengths = [first_end(row) for row in endless]
    assert len(set(lengths)) > 2 and max(lengths) < 30
    rows = decoding.autoregressive_sample(model, eos_id=EOS, **how)
    assert rows.shape == (8, max(lengths))  # And nothing was computed after that.
    for row, whole, n in zip(rows, endless, lengths, strict=True):
        np.testing.assert_array_equal(row[:n], whole[:n])
        assert not row[n:].any()
    eager = decoding.autoregressive_sample(model, eos_id=EOS, accelerate=False, **how)
    np.testing.assert_array_equal(eager, rows)


def test_min_length(small):
    model, _ = small
    how = dict(batch_size=8, max_length=9)
    short = decoding.autoregressive_sample(model, **how)
    assert min(first_end(row) for row in short) < 6
    rows = decoding.autoregressive_sample(model, min_length=6, **how)
    assert EOS not in rows[:, :6]
    ids, _ = decoding.beam_search(model, max_length=9, min_length=6, n_beams=2)[0]
    assert EOS not in ids[:, :6]


# --- Beams against all sequences ----------------------------------------------------

LENGTH, VOCAB = 4, 4


def table(evaluated, prompt):
    """log p of every sequence: {(ids...): [log p of each token]}, in float64."""
    ids = np.array(list(itertools.product(range(VOCAB), repeat=LENGTH)), np.int32)
    whole = np.concatenate([np.tile(prompt, (len(ids), 1)), ids], axis=1)
    y, _ = evaluated.pure_fn(whole, evaluated.weights, evaluated.state, None)
    log_p = log_softmax(y)[:, len(prompt) :]
    log_p = np.take_along_axis(log_p, ids[:, :, None], axis=2)[:, :, 0]
    return {tuple(map(int, row)): p for row, p in zip(ids, log_p, strict=True)}


def log_p_of(log_ps, prefix):
    whole = prefix + (0,) * (LENGTH - len(prefix))
    return float(np.sum(log_ps[whole][: len(prefix)]))


def score(log_ps, prefix, alpha):
    return log_p_of(log_ps, prefix) / ((5 + len(prefix)) / 6) ** alpha


def all_sequences(eos):
    """Those that end with the end, and those of full length without one."""
    found = []
    for n in range(1, LENGTH + 1):
        for ids in itertools.product(range(VOCAB), repeat=n):
            if eos not in ids[:-1] and (ids[-1] == eos or n == LENGTH):
                found.append(ids)
    return found


def narrow_search(log_ps, n_beams, eos, alpha):
    """The rule of `beam_search`, in plain Python."""
    beams, ended = [()], []
    for _ in range(LENGTH):
        longer = [b + (token,) for b in beams for token in range(VOCAB)]
        longer.sort(key=lambda ids: -log_p_of(log_ps, ids))
        ended += [ids for ids in longer[:n_beams] if ids[-1] == eos]
        beams = [ids for ids in longer if ids[-1] != eos][:n_beams]
        if len(ended) >= n_beams:
            beams = []
            break
    ended += beams
    ended.sort(key=lambda ids: -score(log_ps, ids, alpha))
    return ended[:n_beams]


def check_beams(beams, row, wanted, log_ps, alpha):
    for k, ids in enumerate(wanted):
        got = beams[k][0][row]
        padded = np.zeros(len(got), np.int32)
        padded[: len(ids)] = ids
        np.testing.assert_array_equal(got, padded)
        np.testing.assert_allclose(
            beams[k][1][row], score(log_ps, ids, alpha), rtol=1e-5
        )


@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
def test_a_full_beam_finds_the_best_of_all_sequences(small, alpha):
    model, evaluated = small
    prompts = np.array([[2, 3], [3, 0]])
    wanted = all_sequences(EOS)
    n_beams = len(wanted)
    assert n_beams == 1 + 3 + 9 + 27 + 81
    beams = decoding.beam_search(
        model,
        prompts,
        n_beams=n_beams + 3,
        max_length=LENGTH,
        eos_id=EOS,
        length_penalty=alpha,
    )
    assert len(beams) == n_beams + 3
    for row, prompt in enumerate(prompts):
        log_ps = table(evaluated, prompt)
        best = sorted(wanted, key=lambda ids: -score(log_ps, ids, alpha))  # noqa: B023
        check_beams(beams, row, best[:20], log_ps, alpha)
        got = [first_end(ids[row]) for ids, _ in beams[:n_beams]]
        assert sorted(got) == sorted(map(len, wanted))
    for ids, scores in beams[n_beams:]:  # There are no more.
        assert (scores == -np.inf).all() and not ids.any()


@pytest.mark.parametrize("n_beams", [1, 2, 3])
@pytest.mark.parametrize("eos", [EOS, 3, None])
def test_a_narrow_beam_follows_the_rule(n_beams, eos):
    model, evaluated = pair(recurrent(), seed=n_beams)
    prompts = np.array([[2, 3], [3, 0], [0, 2]])
    how = dict(n_beams=n_beams, max_length=LENGTH, eos_id=eos, length_penalty=0.6)
    beams = decoding.beam_search(model, prompts, **how)
    for row, prompt in enumerate(prompts):
        log_ps = table(evaluated, prompt)
        wanted = narrow_search(log_ps, n_beams, eos, 0.6)
        check_beams(beams, row, wanted, log_ps, 0.6)


def test_the_length_penalty_favours_longer_sequences(small):
    model, _ = small

    def length(alpha):
        found = decoding.beam_search(
            model, n_beams=40, max_length=LENGTH, length_penalty=alpha
        )
        return first_end(found[0][0][0])

    assert length(-3.0) == 1 and length(6.0) == LENGTH


def test_beams_are_the_same_not_compiled(small):
    model, _ = small
    how = dict(n_beams=2, max_length=3, batch_size=2)
    wanted = decoding.beam_search(model, **how)
    got = decoding.beam_search(model, accelerate=False, **how)
    for (ids, scores), (other_ids, other_scores) in zip(wanted, got, strict=True):
        np.testing.assert_array_equal(ids, other_ids)
        np.testing.assert_allclose(scores, other_scores, rtol=1e-5)


# --- Compiled code ------------------------------------------------------------------


def test_programs_are_compiled_once(wide):
    model, _ = wide
    prompt = np.array([[3, 4]])
    how = dict(max_length=7, top_k=4)
    decoding.autoregressive_sample(model, prompt, **how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "pure_fn", None)  # Would be needed to trace.
        for temperature, seed in ((0.5, 3), (2.0, 4)):
            decoding.autoregressive_sample(
                model,
                prompt,
                temperature=temperature,
                rng=jax.random.key(seed),
                eos_id=3,
                min_length=seed,
                **how,
            )


def test_new_weights_are_used(wide):
    model, _ = wide
    how = dict(max_length=8, eos_id=None)
    first = decoding.autoregressive_sample(model, **how)
    weights = model.weights
    try:
        model.weights = pair(recurrent(vocab_size=12), seed=5)[0].weights
        assert (decoding.autoregressive_sample(model, **how) != first).any()
    finally:
        model.weights = weights


def test_a_model_lives_no_longer_for_its_programs():
    model, _ = pair(recurrent())
    decoding.autoregressive_sample(model, max_length=3)
    decoding.beam_search(model, max_length=3)
    next(decoding.autoregressive_sample_stream(model))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_what_was_learned_beside_the_weights_is_kept():
    """BatchNorm's averages are state, but not that of a sequence."""

    def make(mode):
        return tl.Serial(
            tl.ShiftRight(mode=mode),
            tl.Embedding(5, 6),
            tl.BatchNorm(axis=(0, 1), mode="eval"),
            tl.GRU(6, mode=mode),
            tl.Dense(5),
        )

    model, evaluated = pair(make)
    model.state = first_state(model)
    before = decoding.autoregressive_sample(model, max_length=9, eos_id=None)

    def moved(state):
        mean, variance, n = state[2]
        return (*state[:2], (mean + 2.0, variance * 4.0, n), *state[3:])

    model.state, evaluated.state = moved(model.state), moved(evaluated.state)
    how = dict(max_length=9, eos_id=None)
    after = decoding.autoregressive_sample(model, batch_size=2, **how)
    wanted = decoding.autoregressive_sample(
        evaluated, batch_size=2, eval_mode=True, eval_min_length=16, **how
    )
    np.testing.assert_array_equal(after, wanted)
    assert (after[:1] != before).any()


# --- Mistakes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (dict(temperature=-1.0), "temperature must .*got -1.0"),
        (dict(top_p=1.1), "top_p must .*got 1.1"),
        (dict(max_length=0), "max_length must .*got 0"),
        (dict(max_length=3, min_length=4), "min_length=4 .*max_length=3"),
        (dict(batch_size=0), "batch_size must .*got 0"),
        (dict(eval_mode=True), "mode 'eval', .*made with mode='predict'"),
        (dict(inputs=np.array([3, 4])), r"\(2,\); for one row give inputs\[None\]"),
        (dict(inputs=np.array([[3.0]])), "ids.*float64"),
        (dict(inputs=np.array([[3, 4]])), r"id 4, .*\[0, 4\)"),
        (dict(inputs=np.array([[-1]])), r"id -1, .*\[0, 4\)"),
        (dict(inputs=np.ones((2, 3), int), batch_size=3), r"batch_size is 3.*\[2\]"),
        (dict(batch_size=2, start_id=[1, 2, 3]), r"each of 2 rows.*\(3,\)"),
        (dict(start_id=0.5), "integer.*float64"),
    ],
)
def test_bad_arguments(small, arguments, wanted):
    model, _ = small
    with pytest.raises(ValueError, match=wanted):
        decoding.autoregressive_sample(model, **arguments)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (dict(n_beams=0), "n_beams must .*got 0"),
        (dict(max_length=0), "max_length must .*got 0"),
        (dict(length_penalty=np.nan), "length_penalty must .*got nan"),
    ],
)
def test_bad_arguments_of_beams(small, arguments, wanted):
    with pytest.raises(ValueError, match=wanted):
        decoding.beam_search(small[0], **arguments)


def test_a_key_must_be_a_key(small):
    with pytest.raises(TypeError, match="random key, got 5"):
        decoding.autoregressive_sample(small[0], rng=5)


def test_a_model_must_be_a_layer_with_weights():
    with pytest.raises(TypeError, match="a layer, got function"):
        decoding.autoregressive_sample(lambda x: x)
    with pytest.raises(ValueError, match="has no weights; call model.init"):
        decoding.autoregressive_sample(recurrent()("predict"))


@pytest.mark.parametrize("way", [decoding.autoregressive_sample, decoding.beam_search])
def test_a_model_that_forgets_is_refused(small, way):
    with pytest.raises(ValueError, match="made with mode='predict'.*eval_mode=True"):
        way(small[1])


@pytest.fixture(scope="module")
def short():
    """A model of at most 8 positions."""

    def make(mode):
        return tl.Serial(
            tl.ShiftRight(mode=mode),
            tl.Embedding(5, 4),
            tl.CausalAttention(4, mode=mode, max_inference_length=8),
            tl.Dense(5),
        )

    return pair(make)[0]


@pytest.mark.parametrize("way", [decoding.autoregressive_sample, decoding.beam_search])
def test_a_sequence_longer_than_the_cache_is_refused(short, way):
    prompt = np.ones((1, 5), int)
    fits = way(short, prompt, max_length=3, eos_id=None)
    assert (fits[0][0] if isinstance(fits, list) else fits).shape == (1, 3)
    with pytest.raises(ValueError, match="max_inference_length=8.* 6 ids at once.*4"):
        way(short, prompt, max_length=20, eos_id=None)
    with pytest.raises(ValueError, match="max_inference_length=8"):
        way(short, np.ones((1, 9), int), max_length=1, eos_id=None)


def test_a_stream_raises_where_the_cache_ends(short):
    stream = decoding.autoregressive_sample_stream(short)
    for _ in range(8):
        next(stream)
    with pytest.raises(ValueError, match="max_inference_length=8"):
        next(stream)


def test_outputs_that_are_nan_are_refused():
    model, evaluated = pair(recurrent(), seed=3)
    broken = jax.tree.map(lambda w: w * jnp.nan, model.weights)
    model.weights = evaluated.weights = broken
    for call in (
        lambda: decoding.autoregressive_sample(model),
        lambda: decoding.autoregressive_sample(evaluated, eval_mode=True),
        lambda: decoding.beam_search(model),
    ):
        with pytest.raises(ValueError, match="NaN at new token 1"):
            call()


def test_inputs_of_an_encoder_are_needed():
    make, sizes = MODELS["LSTMSeq2SeqAttn"]
    model, _ = pair(lambda mode: make(**sizes, mode=mode))
    with pytest.raises(ValueError, match="takes 2 inputs.*other 1 as inputs=, got 0"):
        decoding.autoregressive_sample(model)

"""Text data: the words of the source, an exact split, crops that resume."""

import hashlib
import lzma
import sys
from importlib import resources

import gin
import numpy as np
import pytest

from retrax.data.text import (
    SHAKESPEARE_CHARACTERS,
    CharTokenizer,
    CropStream,
    lm_inputs,
    shakespeare,
    shakespeare_text,
)

# --- The plays ----------------------------------------------------------------------


def test_texts_have_the_recorded_hashes():
    hashes = [hashlib.sha256(t.encode()).hexdigest() for t in shakespeare_text()]
    assert hashes == HASHES


# Of the two parts, computed when they were cut from the source.
HASHES = [
    "f7e3eaf41d57ba6758c19e23f0abb72792b91561a881f21f5bfb32111713c487",
    "e9eb9cfc321abfe252cca326fefd902ff25d983ddf7c8359eee5ea95aa69f7c5",
]


def test_the_parts_are_plays_and_nothing_else():
    train, validation = shakespeare_text()
    both = train + validation
    assert "Friends, Romans, countrymen, lend me your ears" in train
    assert "If music be the food of love, play on" in validation
    assert train.count("ACT V.") == 7 and validation.count("ACT V.") == 1
    for word in (
        "gutenberg",
        "copyright",
        "etexts",
        "licensed",
        "dramatis",
        "persons r",
    ):
        assert word not in both.lower()
    assert not [line for line in both.split("\n") if line != line.strip()]
    assert "\n\n\n" not in both and "  " not in both


def test_the_validation_play_is_not_in_the_training_part():
    train, validation = shakespeare_text()
    lines = set(train.split("\n"))
    long = [line for line in validation.split("\n") if len(line) > 40]
    assert len(long) > 1000
    assert sum(line in lines for line in long) < 3


def test_the_vocabulary_is_that_of_the_text():
    train, validation = shakespeare_text()
    assert set(SHAKESPEARE_CHARACTERS) == set(train) | set(validation)
    assert set(validation) <= set(train)


def test_the_file_is_small_and_says_where_it_is_from():
    folder = resources.files("retrax.data") / "embedded"
    assert len((folder / "shakespeare.txt.xz").read_bytes()) < 450_000
    notes = (folder / "shakespeare.md").read_text()
    for words in ("Open Knowledge", "openshakespeare.org", "CC BY 2.5", "changed"):
        assert words in notes
    text = lzma.decompress((folder / "shakespeare.txt.xz").read_bytes()).decode()
    sizes = {}
    for play in text.split("\f")[1:]:
        title, body = play.split("\n", 1)
        sizes[title.lower()] = len(body)
    listed = [row.split("|")[1:3] for row in notes.splitlines() if row[:1] == "|"][2:]
    assert {n.strip().lower(): int(k.replace(",", "")) for n, k in listed} == sizes


def test_a_damaged_file_is_refused(monkeypatch):
    module = sys.modules[shakespeare_text.__module__]
    monkeypatch.setattr(module, "SHAKESPEARE_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="damaged"):
        shakespeare_text()


# --- The tokenizer ------------------------------------------------------------------


def test_ids_are_places_in_the_vocabulary_from_two_on():
    tokenizer = CharTokenizer("xba c")
    ids = tokenizer.encode("a cab xx")
    assert ids.dtype == np.int32
    assert ids.tolist() == ["xba c".index(c) + 2 for c in "a cab xx"]
    assert tokenizer.vocab_size == 7
    assert tokenizer.decode(ids) == "a cab xx"


def test_all_text_survives_a_round_trip():
    _, validation = shakespeare_text()
    tokenizer = CharTokenizer()
    ids = tokenizer.encode(validation)
    assert ids.min() >= 2 and ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == validation
    other = CharTokenizer("é€😀")
    assert other.decode(other.encode("😀é€é")) == "😀é€é"
    assert tokenizer.encode("").tolist() == [] and tokenizer.decode([]) == ""


def test_decoding_stops_at_the_end_and_leaves_padding_out():
    tokenizer = CharTokenizer("ab")
    assert tokenizer.decode([0, 2, 0, 3, 1, 2, 2]) == "ab"
    assert tokenizer.decode(np.array([1, 2])) == ""


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: CharTokenizer("aba"), r"\['a'\] more than once"),
        (lambda: CharTokenizer(""), "at least one"),
        (lambda: CharTokenizer("ab").encode("az~"), r"\['z', '~'\] are not in .*'ab'"),
        (lambda: CharTokenizer("ab").decode([2, 4]), r"\[0, 4\), got 4"),
        (lambda: CharTokenizer("ab").decode([-1]), r"\[0, 4\), got -1"),
        (lambda: CharTokenizer("ab").decode([[2]]), r"shape \(1, 1\)"),
        (lambda: CharTokenizer("ab").decode([2.0]), "float64"),
    ],
)
def test_the_tokenizer_refuses(make, text):
    with pytest.raises(ValueError, match=text):
        make()


# --- Crops --------------------------------------------------------------------------


def oracle_starts(seed, batch, batch_size, n_starts):
    """The documented rule with Python integers."""
    raw = np.random.PCG64(np.random.SeedSequence([seed, batch])).random_raw(batch_size)
    return [int(r) % n_starts for r in raw]


def test_crops_are_those_of_the_rule():
    tokens = np.random.default_rng(0).integers(2, 99, 50)
    stream = CropStream(tokens, batch_size=3, length=7, seed=5)
    for i in range(4):
        x, y, weights = next(stream)
        wanted = [tokens[s : s + 7] for s in oracle_starts(5, i, 3, 44)]
        np.testing.assert_array_equal(x, wanted)
        np.testing.assert_array_equal(x, y)
        assert x.dtype == np.int32 and weights.dtype == np.float32
        assert weights.shape == (3, 7) and (weights == 1).all()


def test_every_start_is_equally_likely():
    x, _, _ = next(CropStream(np.arange(12), batch_size=12_000, length=3))
    counts = np.bincount(x[:, 0])
    assert len(counts) == 10
    # chi-squared with 9 degrees of freedom: 27.9 is its 0.999 quantile
    assert ((counts - 1200) ** 2 / 1200).sum() < 27.9


def test_a_length_of_all_tokens_is_all_tokens():
    x, _, _ = next(CropStream([4, 5, 6], batch_size=2, length=3))
    assert x.tolist() == [[4, 5, 6], [4, 5, 6]]


@pytest.mark.parametrize("peek", [False, True])
def test_a_restored_stream_goes_on_with_the_next_batch(peek):
    def make():
        return CropStream(np.arange(1000), batch_size=4, length=8, seed=1)

    stream = make()
    for _ in range(3):
        next(stream)
    if peek:
        stream.peek()
    state = stream.state()
    wanted = [next(stream)[0] for _ in range(3)]
    other = make()
    other.restore(state)
    for x in wanted:
        np.testing.assert_array_equal(next(other)[0], x)
    assert all(isinstance(v, (int, str)) for v in state.values())
    again = stream.fresh()
    np.testing.assert_array_equal(next(again)[0], next(make())[0])


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"length": 9}, {"batch_size": 5}, {"tokens": range(999)}]
)
def test_a_state_of_another_stream_is_refused(change):
    same = {"tokens": range(1000), "batch_size": 4, "length": 8, "seed": 1}
    state = CropStream(**same).state()
    with pytest.raises(ValueError, match="was saved with"):
        CropStream(**{**same, **change}).restore(state)


def test_a_closed_stream_has_ended_and_no_length():
    stream = CropStream(range(9), 2, 3)
    with pytest.raises(TypeError, match="endless"):
        len(stream)
    stream.close()
    assert list(stream) == []


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: CropStream(range(5), 2, 6), "number of tokens, 5; got 6"),
        (lambda: CropStream(range(5), 2, 0), "got 0"),
        (lambda: CropStream(range(5), 0, 2), "batch_size must be at least 1"),
        (lambda: CropStream(range(5), 2, 2, seed=-1), "got -1"),
        (lambda: CropStream([[1, 2]], 1, 1), r"shape \(1, 2\)"),
        (lambda: CropStream([1.5], 1, 1), "float64"),
        (lambda: CropStream([], 1, 1), "float64"),
        (lambda: CropStream(np.zeros(0, int), 1, 1), "at least one token"),
    ],
)
def test_crop_stream_refuses(make, text):
    with pytest.raises(ValueError, match=text):
        make()


# --- Inputs -------------------------------------------------------------------------


def test_evaluation_has_each_token_once_in_order_every_time():
    train, evaluation = np.arange(2, 50), np.arange(50, 77)
    inputs = lm_inputs(train, evaluation, 2, 5, eval_batch_size=4)
    for _ in range(2):
        batches = list(inputs.eval_stream())
        assert [x.shape for x, _, _ in batches] == [(4, 5), (2, 5)]
        x, y, weights = (np.concatenate(p) for p in zip(*batches, strict=True))
        np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(x.ravel()[:27], evaluation)
        np.testing.assert_array_equal(weights.ravel(), [1] * 27 + [0] * 3)
        assert x.ravel()[27:].tolist() == [0, 0, 0]
    x = np.concatenate([x for x, _, _ in inputs.train_eval_stream()])
    np.testing.assert_array_equal(x.ravel()[:27], train[:27])


def test_shakespeare_streams():
    inputs = shakespeare(batch_size=5, length=100, eval_batch_size=1000, seed=3)
    tokenizer = CharTokenizer()
    train, validation = shakespeare_text()
    x, _, _ = next(inputs.train_stream())
    assert x.shape == (5, 100)
    crops = [tokenizer.decode(row) for row in x]
    assert all(crop in train for crop in crops) and len(set(crops)) == 5
    other = next(shakespeare(batch_size=5, length=100, seed=4).train_stream())
    assert (x != other[0]).any()
    batches = list(inputs.eval_stream())
    assert "".join(tokenizer.decode(r) for b in batches for r in b[0]) == validation
    assert sum(b[2].sum() for b in batches) == len(validation)
    assert inputs.input_shape == inputs.target_shape == (100,)


def test_gin_configures_it():
    with gin.unlock_config():
        gin.parse_config("retrax.data.shakespeare.length = 7")
    try:
        assert next(shakespeare().train_stream())[0].shape == (12, 7)
    finally:
        gin.clear_config()


def test_global_random_state_is_not_written():
    state = np.random.get_state()[1].copy()  # type: ignore[index]
    next(CropStream(range(99), 4, 3))
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # type: ignore[index]

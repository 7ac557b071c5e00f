"""The digits: the values of their source, a fixed split, the promised streams."""

import hashlib
import os
import subprocess
import sys

import gin
import numpy as np
import pytest

import retrax.data
from retrax.data import digits as make_digits
from retrax.data import digits_arrays


def test_arrays_have_the_recorded_hashes():
    train, test = digits_arrays()
    hashes = [hashlib.sha256(a.tobytes()).hexdigest() for a in (*train, *test)]
    assert hashes == HASHES


# Of the split and scaled arrays, computed from scikit-learn's copy of the data.
HASHES = [
    "09d22b9e6f54727ca5ad064bfb0672ab81e434cb84ce0216714f79ac365e5ee4",
    "d268d3a5c246fadb6f9919e566cdfab50802efe7c372d166f1503b91ee12b565",
    "dc12d10b812006240bba989ea17b694b77db2dfa0390465960ddee87ebccd4db",
    "f25b764612f9029b796295af4da5ded81b4f645da700e2ec9e28d8dd8a157b98",
]


def test_images_are_those_of_scikit_learn_each_once():
    datasets = pytest.importorskip("sklearn.datasets")
    source = datasets.load_digits()
    (x_train, y_train), (x_test, y_test) = digits_arrays(flatten=True)
    x, y = np.concatenate([x_train, x_test]), np.concatenate([y_train, y_test])

    def rows(images, labels):
        table = np.column_stack([images, labels])
        return table[np.lexsort(table.T)]

    np.testing.assert_array_equal(rows(x * 16, y), rows(source.data, source.target))


def test_forms_and_split():
    (x_train, y_train), (x_test, y_test) = digits_arrays()
    assert x_train.shape == (1437, 8, 8) and x_test.shape == (360, 8, 8)
    assert x_train.dtype == x_test.dtype == np.float32
    assert y_train.dtype == y_test.dtype == np.int32
    assert x_train.min() == 0 and x_train.max() == 1
    share = np.bincount(y_test) / (np.bincount(y_test) + np.bincount(y_train))
    assert np.abs(share - 0.2).max() < 0.005
    flat, channels = digits_arrays(flatten=True), digits_arrays(channels=True)
    np.testing.assert_array_equal(flat[1][0].reshape(360, 8, 8), x_test)
    assert channels[0][0].shape == (1437, 8, 8, 1)
    with pytest.raises(ValueError, match="choose one"):
        digits_arrays(flatten=True, channels=True)


def test_eval_stream_has_each_test_image_once_in_order_every_time():
    inputs = make_digits(eval_batch_size=100)
    _, (x_test, y_test) = digits_arrays()
    for _ in range(2):
        batches = list(inputs.eval_stream())
        assert [len(x) for x, _ in batches] == [100, 100, 100, 60]
        np.testing.assert_array_equal(np.concatenate([x for x, _ in batches]), x_test)
        np.testing.assert_array_equal(np.concatenate([y for _, y in batches]), y_test)


def test_train_eval_stream_is_the_first_360_training_images():
    (x_train, _), _ = digits_arrays()
    got = np.concatenate([x for x, _ in make_digits().train_eval_stream()])
    np.testing.assert_array_equal(got, x_train[:360])


def test_train_stream_is_an_endless_shuffle_of_the_training_part():
    (x_train, y_train), _ = digits_arrays(flatten=True)
    stream = make_digits(batch_size=100, seed=3, flatten=True).train_stream()
    known = {row.tobytes() for row in x_train}
    rows: list[bytes] = []
    for _ in range(14):  # an epoch is 14 batches of 100 of 1437
        x, y = next(stream)
        assert x.shape == (100, 64) and y.shape == (100,)
        rows += [row.tobytes() for row in x]
    assert set(rows) <= known and len(set(rows)) > 1390  # a few images are equal
    x, y = next(stream)
    label_of = {
        row.tobytes(): label for row, label in zip(x_train, y_train, strict=True)
    }
    assert [label_of[row.tobytes()] for row in x] == y.tolist()
    other = next(make_digits(batch_size=100, seed=4, flatten=True).train_stream())
    assert rows[:100] != [row.tobytes() for row in other[0]]


def test_shapes():
    inputs = make_digits(channels=True)
    assert inputs.input_shape == (8, 8, 1) and inputs.input_dtype == np.float32
    assert inputs.target_shape == () and inputs.target_dtype == np.int32
    assert inputs.example_shape_dtype[0] == [(32, 8, 8, 1), (32,)]


def test_gin_configures_it():
    with gin.unlock_config():
        gin.parse_config("retrax.data.digits.batch_size = 7")
    try:
        assert len(next(make_digits().train_stream())[0]) == 7
    finally:
        gin.clear_config()


def test_a_damaged_file_is_refused(monkeypatch):
    module = sys.modules[digits_arrays.__module__]
    monkeypatch.setattr(module, "DIGITS_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="damaged"):
        digits_arrays()


def test_the_package_imports_neither_jax_nor_heavier_things():
    root = os.path.dirname(os.path.dirname(retrax.data.__file__))
    code = (
        "import sys, types\n"
        "root = types.ModuleType('retrax')\n"  # the real one imports jax itself
        f"root.__path__ = [{root!r}]\n"
        "sys.modules['retrax'] = root\n"
        "import retrax.data\n"
        "heavy = {'jax', 'tensorflow', 'matplotlib', 'sklearn', 'optax'}\n"
        "print('found', sorted(heavy & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "found []", run.stderr

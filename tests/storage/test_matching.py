"""Saved arrays are matched by path and shape, and every difference is named."""

import jax
import ml_dtypes
import numpy as np
import pytest

from retrax.errors import CheckpointError
from retrax.storage.matching import match


def f32(*shape, value=0.0):
    return np.full(shape, value, np.float32)


def specs(arrays):
    return {path: (array.shape, array.dtype) for path, array in arrays.items()}


def test_equal_shapes_go_by_path_not_by_order():
    saved = {"b/w": f32(2, 2, value=2), "a/w": f32(2, 2, value=1)}
    wanted = {"a/w": ((2, 2), "float32"), "b/w": jax.ShapeDtypeStruct((2, 2), "f4")}
    got = match(wanted, saved)
    assert list(got) == ["a/w", "b/w"]
    assert got["a/w"] is saved["a/w"] and got["b/w"] is saved["b/w"]
    assert got.report.exact and got.report.n_matched == 2


def test_strict_lists_every_difference_with_a_limit():
    saved = {f"old/{i}": f32(i + 7) for i in range(12)}
    saved |= {"w": f32(2, 3), "d": np.zeros(1, np.float64)}
    wanted = {f"new/{i}": ((99,), "f4") for i in range(10)}
    wanted |= {"w": ((3, 2), "f4"), "d": ((1,), "f4")}
    with pytest.raises(CheckpointError) as caught:
        match(wanted, saved)
    text = str(caught.value)
    assert "10 missing" in text and "new/7" in text and "new/8" not in text
    assert "and 2 more" in text and "and 4 more" in text
    assert "12 in the checkpoint only" in text and "old/0" in text
    assert "w: got (2, 3), wanted (3, 2)" in text
    assert "d: got float64, wanted float32" in text
    assert "strict=False" in text


def test_loose_takes_what_fits_and_reports():
    saved = {"same": f32(2), "shape": f32(3), "extra": f32(1)}
    saved |= {"half": np.array([1.5], ml_dtypes.bfloat16), "int": np.array([7])}
    wanted = {"same": ((2,), "f4"), "shape": ((4,), "f4"), "missing": ((1, 1), "f4")}
    wanted |= {"half": ((1,), "f4"), "int": ((1,), "f4")}
    got = match(wanted, saved, strict=False)
    assert sorted(got) == ["half", "same"]
    assert got["half"].dtype == np.float32 and got["half"][0] == 1.5
    report = got.report
    assert report.missing == ["missing"]
    assert report.extra == ["extra"]
    assert report.reshaped == [("shape", (3,), (4,))]
    assert report.cast == [("half", "bfloat16", "float32")]
    assert report.other_dtype == [("int", "int64", "float32")]
    assert "2 of 5" in str(report)


def test_a_likely_rename_is_suggested_and_works():
    saved = {"enc/0/w": f32(2, 3), "enc/0/b": f32(3), "head/w": f32(3, 1)}
    wanted = {"encoder/0/w": ((2, 3), "f4"), "encoder/0/b": ((3,), "f4")}
    wanted["head/w"] = ((3, 1), "f4")
    with pytest.raises(CheckpointError, match=r"rename=\{'enc': 'encoder'\}"):
        match(wanted, saved)
    got = match(wanted, saved, rename={"enc": "encoder"})
    assert got["encoder/0/b"] is saved["enc/0/b"]


def test_rename_by_longest_whole_part_or_function():
    saved = {"a/b/w": f32(1), "a/c/w": f32(2), "ab/w": f32(3), "z": f32(4)}
    new = {"q/w": f32(1), "p/c/w": f32(2), "ab/w": f32(3)}
    got = match(specs(new), saved, rename={"a": "p", "a/b": "q", "z": None})
    assert {path: array.shape for path, array in got.items()} == {
        path: array.shape for path, array in new.items()
    }
    upper = {path.upper(): array for path, array in saved.items()}
    assert list(match(specs(upper), saved, rename=str.upper)) == list(upper)
    assert list(match({"w": ((1,), "f4")}, {"m/w": f32(1)}, rename={"m": ""})) == ["w"]
    assert list(match({"m/w": ((1,), "f4")}, {"w": f32(1)}, rename={"": "m"})) == [
        "m/w"
    ]


def test_useless_and_clashing_renames_raise():
    saved = {"encoder/w": f32(1), "head/w": f32(1)}
    with pytest.raises(CheckpointError, match="'encodr'.*encoder/w"):
        match({}, saved, strict=False, rename={"encodr": "x"})
    with pytest.raises(CheckpointError, match="same name 'head/w'"):
        match({}, saved, strict=False, rename={"encoder": "head"})

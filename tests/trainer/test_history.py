"""History keeps what was appended, as plain Python, and compares with NaN."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from retrax.trainer.history import History


def example():
    history = History()
    history.append("train", "loss", 1, 2.0)
    history.append("train", "loss", 2, float("nan"))
    history.append("train", "loss", 3, 1.0)
    history.append("eval", "accuracy", 2, 0.5)
    history.append("eval", "accuracy", 3, 0.5)
    return history


def test_values_are_plain_numbers():
    history = History()
    history.append("train", "loss", np.int64(1), jnp.float32(0.5))
    ((step, value),) = history.get("train", "loss")
    assert type(step) is int and type(value) is float
    assert (step, value) == (1, 0.5)
    with pytest.raises(TypeError):
        history.append("train", "loss", 1.5, 0.0)  # type: ignore[arg-type]


def test_modes_metrics_and_unknown_ones():
    history = example()
    assert history.modes == ["eval", "train"]
    assert history.metrics_for_mode("train") == ["loss"]
    assert history.metrics_for_mode("test") == []
    assert history.get("train", "nothing") == [] == history.get("test", "loss")
    assert history.modes == ["eval", "train"]


def test_what_is_given_out_is_not_shared():
    history = example()
    history.get("train", "loss").clear()
    history.to_dict()["eval"]["accuracy"].clear()
    history.to_dict().clear()
    assert history == example()
    values = example().to_dict()
    copy = History.from_dict(values)
    values["eval"]["accuracy"].append((4, 1.0))
    assert copy == example()


def test_dict_round_trip_also_in_the_form_of_trax():
    history = example()
    assert History.from_dict(history.to_dict()) == history
    assert History.from_dict({"_values": history.to_dict()}) == history
    assert History.from_dict({}) == History()
    with pytest.raises(ValueError, match="step, value"):
        History.from_dict({"train": [1, 2]})


def test_equality_counts_values_and_takes_nan_as_equal():
    history = example()
    assert history == example()
    history.append("eval", "accuracy", 4, 0.0)
    assert history != example()
    assert History() != {}
    other = example()
    other.append("eval", "accuracy", 4, float("nan"))
    assert history != other


def test_last_and_best():
    history = example()
    assert history.last("train", "loss") == (3, 1.0)
    assert history.last("test", "loss") is None
    assert history.best("train", "loss", "low") == (3, 1.0)
    assert history.best("train", "loss", "high") == (1, 2.0)
    assert history.best("eval", "accuracy", "high") == (2, 0.5)
    assert history.best("test", "loss") is None
    only_nan = History()
    only_nan.append("train", "loss", 1, math.nan)
    assert only_nan.best("train", "loss") is None
    with pytest.raises(ValueError, match="'lowest'.*'low' or 'high'"):
        history.best("train", "loss", "lowest")


def test_truncate_after_a_step():
    history = example()
    history.truncate_after(2)
    assert [step for step, _ in history.get("train", "loss")] == [1, 2]
    assert history.get("eval", "accuracy") == [(2, 0.5)]
    history.truncate_after(1)
    assert history.modes == ["train"]


def test_repr_counts():
    assert repr(example()) == "History(eval/accuracy: 2, train/loss: 3)"

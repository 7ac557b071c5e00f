"""Runs killed at random moments, also while saving, end as if nothing had happened.

The processes are those of `retrax verify-resume`; what they leave is compared here
once more, in another way.
"""

import hashlib

import gin
import numpy as np
import pytest

from retrax import cli, storage
from retrax.command_line.verify_resume import verify

MODULE = """
import gin, numpy as np
from retrax import data, layers as tl

@gin.configurable
def NoisyNet(mode="train"):
    return tl.Serial(
        tl.Dense(8), tl.BatchNorm(axis=0, mode=mode), tl.Relu(),
        tl.Dropout(0.3, mode=mode), tl.Dense(3),
    )

def examples(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(60, 5)).astype(np.float32)
    x[:, 0] = np.arange(60)  # Tells which example it is.
    return x, (x[:, 1] > 0).astype(np.int32)

@gin.configurable
def numbered():
    train = data.ArrayStream(examples(0), 8, seed=4)
    return data.Inputs(
        data.PrefetchStream(train),
        data.ArrayStream(examples(1), 30, shuffle=False, repeat=False),
    )

@gin.configurable
def never_the_same():
    def batches():
        rng = np.random.default_rng()
        while True:
            x, y = examples(0)
            yield x + rng.normal(size=x.shape).astype(np.float32), y
    return data.Inputs(batches, data.ArrayStream(examples(1), 30, shuffle=False))
"""

CONFIG = """
import kill_parts
train.model = @NoisyNet
train.inputs = @numbered
train.loss_fn = @CategoryCrossEntropy()
train.optimizer = @optimizers.Adam
train.lr_schedule_fn = @lr_schedules.multifactor
train.eval_frequency = 5
train.eval_steps = 1
train.checkpoint_highest = 'accuracy'
"""


@pytest.fixture(autouse=True)
def parts(tmp_path, monkeypatch):
    """A directory with a configuration and its module, to run in."""
    (tmp_path / "kill_parts.py").write_text(MODULE)
    (tmp_path / "kill.gin").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    yield tmp_path
    gin.clear_config()


def sha256(value, digest=None):
    """Hash of nested containers by their names and bits."""
    mine = digest or hashlib.sha256()
    items = value.items() if isinstance(value, dict) else None
    if isinstance(value, list | tuple):
        items = enumerate(value)
    if items is not None:
        for key, child in items:
            mine.update(repr(key).encode())
            sha256(child, mine)
    elif isinstance(value, np.ndarray):
        mine.update(str((value.dtype, value.shape)).encode() + value.tobytes())
    else:
        mine.update(repr(value).encode())
    return mine.hexdigest()


def batches(folder):
    """Step -> hashes of the batches seen in it, in all processes of a run."""
    seen = {}
    for line in (folder / "batches").read_text().splitlines():
        step, digest = line.split()
        seen.setdefault(int(step), set()).add(digest)
    return seen


def test_a_run_killed_anywhere_ends_bit_for_bit_the_same(parts):
    verified = verify(parts, ["kill.gin"], [], steps=17, n_kills=3, seed=2)
    assert verified.agrees, verified.parts
    moments = [moment for _, moment in verified.kills]
    assert len(moments) == 3 and set(moments) == {"before", "after", "saving"}
    whole, resumed = (
        storage.load(parts / n / "model.pkl") for n in ("whole", "resumed")
    )
    assert whole["step"] == 17 and len(whole["history"]["eval"]["metrics/loss"]) == 5
    for part in ("weights", "state", "slots", "history", "data", "run_key"):
        assert sha256(whole[part]) == sha256(resumed[part]), part
    assert whole["state"], "no state of BatchNorm"
    wanted, seen = batches(parts / "whole"), batches(parts / "resumed")
    assert wanted == seen and sorted(wanted) == list(range(1, 18))
    assert len(set(map(frozenset, wanted.values()))) == 17  # Batches differ.
    best = [
        storage.load(parts / n / "highest_accuracy.pkl") for n in ("whole", "resumed")
    ]
    assert best[0]["step"] == best[1]["step"]


def test_the_command_says_what_does_not_resume(parts, capsys):
    code = cli.main(
        ["verify-resume", "--config_file=kill.gin", "--steps=6", "--kills=1"]
        + ["--config=train.inputs = @never_the_same", "--dir=kept"]
    )
    out, err = capsys.readouterr()
    assert code == 1, err
    assert "NO: step 1: another batch" in out
    assert "weights" in out and "0.Dense/0: " in out
    assert out.endswith("killed and resumed once: NOT the same\n")
    assert (parts / "kept" / "whole" / "model.pkl").exists()
    code = cli.main(["verify-resume", "--config_file=kill.gin", "--dir=kept"])
    assert code == 2 and "choose another --dir" in capsys.readouterr().err


def test_a_configuration_that_cannot_run_is_told(parts, capsys):
    code = cli.main(
        ["verify-resume", "--config_file=kill.gin", "--config=train.stps = 3"]
    )
    assert code == 2 and "Did you mean steps?" in capsys.readouterr().err
    assert cli.main(["verify-resume", "--config_file=kill.gin", "--steps=1"]) == 2
    assert cli.main(["verify-resume"]) == 2

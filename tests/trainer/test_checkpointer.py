"""Which checkpoints are written, kept and read; by whom; and what failures do."""

import json
import os
import platform
import subprocess
import sys
import threading

import gin
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from retrax import storage
from retrax.errors import CheckpointError, ConfigError
from retrax.trainer.checkpoint_policy import CheckpointPolicy
from retrax.trainer.checkpointer import Checkpointer, NotSaved
from retrax.trainer.run_record import read_record


def payload(step, **more):
    evaluated = {"metrics/accuracy": [(s, 1 - abs(s - 3)) for s in range(1, step + 1)]}
    return {
        "kind": "run",
        "step": step,
        "history": {"eval": evaluated},
        "w": np.full(10, step, np.float32),
        **more,
    }


def names(folder, *left_out):
    found = {path.name for path in folder.iterdir()}
    return sorted(found - {"run.lock", "checkpoints.json", "run.json", *left_out})


def step_of(path):
    return storage.load(path)["step"]


# --- When, and for how long -----------------------------------------------------------


def test_the_policy_says_when():
    policy = CheckpointPolicy(
        every_steps=4, every_minutes=2, at_steps=[5], keep_every=10
    )
    due = [step for step in range(21) if policy.is_due(step, minutes=1.9)]
    assert due == [4, 5, 8, 10, 12, 16, 20]
    assert [step for step in range(21) if policy.is_kept(step)] == [5, 10, 20]
    assert policy.is_due(3, minutes=2)
    assert not any(CheckpointPolicy().is_due(step, 1e9) for step in range(100))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"every_steps": 0}, "every_steps must be .* at least 1, got 0"),
        ({"every_steps": 1.5}, "got 1.5"),
        ({"every_minutes": 0}, "every_minutes must be above 0, got 0"),
        ({"every_minutes": float("nan")}, "got nan"),
        ({"keep_last": 0}, "keep_last .* got 0"),
        ({"keep_every": True}, "keep_every .* got True"),
        ({"at_steps": 5}, "at_steps must be a list of steps, got 5"),
        ({"at_steps": [-1]}, "got -1"),
    ],
)
def test_a_policy_that_cannot_work_is_told(changes, wanted):
    with pytest.raises(ConfigError, match=wanted):
        CheckpointPolicy(**changes)


def test_gin_sets_the_policy(tmp_path):
    gin.parse_config("CheckpointPolicy.every_steps = 7")
    try:
        assert Checkpointer(tmp_path).is_due(14)
    finally:
        gin.clear_config()
    assert not Checkpointer(tmp_path).is_due(14)
    assert not Checkpointer(None, policy=CheckpointPolicy(every_steps=1)).is_due(1)


def test_the_last_few_stay_and_those_for_good(tmp_path):
    policy = CheckpointPolicy(keep_last=3, keep_every=4, at_steps=[1])
    writer = Checkpointer(tmp_path, highest="accuracy", policy=policy)
    for step in range(1, 11):
        writer.save(payload(step), writer.is_kept(step), wait=False)
    writer.wait()
    assert names(tmp_path) == [
        *("highest_accuracy.pkl", "highest_accuracy.previous.pkl"),
        *("model.pkl", "model.previous.pkl", "model_1.pkl", "model_4.pkl"),
        *("model_8.pkl", "recent_10.pkl", "recent_8.pkl", "recent_9.pkl"),
    ]
    assert step_of(tmp_path / "model.pkl") == 10
    assert step_of(tmp_path / "model.previous.pkl") == 9
    assert step_of(tmp_path / "highest_accuracy.pkl") == 3
    assert step_of(tmp_path / "recent_8.pkl") == step_of(tmp_path / "model_8.pkl") == 8
    # The same checkpoint is on the disk once.
    assert os.path.samefile(tmp_path / "model.pkl", tmp_path / "recent_10.pkl")


def test_a_policy_that_changes_removes_nothing_that_was_for_good(tmp_path):
    writer = Checkpointer(tmp_path)
    for step in range(1, 6):
        writer.save(payload(step), keep=True)
    writer = Checkpointer(tmp_path, policy=CheckpointPolicy(keep_last=3))
    for step in range(6, 12):
        writer.save(payload(step), keep=False)
    kept = [f"model_{step}.pkl" for step in range(1, 6)]
    assert set(kept) <= set(names(tmp_path))


def test_a_run_that_went_back_keeps_what_it_makes_anew(tmp_path):
    policy = CheckpointPolicy(keep_last=3)
    writer = Checkpointer(tmp_path, policy=policy)
    for step in range(1, 6):
        writer.save(payload(step), keep=False)
    for name in ("model.pkl", "model.previous.pkl"):  # Steps 5 and 4.
        cut(tmp_path / name)
    writer = Checkpointer(tmp_path, policy=policy)
    assert writer.load()[0]["step"] == 3
    writer.save(payload(4), keep=False)
    recent = [n for n in names(tmp_path) if n.startswith("recent")]
    assert recent == ["recent_3.pkl", "recent_4.pkl"]
    assert step_of(tmp_path / "recent_4.pkl") == 4


def test_a_step_saved_twice_does_not_push_out_the_one_before(tmp_path):
    writer = Checkpointer(tmp_path)
    for step in (1, 2, 2):
        writer.save(payload(step), keep=False)
    assert step_of(tmp_path / "model.previous.pkl") == 1


# --- Reading --------------------------------------------------------------------------


def cut(path):
    with open(path, "r+b") as file:
        file.truncate(300)


def test_each_damaged_one_is_passed_over_for_the_one_before(tmp_path):
    writer = Checkpointer(tmp_path, policy=CheckpointPolicy(keep_last=4))
    for step in range(1, 6):
        writer.save(payload(step), keep=step == 1)
    for name, step in (
        ("model.pkl", 4),
        ("model.previous.pkl", 3),
        ("recent_3.pkl", 2),
    ):
        cut(tmp_path / name)  # And with it what shares its bytes.
        assert writer.load()[0]["step"] == step
    cut(tmp_path / "recent_2.pkl")
    found, used = writer.load()
    assert found["step"] == 1 and used.name == "model_1.pkl"
    cut(used)
    with pytest.raises(CheckpointError, match="no usable checkpoint.*model.pkl"):
        writer.load()


def test_a_damaged_newest_does_not_push_out_the_good_one_before(tmp_path):
    writer = Checkpointer(tmp_path)
    for step in (1, 2):
        writer.save(payload(step), keep=False)
    cut(tmp_path / "model.pkl")
    again = Checkpointer(tmp_path)
    assert again.load()[0]["step"] == 1
    again.save(payload(3), keep=False)
    assert step_of(tmp_path / "model.previous.pkl") == 1
    again.save(payload(4), keep=False)
    assert step_of(tmp_path / "model.previous.pkl") == 3


@pytest.mark.parametrize("index", [None, "{", '{"newest": {"step": 99}}'])
def test_the_index_is_a_convenience(tmp_path, index):
    writer = Checkpointer(tmp_path)
    writer.save(payload(1), keep=True)
    path = tmp_path / "checkpoints.json"
    listed = json.loads(path.read_text())
    assert listed["newest"] == {"file": "model.pkl", "step": 1}
    assert [f["file"] for f in listed["files"]] == ["model.pkl", "model_1.pkl"]
    path.unlink()
    if index is not None:
        path.write_text(index)
    again = Checkpointer(tmp_path)
    assert again.load()[0]["step"] == 1
    again.save(payload(2), keep=False)
    assert json.loads(path.read_text())["newest"]["step"] == 2
    path.unlink()
    path.mkdir()  # Nor is it a failure if it cannot be written.
    again.save(payload(3), keep=False)
    assert again.load()[0]["step"] == 3 and again.failures == []


# --- In the background ----------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch):
    """Holds the renaming of files until it is set."""
    event, replace = threading.Event(), os.replace

    def wait(*args):
        assert event.wait(60)
        replace(*args)

    monkeypatch.setattr(os, "replace", wait)
    yield event
    event.set()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, gate):
    writer = Checkpointer(tmp_path)
    weights = np.ones(1000, np.float32)
    data = {"index": [1, 2]}
    writer.save(payload(1, w=weights, data=data), keep=False, wait=False)
    weights[:] = 2  # As the next step does.
    data["index"].append(3)
    assert not (tmp_path / "model.pkl").exists()
    gate.set()
    found, _ = writer.load()  # Waits for it.
    np.testing.assert_array_equal(found["w"], np.ones(1000))
    assert found["data"] == {"index": [1, 2]}
    assert not [t for t in threading.enumerate() if t.name == "retrax-writer"]


def test_device_arrays_may_be_used_up_by_the_next_step(tmp_path, gate):
    writer = Checkpointer(tmp_path)
    step = jax.jit(lambda x: jax.tree.map(lambda a: a + 1, x), donate_argnums=0)
    state = [jnp.zeros((300, 300)), jnp.zeros((3,), jnp.bfloat16), jnp.int32(0)]
    places = [x.unsafe_buffer_pointer() for x in state]
    for number in (1, 2, 3):
        gate.clear()
        state = step(state)
        shared = state[0]
        found = payload(number, w=state, again=shared)
        writer.save(found, keep=True, wait=False)
        del found, shared
        state = step(state)
        if number > 1:  # The copy lets go of them, so that they are written over.
            assert state[0].unsafe_buffer_pointer() in places
        gate.set()
        writer.wait()
        saved = storage.load(tmp_path / f"model_{number}.pkl")
        for got in saved["w"]:
            assert np.all(got == 2 * number - 1)
        assert saved["w"][1].dtype == jnp.bfloat16
        assert saved["again"] is saved["w"][0]


def test_the_next_save_waits_for_the_one_before(tmp_path):
    writer = Checkpointer(tmp_path)
    w = np.zeros(100_000, np.float32)
    for step in range(1, 21):
        w[:] = step
        writer.save(payload(step, w=w), keep=True, wait=False)
    writer.wait()
    for step in range(1, 21):
        assert set(storage.load(tmp_path / f"model_{step}.pkl")["w"]) == {step}


def test_a_payload_that_no_file_can_hold_is_told_at_once(tmp_path):
    with pytest.raises(TypeError, match="callbacks/x"):
        Checkpointer(tmp_path).save(
            payload(1, callbacks={"x": object()}), keep=False, wait=False
        )


@pytest.mark.parametrize(
    ("more", "wanted"),
    [({"key": jax.random.key(0)}, "more/key"), ({"a": [], 1: "b"}, None)],
    ids=["random key", "mixed keys"],
)
def test_odd_payloads_are_saved_or_told_by_path(tmp_path, more, wanted):
    writer = Checkpointer(tmp_path)
    if wanted:
        with pytest.raises(TypeError, match=wanted):
            writer.save(payload(1, more=more), keep=False, wait=False)
    else:
        writer.save(payload(1, more=more), keep=False, wait=False)
        assert writer.load()[0]["more"] == more


def test_a_payload_in_itself_is_told(tmp_path):
    loop = payload(1)
    loop["again"] = [loop]
    with pytest.raises(TypeError, match="contains itself"):
        Checkpointer(tmp_path).save(loop, keep=False, wait=False)


def test_a_policy_without_background_waits(tmp_path):
    writer = Checkpointer(tmp_path, policy=CheckpointPolicy(background=False))
    writer.save(payload(1), keep=False, wait=False)
    assert step_of(tmp_path / "model.pkl") == 1


def test_an_interpreter_that_exits_finishes_the_checkpoint(tmp_path):
    code = (
        "import sys, pathlib, numpy as np\n"
        "from retrax.trainer.checkpointer import Checkpointer\n"
        "writer = Checkpointer(pathlib.Path(sys.argv[1]))\n"
        "writer.acquire()\n"
        "state = {'kind': 'run', 'step': 1, 'history': {}, 'w': np.ones(3_000_000)}\n"
        "writer.save(state, False, wait=False)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, tmp_path], timeout=60)
    assert run.returncode == 0
    assert step_of(tmp_path / "model.pkl") == 1
    assert not (tmp_path / "run.lock").exists()


# --- Failures -------------------------------------------------------------------------


def test_what_cannot_be_written_is_told_at_once_and_at_the_end(tmp_path, monkeypatch):
    told = []
    policy = CheckpointPolicy(keep_every=2)
    writer = Checkpointer(tmp_path / "run", policy=policy, report=told.append)
    writer.save(payload(1), keep=False, wait=False)
    writer.wait()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    writer.save(payload(2), keep=True, wait=False)
    writer._writer.wait()
    assert writer.is_due(3) is False and len(told) == 2  # Told in passing.
    assert "model.pkl is not saved" in told[0] and "No space left" in told[0]
    assert "model_2.pkl" in told[1] and "disk space" in told[1]
    assert writer.settle() and writer.saved_step == 1
    assert step_of(tmp_path / "run" / "model.pkl") == 1
    monkeypatch.undo()
    writer.save(payload(3), keep=False, wait=False)
    assert writer.settle() is None and writer.saved_step == 3
    # The newest is there, but not that of step 2, which was to be kept.
    with pytest.raises(NotSaved, match="(?s)step 3.*model_2.pkl") as caught:
        writer.finish(3, "result")
    assert caught.value.result == "result" and "model.pkl:" not in str(caught.value)
    assert read_record(tmp_path / "run")["status"] == "done"


def test_a_removed_directory_is_made_again(tmp_path):
    folder = tmp_path / "run"
    writer = Checkpointer(folder, report=pytest.fail)
    writer.save(payload(1), keep=False, wait=False)
    writer.wait()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    writer.save(payload(2), keep=False, wait=False)
    writer.finish(2)
    assert step_of(folder / "model.pkl") == 2


def test_a_directory_that_became_a_file_is_told(tmp_path):
    told = []
    (tmp_path / "run").write_text("")
    writer = Checkpointer(tmp_path / "run", report=told.append)
    writer.save(payload(1), keep=False, wait=False)
    with pytest.raises(NotSaved, match="model.pkl"):
        writer.finish(1)
    assert len(told) == 1
    with pytest.raises(CheckpointError, match="cannot save"):
        writer.save(payload(1), keep=False)


# --- One run at a time ----------------------------------------------------------------

HOLDER = (
    "import sys, pathlib\n"
    "from retrax.trainer.run_lock import RunLock\n"
    "lock = RunLock(pathlib.Path(sys.argv[1]))\n"
    "lock.acquire()\n"
    "print('held', flush=True)\n"
    "sys.stdin.read()\n"
)


def holder(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    return process


def end(process):
    process.communicate("", timeout=60)


def test_a_second_run_is_refused_until_the_first_ends(tmp_path):
    process = holder(tmp_path)
    try:
        with pytest.raises(ConfigError) as refused:
            Checkpointer(tmp_path).acquire()
        for text in (str(tmp_path), str(process.pid), platform.node()):
            assert text in str(refused.value)
        Checkpointer(tmp_path, enabled=False).acquire()  # Writes no checkpoints.
    finally:
        end(process)
    assert not (tmp_path / "run.lock").exists()
    writer = Checkpointer(tmp_path)
    writer.acquire()
    owner = json.loads((tmp_path / "run.lock").read_text())
    assert owner["pid"] == os.getpid()
    writer.close()
    assert not (tmp_path / "run.lock").exists()


def test_the_lock_of_a_dead_run_is_taken_over(tmp_path):
    process = holder(tmp_path)
    process.kill()
    process.communicate()
    assert (tmp_path / "run.lock").exists()
    writer = Checkpointer(tmp_path)
    writer.acquire()
    writer.close()


def write_lock(folder, **owner):
    (folder / "run.lock").write_text(json.dumps({"since": "today", **owner}))


def test_whose_process_number_was_given_to_another_is_dead(tmp_path):
    parent = psutil.Process(os.getppid())
    owner = {"pid": parent.pid, "host": platform.node()}
    write_lock(tmp_path, **owner, started=parent.create_time())
    with pytest.raises(ConfigError, match="in use"):
        Checkpointer(tmp_path).acquire()
    write_lock(tmp_path, **owner, started=parent.create_time() - 1000)
    writer = Checkpointer(tmp_path)
    writer.acquire()
    writer.close()


def test_a_lock_of_another_host_says_what_to_do(tmp_path):
    write_lock(tmp_path, pid=2**30, host="elsewhere", started=1.0)
    with pytest.raises(ConfigError, match="'elsewhere'.*delete .*run.lock"):
        Checkpointer(tmp_path).acquire()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}'])
def test_a_lock_that_names_nobody_holds_nothing(tmp_path, text):
    (tmp_path / "run.lock").write_text(text)
    writer = Checkpointer(tmp_path)
    writer.acquire()
    writer.close()


def test_the_same_process_may_begin_again(tmp_path):
    first, second = Checkpointer(tmp_path), Checkpointer(tmp_path)
    first.acquire()
    second.acquire()
    first.close()  # Not its any more.
    assert (tmp_path / "run.lock").exists()
    second.close()
    assert not (tmp_path / "run.lock").exists()

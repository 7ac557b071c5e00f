"""A checkpoint is whole at every moment, and says what is wrong when it is not."""

import hashlib
import logging
import os
import pickle
import random
import resource
import select
import signal
import subprocess
import sys
import textwrap
from collections import OrderedDict, namedtuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from retrax.storage import atomic, checkpoint
from retrax.storage.checkpoint import CheckpointDamaged, CheckpointError

DTYPES = [
    *(np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64),
    *(np.uint64, np.float16, np.float32, np.float64, np.complex64, np.complex128),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    *(ml_dtypes.float8_e4m3b11fnuz, ml_dtypes.int4, ml_dtypes.uint4),
]
SHAPES = [(), (1,), (1, 1), (0, 3), (2, 3)]


def files_in(folder):
    return sorted(os.listdir(folder))


def assert_same_bits(got, want):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_arrays_and_scalars_keep_their_bits(tmp_path, dtype):
    rng = np.random.default_rng(0)
    arrays = {
        shape: np.asarray(rng.integers(0, 2, shape)).astype(dtype) for shape in SHAPES
    }
    arrays[1] = arrays[2, 3].T
    arrays[2] = np.asarray(rng.integers(0, 2, 9)).astype(dtype)[::-2]
    path = tmp_path / "model.pkl"
    checkpoint.save(path, {"arrays": arrays, "scalar": np.dtype(dtype).type(1)})
    loaded = checkpoint.load(path)
    assert list(loaded["arrays"]) == list(arrays)
    for key, array in arrays.items():
        assert_same_bits(loaded["arrays"][key], array)
        assert loaded["arrays"][key].flags.writeable
    assert type(loaded["scalar"]) is np.dtype(dtype).type
    assert loaded["scalar"] == np.dtype(dtype).type(1)


def test_nan_payloads_and_byte_orders_survive(tmp_path):
    odd = np.array([0x7FC00001, 0xFF800001, 0x80000000], np.uint32).view(np.float32)
    payload = {
        "nan": odd,
        "nan scalar": odd[1],
        "big": np.array([1, 2], ">f8"),
        "text": np.array(["ab", "c"]),
        "bytes": np.array([b"ab", b"c"]),
        "date": np.array("2020-02-01", "M8[ns]"),
        "str": np.str_("ab"),
    }
    path = tmp_path / "model.pkl"
    checkpoint.save(path, payload)
    loaded = checkpoint.load(path)
    for key, value in payload.items():
        assert_same_bits(loaded[key], value)


def test_containers_keep_types_keys_and_sharing(tmp_path):
    shared = np.ones(2)
    payload = {
        "none": None,
        "flags": (True, False),
        "int": 2**100,
        "float": float("inf"),
        "text": "é\ud800",
        "bytes": b"\x00\xff",
        "nested": [(), [], {}, ({"a": [1]},)],
        3: "int key",
        ("a", (1, "b")): "tuple key",
        "tied": [shared, (shared,)],
    }
    path = tmp_path / "new" / "folder" / "model.pkl"
    checkpoint.save(path, payload)
    loaded = checkpoint.load(path)
    tied = loaded.pop("tied")
    payload.pop("tied")
    assert loaded == payload
    assert type(loaded["flags"][0]) is bool
    assert tied[0] is tied[1][0]


def test_jax_arrays_become_writable_numpy(tmp_path):
    path = tmp_path / "model.pkl"
    checkpoint.save(path, {"w": jnp.ones((2,), jnp.bfloat16), "s": jnp.int32(3)})
    loaded = checkpoint.load(path)
    assert_same_bits(loaded["w"], np.ones(2, ml_dtypes.bfloat16))
    assert_same_bits(loaded["s"], np.asarray(3, np.int32))
    loaded["w"][0] = 2
    assert loaded["w"][0] == 2


def test_a_plain_pickle_reads_the_file(tmp_path):
    path = tmp_path / "model.pkl"
    payload = {"w": np.arange(3.0), "b": np.ones((1, 2), ml_dtypes.bfloat16)}
    checkpoint.save(path, payload)
    with open(path, "rb") as file:
        header, got = pickle.load(file), pickle.load(file)
        assert file.read() == b""
    assert header["format"] == "retrax"
    assert header["version"] == 1
    body = path.read_bytes()[-header["length"] :]
    assert header["sha256"] == hashlib.sha256(body).hexdigest()
    assert_same_bits(got["w"], payload["w"])
    assert_same_bits(got["b"], payload["b"])


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        object(),
        print,
        {1, 2},
        1j,
        OrderedDict(),
        Point(1, 2),
        np.array([None, 1]),
        np.zeros(2, [("a", "f4")]),
        np.ma.masked_array([1, 2], [True, False]),
        jax.random.key(0),
        np.datetime64("2020"),
        {None: 1},
        {1.5: 1},
        np.float32,
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_raise_with_their_path(tmp_path, value):
    path = tmp_path / "model.pkl"
    payload = {"opt_state": {"slots": [0, 1, 2, value]}}
    with pytest.raises(TypeError, match="opt_state/slots/3"):
        checkpoint.save(path, payload)
    assert files_in(tmp_path) == []


def test_a_payload_in_itself_and_a_bare_list_raise(tmp_path):
    payload = {"a": []}
    payload["a"].append(payload)
    with pytest.raises(TypeError, match="a/0 contains itself"):
        checkpoint.save(tmp_path / "model.pkl", payload)
    with pytest.raises(TypeError, match="list"):
        checkpoint.save(tmp_path / "model.pkl", [1])  # type: ignore[arg-type]
    deep = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(TypeError, match="nested deeper"):
        checkpoint.save(tmp_path / "model.pkl", {"deep": deep})


def test_the_file_before_is_kept(tmp_path):
    path = tmp_path / "model.pkl"
    for step in (1, 2, 3):
        checkpoint.save(path, {"step": step})
    assert files_in(tmp_path) == ["model.pkl", "model.previous.pkl"]
    assert checkpoint.load(path) == {"step": 3}
    assert checkpoint.load(tmp_path / "model.previous.pkl") == {"step": 2}
    other = tmp_path / "lowest.pkl"
    for step in (1, 2):
        checkpoint.save(other, {"step": step}, keep_previous=False)
    assert not atomic.previous_path(other).exists()


def test_the_file_before_is_kept_without_hard_links(tmp_path, monkeypatch):
    def no_links(*args, **kwargs):
        raise OSError(1, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "model.pkl"
    checkpoint.save(path, {"step": 1})
    checkpoint.save(path, {"step": 2})
    assert checkpoint.load(path) == {"step": 2}
    assert checkpoint.load(tmp_path / "model.previous.pkl") == {"step": 1}


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "empty":
        data = b""
    elif how == "cut in the header":
        data = data[:100]
    elif how == "cut short":
        data = data[:-1]
    elif how == "one bit":
        data[-20] ^= 1
    elif how == "longer":
        data += b"x"
    elif how == "zeros":
        data = bytes(len(data))
    elif how == "text":
        data = b"not a pickle at all"
    elif how == "gzip":
        data = b"\x1f\x8b" + bytes(data)
    elif how == "another pickle":
        data = pickle.dumps({"step": 1})
    path.write_bytes(data)


DAMAGES = {
    "empty": "empty",
    "cut in the header": "does not start as",
    "cut short": "cut short",
    "one bit": "altered",
    "longer": "extra bytes",
    "zeros": "does not start as",
    "text": "does not start as",
    "gzip": "gzip",
    "another pickle": "no header",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_is_told_and_the_file_before_is_used(tmp_path, how, caplog):
    path = tmp_path / "model.pkl"
    checkpoint.save(path, {"step": 1, "w": np.ones(50)})
    checkpoint.save(path, {"step": 2, "w": np.ones(50)})
    damage(path, how)
    with pytest.raises(CheckpointDamaged, match=DAMAGES[how]) as caught:
        checkpoint.load(path)
    assert str(path) in str(caught.value)
    with caplog.at_level(logging.ERROR):
        payload, used = checkpoint.load_newest(path)
    assert payload["step"] == 1
    assert used == tmp_path / "model.previous.pkl"
    assert "falling back" in caplog.text and DAMAGES[how] in caplog.text

    damage(used, "cut short")
    with pytest.raises(CheckpointDamaged) as caught:
        checkpoint.load_newest(path)
    assert DAMAGES[how] in str(caught.value) and "cut short" in str(caught.value)


def test_every_cut_and_every_bit_is_noticed(tmp_path):
    path = tmp_path / "model.pkl"
    payload = {"w": np.arange(5.0)}
    checkpoint.save(path, payload)
    data = path.read_bytes()
    for n in range(len(data)):
        path.write_bytes(data[:n])
        with pytest.raises(CheckpointDamaged):
            checkpoint.load(path)
    header_end = len(data) - pickle.loads(data)["length"]
    for n in range(header_end, len(data)):
        path.write_bytes(data[:n] + bytes([data[n] ^ 4]) + data[n + 1 :])
        with pytest.raises(CheckpointDamaged):
            checkpoint.load(path)


def test_a_newer_version_is_no_damage(tmp_path):
    path = tmp_path / "model.pkl"
    checkpoint.save(path, {"step": 1})
    checkpoint.save(path, {"step": 2})
    data = path.read_bytes()
    header = pickle.loads(data) | {"version": 2}
    path.write_bytes(pickle.dumps(header) + data[-header["length"] :])
    with pytest.raises(CheckpointError, match="version 2.*newer retrax"):
        checkpoint.load(path)
    with pytest.raises(CheckpointError, match="version 2"):
        checkpoint.load_newest(path)


def test_missing_files(tmp_path, caplog):
    path = tmp_path / "model.pkl"
    assert not checkpoint.exists(path)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        checkpoint.load_newest(path)
    checkpoint.save(tmp_path / "other.pkl", {})
    with pytest.raises(FileNotFoundError, match=r"other\.pkl"):
        checkpoint.load(path)
    checkpoint.save(path, {"step": 1})
    checkpoint.save(path, {"step": 2})
    path.unlink()
    assert checkpoint.exists(path)
    with caplog.at_level(logging.ERROR):
        assert checkpoint.load_newest(path)[0] == {"step": 1}
    assert "is missing" in caplog.text


def test_a_directory_in_the_way(tmp_path):
    path = tmp_path / "model.pkl"
    path.mkdir()
    with pytest.raises(CheckpointError, match="directory") as caught:
        checkpoint.save(path, {"w": np.zeros(1000)})
    assert str(path) in str(caught.value) and "80" in str(caught.value)
    assert files_in(tmp_path) == ["model.pkl"]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError):
        checkpoint.save(tmp_path / "file" / "model.pkl", {})


def test_a_full_disk_changes_nothing(tmp_path):
    """A limit on the size of files stands for the full disk."""
    path = tmp_path / "model.pkl"
    checkpoint.save(path, {"step": 1})
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot save.*8000") as caught:
            checkpoint.save(path, {"step": 2, "w": np.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert isinstance(caught.value.__cause__, OSError)
    assert files_in(tmp_path) == ["model.pkl"]
    assert checkpoint.load(path) == {"step": 1}


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_errors_of_the_last_calls_change_nothing(tmp_path, monkeypatch, name):
    path = tmp_path / "model.pkl"
    checkpoint.save(path, {"step": 1})

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(CheckpointError, match="No space left.*disk space"):
        checkpoint.save(path, {"step": 2})
    monkeypatch.undo()
    assert files_in(tmp_path) == ["model.pkl"]
    assert checkpoint.load(path) == {"step": 1}


def test_leftovers_of_dead_processes_are_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    path = tmp_path / "model.pkl"
    host = atomic._HOST

    def leftover(name, pid, host=host):
        file = tmp_path / f".{name}.{host}.{pid}.0.tmp"
        file.write_text("x")
        return file.name

    gone = [leftover("model.pkl", dead.pid), leftover("model.pkl", os.getpid())]
    kept = [
        leftover("model.pkl", os.getppid()),
        leftover("other.pkl", dead.pid),
        leftover("model.pkl", dead.pid, host="another-host"),
    ]
    checkpoint.save(path, {})
    left = files_in(tmp_path)
    assert not set(gone) & set(left)
    assert set(kept) <= set(left)


def test_saving_makes_no_second_copy_in_memory(tmp_path):
    """Memory grows by about one array, not by the whole state."""
    script = """
        import resource, sys
        import numpy as np
        from retrax.storage import checkpoint
        payload = {i: np.ones(1_000_000) for i in range(12)}
        checkpoint.save(sys.argv[1], {"warm": np.ones(10)})
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        checkpoint.save(sys.argv[1], payload)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    growth = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path / "model.pkl"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(growth) * unit < 40_000_000  # The state has 96 MB.


SAVER = """
    import sys
    import numpy as np
    from retrax.storage import checkpoint
    version = int(sys.argv[2])
    while True:
        version += 1
        n = 1000 * (version % 7 + 1)
        payload = {"version": version, "w": [np.full(n, version, "u4")] * 3}
        payload["w"] = [array + i for i, array in enumerate(payload["w"])]
        checkpoint.save(sys.argv[1], payload)
        print(version, flush=True)
"""


def test_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    path = tmp_path / "model.pkl"
    rng = random.Random(0)
    version = 0
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SAVER), path, str(version)],
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        reported = b""
        while reported.count(b"\n") < 3:  # It is under way.
            chunk = os.read(process.stdout.fileno(), 4096)
            assert chunk, "the saver ended by itself"
            reported += chunk
        # A moment that is no multiple of anything in the saver.
        select.select([], [], [], rng.uniform(0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        reported += process.stdout.read()
        process.stdout.close()
        process.wait(timeout=10)
        finished = int(reported[: reported.rfind(b"\n")].split()[-1])
        payload, used = checkpoint.load_newest(path)
        assert used == path
        version = payload["version"]
        assert finished <= version <= finished + 1
        for i, array in enumerate(payload["w"]):
            want = np.full(1000 * (version % 7 + 1), version + i, "u4")
            np.testing.assert_array_equal(array, want)
        previous = checkpoint.load(checkpoint.previous_path(path))
        assert version - 2 <= previous["version"] < version
    checkpoint.save(path, {})
    assert files_in(tmp_path) == ["model.pkl", "model.previous.pkl"]

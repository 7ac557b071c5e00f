"""A hostile pickle with the right length and hash is refused, and nothing runs."""

import hashlib
import os
import pickle

import ml_dtypes
import numpy as np
import pytest

from retrax.storage import checkpoint


class Reduce:
    """Pickles as the call or state it was given."""

    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


def stack_global(module, name):
    """Pickle code that pushes module.name, also where Python would not write it."""
    return b"".join(
        b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)
    ) + (b"\x93")


def as_dict(code):
    """A pickle of {'x': <what `code` pushes>}."""
    return b"\x80\x05}\x8c\x01x" + code + b"s."


def write_file(path, body):
    digest = hashlib.sha256(body).hexdigest()
    path.write_bytes(checkpoint._header(digest, len(body)) + body)


def code_of(value):
    """The pickle code that pushes `value`, without PROTO, frame and STOP."""
    data = pickle.dumps(value, protocol=2)
    return data[2:-1]


def hostile_bodies(canary):
    command = f"touch {canary}"
    python = f"open({str(canary)!r}, 'w').close()"
    npy = str(canary) + ".npy"
    # The second loads an array file that would run the command by itself.
    np.save(npy, np.array([Reduce(os.system, (command,))], dtype=object))
    path_arg = code_of(npy)
    calls = {
        "os.system": Reduce(os.system, (command,)),
        "builtins.eval": Reduce(eval, (python,)),
        "builtins.exec": Reduce(exec, (python,)),
        "numpy.load": Reduce(np.load, (npy, None, True)),
        "numpy.fromfile": Reduce(np.fromfile, (npy,)),
        "builtins.open": Reduce(open, (str(canary), "w")),
    }
    bodies = {
        name: pickle.dumps({"x": value}, protocol=protocol)
        for protocol in (2, 5)
        for name, value in calls.items()
    }
    bodies["protocol 0"] = b"(dS'x'\ncos\nsystem\n(S'" + command.encode() + b"'\ntRs."
    bodies["INST"] = b"\x80\x02}U\x01x(" + code_of(command) + b"ios\nsystem\ns."
    getattr_chain = (
        stack_global("builtins", "getattr")
        + stack_global("ml_dtypes", "_finfo")
        + code_of("np")
        + b"\x86R"
    )
    bodies["getattr chain"] = as_dict(getattr_chain)
    for module, name in (
        ("ml_dtypes", "_finfo.np.load"),
        ("ml_dtypes", "np"),
        ("ml_dtypes", "finfo"),
        ("ml_dtypes", "bfloat16.__class__"),
        ("numpy", "ndarray.tofile"),
        ("numpy", "os.system"),
        ("numpy._core.multiarray", "fromfile"),
        ("numpy.core.multiarray", "_reconstruct.__globals__"),
        ("retrax.storage.safe_pickle", "pickle.loads"),
        ("__main__", "__builtins__"),
    ):
        bodies[f"{module}.{name}"] = as_dict(
            stack_global(module, name) + path_arg + b"\x85R"
        )
    return bodies


def test_hostile_payloads_are_refused_and_nothing_runs(tmp_path):
    canary = tmp_path / "canary"
    for name, body in hostile_bodies(canary).items():
        path = tmp_path / "model.pkl"
        write_file(path, body)
        with pytest.raises(checkpoint.CheckpointError, match="refused"):
            checkpoint.load(path)
        assert not canary.exists(), name


def test_the_canary_dies_with_a_plain_pickle(tmp_path):
    """The payloads above do run where nothing guards, or the test shows nothing."""
    canary = tmp_path / "canary"
    bodies = hostile_bodies(canary)
    # numpy.load unpickles the object array, whose reduce runs the command.
    names = ("os.system", "builtins.eval", "builtins.exec", "numpy.load", "protocol 0")
    for name in names:
        pickle.loads(bodies[name])
        assert canary.exists(), name
        canary.unlink()


def test_refusal_names_what_was_wanted_and_the_file(tmp_path):
    path = tmp_path / "model.pkl"
    write_file(path, pickle.dumps({"x": Reduce(os.system, ("true",))}))
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.load(path)
    assert f"{os.system.__module__}.system" in str(caught.value)
    assert str(path) in str(caught.value)
    assert "plain containers and numpy arrays" in str(caught.value)


def test_hostile_header_is_refused(tmp_path):
    canary = tmp_path / "canary"
    path = tmp_path / "model.pkl"
    header = {"format": "retrax", "x": Reduce(os.system, (f"touch {canary}",))}
    path.write_bytes(pickle.dumps(header) + pickle.dumps({}))
    with pytest.raises(checkpoint.CheckpointError, match="system"):
        checkpoint.load(path)
    assert not canary.exists()


# BUILD (`b`) calls __setstate__ or sets attributes on whatever is on the stack.
STATE = code_of({"__call__": 1})
SLOT_STATE = b"N" + STATE + b"\x86"


@pytest.mark.parametrize("state", [STATE, SLOT_STATE], ids=["dict", "slots"])
@pytest.mark.parametrize(
    "target",
    [
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("ml_dtypes", "bfloat16"),
        ("numpy._core.multiarray", "_reconstruct"),
    ],
)
def test_nothing_in_the_table_can_be_changed_by_a_file(tmp_path, target, state):
    path = tmp_path / "model.pkl"
    write_file(path, as_dict(stack_global(*target) + state + b"b"))
    with pytest.raises(checkpoint.CheckpointError, match="refused"):
        checkpoint.load(path)
    checkpoint.save(path, {"x": np.ones(2, ml_dtypes.bfloat16)})
    assert checkpoint.load(path)["x"].dtype == ml_dtypes.bfloat16


def test_a_byte_order_set_in_one_file_does_not_reach_the_next(tmp_path):
    path = tmp_path / "model.pkl"
    swapped = np.array([1, 2], ">i4")
    write_file(path, pickle.dumps({"x": swapped}))
    np.testing.assert_array_equal(checkpoint.load(path)["x"], [1, 2])
    write_file(path, pickle.dumps({"x": swapped.astype("<i4")}))
    np.testing.assert_array_equal(checkpoint.load(path)["x"], [1, 2])


@pytest.mark.parametrize(
    "args",
    [
        ((4,), "<f8", bytearray(8)),
        ((-1,), "<f8", bytearray(8)),
        ((2**62, 4), "<f8", bytearray(0)),
        ((1,), "|O", bytearray(8)),
        ((1,), "f8,O", bytearray(16)),
        ((1,), "(2,)f8", bytearray(16)),
        ((1.0,), "<f8", bytearray(8)),
        ((1,), "<f8", "12345678"),
        ((1,), "<f8", [1, 2]),
    ],
)
def test_arrays_that_do_not_add_up_are_refused(tmp_path, args):
    path = tmp_path / "model.pkl"
    write_file(path, pickle.dumps({"x": Reduce(np.ndarray, args)}, protocol=5))
    with pytest.raises(checkpoint.CheckpointError, match="refused"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    "value",
    [
        {1},
        frozenset(),
        1j,
        bytearray(b"x"),
        np.array([None]),
        np.zeros(2, [("a", "f4")]),
        np.dtype("f4"),
        np.ndarray,
    ],
    ids=str,
)
def test_other_plain_values_are_refused_too(tmp_path, value):
    path = tmp_path / "model.pkl"
    write_file(path, pickle.dumps({"x": value}))
    with pytest.raises(checkpoint.CheckpointError, match="refused"):
        checkpoint.load(path)


def test_a_list_in_itself_is_refused(tmp_path):
    loop = []
    loop.append(loop)
    path = tmp_path / "model.pkl"
    write_file(path, pickle.dumps({"x": loop}))
    with pytest.raises(checkpoint.CheckpointError, match="refused"):
        checkpoint.load(path)


def test_shared_containers_are_visited_once(tmp_path):
    nested = [1]
    for _ in range(100):  # 2**100 paths
        nested = [nested, nested]
    path = tmp_path / "model.pkl"
    checkpoint.save(path, {"x": nested})
    x = checkpoint.load(path)["x"]
    assert x[0] is x[1]


@pytest.mark.parametrize("spelling", ["numpy._core", "numpy.core"])
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_pickles_that_numpy_wrote_are_read(tmp_path, spelling, protocol):
    values = {
        "c": np.arange(6, dtype=np.float32).reshape(2, 3),
        "f": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "strided": np.arange(10)[::3],
        "big": np.array([1, 2], ">u2"),
        "bf16": np.array([1.5, -2], ml_dtypes.bfloat16),
        "scalar": np.float32(2.5),
        "tuple": (np.zeros((0, 3)), [np.bool_(True)]),
    }
    body = pickle.dumps(values, protocol=protocol)
    if protocol == 3:  # Later ones frame and count the names.
        body = body.replace(b"numpy._core.", spelling.encode() + b".")
    path = tmp_path / "model.pkl"
    write_file(path, body)
    loaded = checkpoint.load(path)
    for name in ("c", "f", "strided", "big", "bf16", "scalar"):
        np.testing.assert_array_equal(loaded[name], values[name])
        assert loaded[name].dtype == values[name].dtype
    assert loaded["tuple"][0].shape == (0, 3)
    assert loaded["tuple"][1][0] == np.bool_(True)

"""Loads hostile pickles, each with the right length and hash, and says what came of it.

Usage: hostile_pickles.py FOLDER; prints one JSON line: name -> [error, seconds, growth
of memory in MB]. The process is given little memory, so that a claim of more is seen.
"""

import hashlib
import json
import os
import pickle
import pickletools
import resource
import struct
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from retrax.errors import CheckpointError
from retrax.storage import checkpoint

HUGE = 2**40
PROTO, STOP, MARK, REDUCE, BUILD = b"\x80\x05", b".", b"(", b"R", b"b"
MEMOIZE, EMPTY_DICT, EMPTY_LIST, SETITEM = b"\x94", b"}", b"]", b"s"


def text(value):
    data = value.encode()
    return b"\x8c" + bytes([len(data)]) + data


def number(value):
    return b"J" + struct.pack("<i", value)


def found(module, name):
    return text(module) + text(name) + b"\x93"


def called(function, *arguments):
    return function + MARK + b"".join(arguments) + b"t" + REDUCE


def whole(code):
    """A pickle of {'x': value}, as a checkpoint has them."""
    return PROTO + EMPTY_DICT + text("x") + code + SETITEM + STOP


def doubled(times, tuple_code=b"\x86"):
    """A tuple of two that are the same, nested; 2**times leaves, each written once."""
    once = text("a") + MEMOIZE
    for i in range(times):
        once += b"h" + bytes([i]) + tuple_code + MEMOIZE
    return once


class Hostile:
    """What a file says to do if anything runs it."""

    def __init__(self, canary):
        self.command = text(f"touch {canary}")
        self.python = text(f"open({str(canary)!r}, 'w').close()")
        self.canary = text(str(canary))
        self.system = called(found("os", "system"), self.command)

    def imports(self):
        """Calls of functions that would do something."""
        array = found("numpy", "ndarray")
        yield "os.system", self.system
        yield "posix.system", called(found("posix", "system"), self.command)
        words = EMPTY_LIST + MARK + text("touch") + self.canary + b"e"
        yield "subprocess", called(found("subprocess", "call"), words)
        for name in ("eval", "exec", "compile", "__import__", "open", "getattr"):
            yield f"builtins.{name}", called(found("builtins", name), self.python)
        yield "numpy.load", called(found("numpy", "load"), self.canary, b"N", b"\x88")
        for name in (
            "_core.multiarray.fromfile",
            "lib.npyio.load",
            "ctypeslib.load_library",
        ):
            module, _, function = f"numpy.{name}".rpartition(".")
            yield f"numpy.{name}", called(found(module, function), self.canary)
        yield "numpy.f2py", called(found("numpy.f2py", "compile"), self.python)
        yield "attribute path", called(found("numpy", "os.system"), self.command)
        yield "method", called(found("numpy", "ndarray.tofile"), self.canary)
        yield (
            "globals",
            called(
                found("numpy._core.multiarray", "_reconstruct.__globals__"), self.canary
            ),
        )
        yield (
            "pickle in pickle",
            called(found("pickle", "loads"), b"C" + bytes([30]) + bytes(30)),
        )
        yield (
            "own code",
            called(found("retrax.storage.checkpoint", "save"), self.canary),
        )
        yield "text protocol", MARK + b"cos\nsystem\n" + self.command + b"tR"
        yield "line global", b"cposix\nsystem\n" + MARK + self.command + b"tR"
        yield "long line", b"c" + b"a" * 100_000 + b"\nsystem\n" + b")R"
        yield "INST", MARK + self.command + b"ios\nsystem\n"
        yield "OBJ", MARK + found("os", "system") + self.command + b"o"
        yield "NEWOBJ", found("os", "system") + self.command + b"\x85\x81"
        yield "NEWOBJ_EX", found("os", "system") + self.command + b"\x85}\x92"
        yield "persistent id", text("a") + b"Q"
        yield "nested persistent id", b"]" + self.system + b"Qa"
        yield "text persistent id", b"Pabc\n"
        for code in (b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00"):
            yield f"extension {len(code) - 1}", code
        yield "buffer outside", b"\x97"
        yield "class in a list", EMPTY_LIST + found("os", "system") + b"a"
        yield (
            "state of a function",
            array + EMPTY_DICT + text("__call__") + b"Ns" + BUILD,
        )
        yield "state of a dict", EMPTY_DICT + EMPTY_DICT + text("x") + b"Ns" + BUILD
        yield "state with slots", array + b"N" + EMPTY_DICT + b"\x86" + BUILD
        yield "call of text", called(text("os.system"), self.command)
        yield "call without a tuple", found("numpy", "ndarray") + self.command + REDUCE
        yield "named by a list", EMPTY_LIST + text("system") + b"\x93"

    def arrays(self):
        """Arrays that do more than hold numbers."""
        array, nothing = found("numpy", "ndarray"), b"\x96" + bytes(8)
        objects = np.array([Reduce(self.command)], dtype=object)
        yield "object array", pickle.dumps(objects, protocol=4)[2:-1]
        yield "object dtype", called(array, number(1) + b"\x85", text("|O"), eight())
        yield (
            "fields of objects",
            called(array, number(1) + b"\x85", text("f4,O"), eight()),
        )
        yield (
            "aligned dtype",
            called(found("numpy", "dtype"), text("O8"), b"\x88", b"\x88"),
        )
        yield "recursive dtype", called(found("numpy", "dtype"), doubled(60))
        state = number(3) + text("|") + doubled(60) + b"N" * 5
        dtype = called(found("numpy", "dtype"), text("f4"))
        yield "state of a dtype", dtype + MARK + state + b"t" + BUILD
        shape = (b"\x8a\x08" + struct.pack("<q", HUGE)) * 2 + b"\x86"
        yield "huge shape", called(array, shape, text("f8"), nothing)
        yield "huge shape of nothing", called(array, shape, text("V0"), nothing)
        yield (
            "many dimensions",
            called(array, MARK + number(1) * 5000 + b"t", text("f8"), eight()),
        )
        yield "negative shape", called(array, number(-1) + b"\x85", text("f8"), nothing)
        yield "shape of shapes", called(array, doubled(60), text("f8"), nothing)
        yield "unlike length", called(array, number(9) + b"\x85", text("f8"), eight())
        data = b"B" + struct.pack("<I", 2**20) + bytes(2**20) + MEMOIZE
        copies = EMPTY_LIST + data + b"0"
        one = array + MARK + number(2**17) + b"\x85" + text("f8") + b"h\x00t" + REDUCE
        yield "one array 4,000 times", copies + (one + b"a") * 4000

    def claims(self):
        """Claims of much, and structures that cost much."""
        for name, code, form in (
            *(
                ("bytes", b"\x8e", "<Q"),
                ("text", b"\x8d", "<Q"),
                ("frame", b"\x95", "<Q"),
            ),
            *(
                ("bytearray", b"\x96", "<Q"),
                ("int", b"\x8b", "<i"),
                ("short", b"B", "<I"),
            ),
        ):
            size = HUGE if form == "<Q" else 2**31 - 1
            yield f"claim of {name}", code + struct.pack(form, size) + b"abc"
        yield "negative int", b"\x8b" + struct.pack("<i", -5) + b"abc"
        yield "memo number", b"N" + b"r" + struct.pack("<I", 2**32 - 1)
        yield "memo of nothing", b"j" + struct.pack("<I", 2**32 - 1)
        yield "key of tuples", EMPTY_DICT + doubled(60) + b"N" + SETITEM
        yield "wide key", EMPTY_DICT + MARK + number(1) * 100_000 + b"tNs"
        yield "deep lists", b"]" * 100_000 + b"a" * 99_999
        yield "deep tuples", b")" + b"\x85" * 100_000
        yield "deep dicts", (EMPTY_DICT + b"K\x01") * 50_000 + b"N" + SETITEM * 50_000
        yield "list in itself", EMPTY_LIST + MEMOIZE + b"h\x00a"
        yield "dict in itself", EMPTY_DICT + MEMOIZE + text("a") + b"h\x00" + SETITEM
        yield (
            "int of a million digits",
            (
                EMPTY_DICT
                + b"\x8b"
                + struct.pack("<i", 500_000)
                + b"\x7f" * 500_000
                + text("a")
                + b"\x86"
                + b"N"
                + SETITEM
                + found("os", "x")
                + b"0"
            ),
        )

    def stack(self):
        """Codes that leave the machine's stack in no order."""
        yield "pop of nothing", b"0" * 9
        yield "no mark", b"t"
        yield "mark as a value", MARK
        yield "mark in a list", EMPTY_LIST + MARK + b"a"
        yield "mark in the memo", MARK + MEMOIZE
        yield "key without value", EMPTY_DICT + MARK + text("a") + b"u"
        yield "append to text", text("a") + text("b") + b"a"
        yield "items of a list", EMPTY_LIST + text("b") + b"N" + SETITEM
        yield "add to a set", b"\x8f" + MARK + text("a") + b"\x90"
        yield "frozen set", MARK + text("a") + b"\x91"
        yield "two values", b"NN"
        yield "unknown code", b"\xff"
        yield "dup", text("a") + b"2"


class Reduce:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command[2:].decode(),)


def eight():
    return b"\x96" + struct.pack("<Q", 8) + bytes(8)


def bodies(canary):
    """Returns name -> pickle."""
    hostile = Hostile(canary)
    found_bodies = {
        name: whole(code)
        for kind in (hostile.imports, hostile.arrays, hostile.claims, hostile.stack)
        for name, code in kind()
    }
    return found_bodies | {
        "nothing": b"",
        "no end": PROTO + EMPTY_DICT,
        "only an end": PROTO + STOP,
        "protocol 0": pickletools.optimize(pickle.dumps({"a": 1}, protocol=0)),
        "protocol 77": b"\x80\x4d}.",
        "a list": PROTO + EMPTY_LIST + STOP,
        "set": pickle.dumps({"x": {1}}),
        "complex": pickle.dumps({"x": 1j}),
        "ellipsis": pickle.dumps({"x": ...}),
        "ml_dtypes function": whole(found("ml_dtypes", "finfo") + b")R"),
        "ml_dtypes class": whole(found("ml_dtypes", "bfloat16")),
    }


def memory_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main():
    folder = Path(sys.argv[1])
    path, canary = folder / "model.pkl", folder / "canary"
    checkpoint.save(path, {"x": np.ones(3, ml_dtypes.bfloat16)})
    checkpoint.load(path)
    limit = 2 << 30  # bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    results = {}
    for name, body in bodies(canary).items():
        digest = hashlib.sha256(body).hexdigest()
        path.write_bytes(checkpoint._header(digest, len(body)) + body)
        before, start = memory_mb(), time.process_time()
        try:
            loaded = checkpoint.load(path)
            error = f"loaded: {str(loaded)[:100]}"
        except CheckpointError as e:
            error = f"refused: {e}" if str(path) in str(e) else f"not named: {e}"
        except BaseException as e:
            error = f"raised {type(e).__name__}: {e}"
        if canary.exists():
            error = "it ran"
            canary.unlink()
        taken = time.process_time() - start, memory_mb() - before
        results[name] = [error, round(taken[0], 3), round(taken[1], 1)]
    print(json.dumps(results))


if __name__ == "__main__":
    main()

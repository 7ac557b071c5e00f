"""The part of Python's pickle machine that plain values need, with a limit on all.

Python's own unpickler does what a file says before anyone can look: it takes memory
that a length in the file claims, makes room for a memo entry of any number, and hashes
whatever is used as a key. This one takes no more than the file has bytes for, and its
objects are containers, numbers, text, and what `find` and `call` of its user make.
`safe_pickle` stands on it; knows nothing but the opcodes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Any, BinaryIO

__all__ = ["Machine", "Refused"]

REFUSAL = "a checkpoint holds only plain containers and numpy arrays"
_MAX_KEY_PARTS = 1000  # Entries of a tuple that is a key, nested ones included.


class Refused(ValueError):
    """A pickle holds something that is no plain container and no numpy array."""


class _Mark:
    """Where a group of values begins on the stack."""


_MARK = _Mark()


class Machine:
    """Reads one pickle of protocol 2 to 5.

    Attributes:
      size: bytes in the file from where reading began.
    """

    def __init__(
        self,
        file: BinaryIO,
        find: Callable[[str, str], Any],
        call: Callable[[Any, tuple[Any, ...]], Any],
        build: Callable[[Any, Any], None],
    ) -> None:
        """Makes a machine for one file.

        Args:
          file: seekable, at the start of the pickle.
          find: gives what stands for module.name.
          call: what calling a found object with arguments gives.
          build: sets the state of an object; called for containers too.
        """
        self._file, self._find, self._call, self._build = file, find, call, build
        start = file.tell()
        self._end = file.seek(0, os.SEEK_END)
        file.seek(start)
        self.size = self._end - start
        self._stack: list[Any] = []
        self._memo: list[Any] = []

    def load(self) -> Any:
        """Returns the value; the file is left behind it.

        Raises:
          Refused: there is something in the file that no plain value needs.
          EOFError, ValueError, IndexError, KeyError, TypeError: it is no whole pickle.
        """
        read, stack, table = self._file.read, self._stack, _OPCODES
        while True:
            code = read(1)
            if code == b".":
                break
            operation = table.get(code)
            if operation is None:
                if not code:
                    raise EOFError("the pickle ends without its end mark")
                raise Refused(f"the pickle opcode {code!r}: {REFUSAL}")
            operation(self)
        if len(stack) != 1:
            raise ValueError(f"{len(stack)} values at the end of the pickle")
        return stack.pop()

    # --- Reading ------------------------------------------------------------------

    def take(self, n: int) -> bytes:
        """Returns the next n bytes; takes no memory if the file has fewer."""
        self._check(n)
        data = self._file.read(n)
        if len(data) != n:
            raise EOFError(f"{n} bytes are claimed, and the file ends before")
        return data

    def number(self, form: str) -> int:
        """Returns the next little-endian number."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def _check(self, n: int) -> None:
        # Small claims are not worth asking the file where it is.
        if n < 0 or (n > 4096 and n > self._end - self._file.tell()):
            raise EOFError(f"{n} bytes are claimed, and the file has fewer")

    def push_bytearray(self) -> None:
        n = self.number("<Q")
        self._check(n)
        data = bytearray(n)
        if self._file.readinto(data) != n:  # type: ignore[attr-defined]
            raise EOFError(f"{n} bytes are claimed, and the file ends before")
        self._stack.append(data)

    def push_line_global(self) -> None:
        names = []
        for _ in range(2):
            line = self._file.readline(1000)
            if not line.endswith(b"\n"):
                raise Refused(f"a name of a thousand letters, or cut off: {REFUSAL}")
            names.append(line[:-1].decode())
        self._stack.append(self._find(names[0], names[1]))

    # --- The stack ----------------------------------------------------------------

    def group(self) -> list[Any]:
        """Takes the values above the last mark off the stack."""
        stack, items = self._stack, []
        while True:
            value = stack.pop()
            if value is _MARK:
                items.reverse()
                return items
            items.append(value)

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("a mark where a value is wanted")
        return value

    def top(self, kind: type) -> Any:
        value = self._stack[-1]
        if type(value) is not kind:
            raise Refused(
                f"a {type(value).__name__} filled like a {kind.__name__}: {REFUSAL}"
            )
        return value

    def push_tuple(self, n: int) -> None:
        items = [self.pop() for _ in range(n)]
        self._stack.append(tuple(reversed(items)))

    def set_items(self, items: list[Any]) -> None:
        target = self.top(dict)
        if len(items) % 2:
            raise ValueError("a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            _check_key(key)
            target[key] = value

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.set_items([key, value])

    # --- The memo -----------------------------------------------------------------

    def put(self, number: int) -> None:
        value = self._stack[-1]
        if value is _MARK:
            raise ValueError("a mark where a value is wanted")
        if number == len(self._memo):
            self._memo.append(value)
        elif number < len(self._memo):
            self._memo[number] = value
        else:  # Writers count up; another number would only take memory.
            raise Refused(f"memo entry {number} after {len(self._memo)}")

    def get(self, number: int) -> None:
        self._stack.append(self._memo[number])

    # --- Calls --------------------------------------------------------------------

    def stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        if type(name) is not str or type(module) is not str:
            raise Refused(f"a name that is no text: {REFUSAL}")
        self._stack.append(self._find(module, name))

    def reduce(self) -> None:
        arguments, function = self.pop(), self.pop()
        if type(arguments) is not tuple:
            raise Refused(f"a call with {type(arguments).__name__}: {REFUSAL}")
        self._stack.append(self._call(function, arguments))

    def build(self) -> None:
        state = self.pop()
        self._build(self._stack[-1], state)

    def check_protocol(self) -> None:
        protocol = self.number("<B")
        if not 2 <= protocol <= 5:
            raise Refused(f"pickle protocol {protocol}; 2 to 5 can be read")


def _check_key(key: Any) -> None:
    """Refuses, before it is hashed, what is no text, number or tuple of them."""
    left, open_parts = _MAX_KEY_PARTS, [key]
    while open_parts:
        part = open_parts.pop()
        left -= 1
        if type(part) is tuple and left > len(part):
            open_parts += part
        elif type(part) not in (str, int, bool) or left < 0:
            raise Refused(f"a key of type {type(part).__name__}, or a large one")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


_OPCODES: dict[bytes, Callable[[Machine], Any]] = {
    b"\x80": Machine.check_protocol,
    b"\x95": lambda m: m._check(m.number("<Q")),  # A frame says how far it reaches.
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"J": lambda m: m.push(m.number("<i")),
    b"K": lambda m: m.push(m.number("<B")),
    b"M": lambda m: m.push(m.number("<H")),
    b"\x8a": lambda m: m.push(_integer(m.take(m.number("<B")))),
    b"\x8b": lambda m: m.push(_integer(m.take(m.number("<i")))),
    b"G": lambda m: m.push(m.number(">d")),
    b"\x8c": lambda m: m.push(_text(m.take(m.number("<B")))),
    b"X": lambda m: m.push(_text(m.take(m.number("<I")))),
    b"\x8d": lambda m: m.push(_text(m.take(m.number("<Q")))),
    b"C": lambda m: m.push(m.take(m.number("<B"))),
    b"B": lambda m: m.push(m.take(m.number("<I"))),
    b"\x8e": lambda m: m.push(m.take(m.number("<Q"))),
    b"\x96": Machine.push_bytearray,
    b"]": lambda m: m.push([]),
    b"}": lambda m: m.push({}),
    b")": lambda m: m.push(()),
    b"(": lambda m: m.push(_MARK),
    b"0": Machine.pop,
    b"1": Machine.group,
    b"t": lambda m: m.push(tuple(m.group())),
    b"\x85": lambda m: m.push_tuple(1),
    b"\x86": lambda m: m.push_tuple(2),
    b"\x87": lambda m: m.push_tuple(3),
    b"a": lambda m: (lambda value: m.top(list).append(value))(m.pop()),
    b"e": lambda m: (lambda values: m.top(list).extend(values))(m.group()),
    b"s": Machine.set_item,
    b"u": lambda m: m.set_items(m.group()),
    b"q": lambda m: m.put(m.number("<B")),
    b"r": lambda m: m.put(m.number("<I")),
    b"\x94": lambda m: m.put(len(m._memo)),
    b"h": lambda m: m.get(m.number("<B")),
    b"j": lambda m: m.get(m.number("<I")),
    b"c": Machine.push_line_global,
    b"\x93": Machine.stack_global,
    b"R": Machine.reduce,
    b"b": Machine.build,
}

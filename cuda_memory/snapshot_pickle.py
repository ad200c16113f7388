"""Read a pickle of plain values without trusting it.

`torch.cuda.memory._dump_snapshot` writes dictionaries, lists, tuples, numbers and strings. Python's `pickle` builds
much else, and even with `find_class` refused a small file makes it reserve gigabytes (BINBYTES8 and BYTEARRAY8 allocate
the length they announce, LONG_BINPUT an array up to its index). This reader executes only the opcodes that PyTorch's
snapshots consist of: those of Python's pickler at protocols 2 to 5 and of PyTorch's own in C++. All others are refused.

No opcode calls, imports or copies anything, nothing allocates by a length that the file announces, and nothing here
recurses. So memory and time are linear in the file, up to the limits below: at most about 4 GiB and half a minute.
"""

import struct
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

from cuda_memory.errors import UserError
from cuda_memory.units import GIB, MIB, readable_size

MAX_FILE_BYTES = GIB
MAX_OPCODES = 30_000_000
"""Besides references. An event takes about 12."""
MAX_REFERENCES = 100_000_000
"""To values that were read before. An event has one for each key and each frame."""
MAX_TEXT_BYTES = 64 * MIB
"""Of all strings together."""
MAX_STRING_BYTES = 65_536
MAX_OPEN_CONTAINERS = 100
MAX_INTEGER_BYTES = 9
"""64 bits without a sign."""
LOWEST_PROTOCOL, HIGHEST_PROTOCOL = 2, 5
STOP = 0x2E
BINGET, LONG_BINGET = 0x68, 0x6A
UINT8, UINT16, UINT32, UINT64 = map(struct.Struct, ("<B", "<H", "<I", "<Q"))
INT32, FLOAT64 = struct.Struct("<i"), struct.Struct(">d")


class Refused(Exception):
    """The bytes are no pickle of plain values, or exceed a limit."""


def read_plain_pickle(path: Path) -> Any:
    """Read a file that contains one pickle of dictionaries with string keys, lists, tuples, numbers and strings.

    Raises:
        UserError: it cannot be read, is no pickle, has other values, or exceeds a limit.
    """
    try:
        if not path.is_file():
            raise UserError(f"{path}: must be a file; name a snapshot of torch.cuda.memory._dump_snapshot")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name another file") from None
    if len(data) > MAX_FILE_BYTES:
        raise UserError(
            f"{path}: must have at most {readable_size(MAX_FILE_BYTES)}; record fewer events: max_entries of "
            "torch.cuda.memory._record_memory_history"
        )
    try:
        return load_plain(data)
    except Refused as error:
        raise UserError(
            f"{path}: {error}; only plain snapshots are read, as torch.cuda.memory._dump_snapshot writes them"
        ) from None


def load_plain(data: bytes) -> Any:
    """The value that a pickle describes.

    Raises:
        Refused: see there; the message names the byte.
    """
    return _Unpickler(data).load()


class _Unpickler:
    """A stack machine for the opcodes of plain values."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.open: list[list[Any]] = []
        """The stacks below each mark."""
        self.memo: list[Any] = []
        self.references = self.text_bytes = 0

    def load(self) -> Any:
        data, handlers = self.data, HANDLERS
        if len(data) < 2 or data[0] != 0x80:
            raise Refused("is no pickle of protocol 2 or higher")
        try:
            for _ in repeat(None, MAX_OPCODES):
                opcode = data[self.at]
                self.at += 1
                if opcode == STOP:
                    return self._result()
                handlers[opcode](self)
        except (IndexError, struct.error):
            raise Refused(f"ends early, or is damaged at byte {self.at}") from None
        raise self._refusal(f"has more than {MAX_OPCODES:,} values")

    def _refusal(self, reason: str) -> Refused:
        return Refused(f"{reason} (byte {self.at})")

    def _result(self) -> Any:
        if self.open or len(self.stack) != 1:
            raise self._refusal("is damaged: it ends inside a value")
        return self.stack[0]

    def _take(self, count: int) -> bytes:
        """The next `count` bytes."""
        start = self.at
        self.at += count
        if self.at > len(self.data):
            raise IndexError
        return self.data[start : self.at]

    def _number(self, layout: struct.Struct) -> int:
        """The next number."""
        (number,) = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return int(number)

    def refuse(self) -> None:
        code = self.data[self.at - 1]
        name = FORBIDDEN.get(code, "an opcode that plain values do not need")
        raise self._refusal(f"contains {name} (0x{code:02x})")

    def protocol(self) -> None:
        number = self._number(UINT8)
        if not LOWEST_PROTOCOL <= number <= HIGHEST_PROTOCOL:
            raise self._refusal(f"has pickle protocol {number}, not {LOWEST_PROTOCOL} to {HIGHEST_PROTOCOL}")

    def frame(self) -> None:
        if self._number(UINT64) > len(self.data) - self.at:
            raise IndexError

    def integer(self, layout: struct.Struct) -> None:
        self.stack.append(self._number(layout))

    def long(self) -> None:
        count = self._number(UINT8)
        if count > MAX_INTEGER_BYTES:
            raise self._refusal(f"has an integer of {count} bytes, more than {MAX_INTEGER_BYTES}")
        self.stack.append(int.from_bytes(self._take(count), "little", signed=True))

    def float(self) -> None:
        self.stack.append(FLOAT64.unpack(self._take(8))[0])

    def string(self, layout: struct.Struct) -> None:
        count = self._number(layout)
        self.text_bytes += count
        if count > MAX_STRING_BYTES or self.text_bytes > MAX_TEXT_BYTES:
            raise self._refusal(f"has a string of {count:,} bytes, or too many strings")
        self.stack.append(self._take(count).decode("utf-8", errors="replace"))

    def mark(self) -> None:
        if len(self.open) >= MAX_OPEN_CONTAINERS:
            raise self._refusal(f"is nested deeper than {MAX_OPEN_CONTAINERS} containers")
        self.open.append(self.stack)
        self.stack = []

    def _close(self) -> list[Any]:
        """The values since the last mark."""
        values, self.stack = self.stack, self.open.pop()
        return values

    def memoize(self) -> None:
        self.memo.append(self.stack[-1])

    def put(self, layout: struct.Struct) -> None:
        if self._number(layout) != len(self.memo):
            raise self._refusal("is damaged: its references are not numbered in order")
        self.memoize()

    def get(self) -> None:
        """Push a value that was read before, and all that follow it: most of a snapshot is frames seen before."""
        data, memo, at, values = self.data, self.memo, self.at - 1, []
        while True:
            code = data[at]
            if code == LONG_BINGET:
                values.append(memo[int.from_bytes(data[at + 1 : at + 5], "little")])
                at += 5
            elif code == BINGET:
                values.append(memo[data[at + 1]])
                at += 2
            else:
                break
            if len(values) > MAX_REFERENCES:
                break
        self.references += len(values)
        if self.references > MAX_REFERENCES:
            raise self._refusal(f"has more than {MAX_REFERENCES:,} references")
        self.at = at
        self.stack += values

    def constant(self, value: Any) -> None:
        self.stack.append(value)

    def empty_list(self) -> None:
        self.stack.append([])

    def empty_dict(self) -> None:
        self.stack.append({})

    def tuple_since_mark(self) -> None:
        values = tuple(self._close())
        self.stack.append(values)

    def small_tuple(self, count: int) -> None:
        values = [self.stack.pop() for _ in range(count)]
        self.stack.append(tuple(reversed(values)))

    def _extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise self._refusal("is damaged: it appends to what is no list")
        target += values

    def append(self) -> None:
        self._extend([self.stack.pop()])

    def appends(self) -> None:
        self._extend(self._close())

    def _update(self, values: list[Any]) -> None:
        """Keys must be strings: Python hashes only those with a random seed, so a file cannot make them collide."""
        target, keys = self.stack[-1], values[::2]
        if type(target) is not dict or len(values) % 2 or any(type(key) is not str for key in keys):
            raise self._refusal("has a dictionary with keys that are no strings, or is damaged")
        target.update(zip(keys, values[1::2], strict=True))

    def set_item(self) -> None:
        value = self.stack.pop()
        self._update([self.stack.pop(), value])

    def set_items(self) -> None:
        self._update(self._close())


FORBIDDEN = {
    **dict.fromkeys(b"ci\x93", "the name of a class or function"),
    **dict.fromkeys(b"Rob\x81\x92", "a call"),
    **dict.fromkeys(b"PQ", "a persistent id"),
    **dict.fromkeys(b"\x82\x83\x84", "a registered extension"),
    **dict.fromkeys(b"BCTU\x8e\x96\x97\x98", "bytes or a buffer"),
    0x8B: "an integer of any length",
    **dict.fromkeys(b"\x8f\x90\x91", "a set"),
    **dict.fromkeys(b"012", "a copy or removal of a value"),
}
"""What the commonest refused opcodes do."""
Handler = Callable[[_Unpickler], None]


def _handlers() -> list[Handler]:
    """What each opcode does, by its number."""
    machine = _Unpickler
    allowed: dict[int, Handler] = {
        0x80: machine.protocol,
        0x95: machine.frame,
        ord("K"): lambda m: m.integer(UINT8),
        ord("M"): lambda m: m.integer(UINT16),
        ord("J"): lambda m: m.integer(INT32),
        0x8A: machine.long,
        ord("G"): machine.float,
        0x8C: lambda m: m.string(UINT8),
        ord("X"): lambda m: m.string(UINT32),
        ord("("): machine.mark,
        0x94: machine.memoize,
        ord("q"): lambda m: m.put(UINT8),
        ord("r"): lambda m: m.put(UINT32),
        BINGET: machine.get,
        LONG_BINGET: machine.get,
        ord("N"): lambda m: m.constant(None),
        0x88: lambda m: m.constant(True),
        0x89: lambda m: m.constant(False),
        ord("]"): machine.empty_list,
        ord("}"): machine.empty_dict,
        ord(")"): lambda m: m.constant(()),
        ord("t"): machine.tuple_since_mark,
        0x85: lambda m: m.small_tuple(1),
        0x86: lambda m: m.small_tuple(2),
        0x87: lambda m: m.small_tuple(3),
        ord("a"): machine.append,
        ord("e"): machine.appends,
        ord("s"): machine.set_item,
        ord("u"): machine.set_items,
    }
    return [allowed.get(code, machine.refuse) for code in range(256)]


HANDLERS = _handlers()

"""Metrics as event files of TensorBoard: ``tensorboard --logdir RUN/tensorboard`` shows all cells.

The worker writes them beside the payload, from the metrics that are there anyway, so that every
program has them, in any image. Nothing is remembered elsewhere: each line of the metrics becomes
one record, so what the files of a cell hold says where to go on, whoever was killed in between.

Sources: the record format in tensorflow/core/lib/io/record_writer.h, the fields of an event in
tensorflow/core/util/event.proto and summary.proto.
"""

import errno
import glob
import json
import os
import re
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any, Optional

_PREFIX = "events.out.tfevents"
_STEPS = ("step", "total_steps")
_LONGEST_NAME = 120  # bytes
_READ_AT_ONCE = 1 << 20  # bytes of metrics: the worker has signals to hand on as well
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_START = 1  # of a session: what was known of its step and later ones no longer counts
_SUMMARY = 5  # the field of an event that a line of the metrics becomes


def folder_of(run_dir: str, cell: "dict[str, Any]", swept: Sequence[str]) -> str:
    """The folder of a cell's event files, which TensorBoard shows by its name.

    Args:
        run_dir: the run folder.
        cell: its index, and its parameters.
        swept: the parameters that tell the cells of the run from each other.
    """
    values = " ".join(f"{name}={cell['params'][name]}" for name in swept if name in cell["params"])
    name = re.sub(r"[^\w.=+,@ -]", "_", f"{cell['index']} {values}".strip())
    short = name.encode()[:_LONGEST_NAME].decode(errors="ignore").rstrip()
    return os.path.join(run_dir, "tensorboard", short)


def folders_of(run_dir: str, index: int) -> "list[str]":
    """The folders there are of a cell; more than one only if its parameters have changed."""
    place = glob.escape(os.path.join(run_dir, "tensorboard"))
    return glob.glob(f"{place}/{index}") + sorted(glob.glob(f"{place}/{index} *"))


class EventFile:
    """The event file of one attempt; it comes into being with the first metric.

    Args:
        folder: where the event files of the cell lie.
        metrics: the cell's ``metrics.jsonl``, which may not be there yet.
        attempt: its number.
    """

    def __init__(self, folder: str, metrics: str, attempt: int) -> None:
        self._folder = folder
        self._metrics = metrics
        self._attempt = attempt
        self._lines = sum(map(_lines_of, glob.glob(f"{glob.escape(folder)}/{_PREFIX}.*")))
        # What attempts before have reported, of which a kill may have kept some from the files.
        self._before = _count_lines(metrics)
        self._offset: Optional[int] = None
        self._file: Optional[int] = None

    def follow(self) -> bool:
        """Write down what the metrics have more; returns whether more may be there at once."""
        try:
            lines = self._new_lines()
        except FileNotFoundError:
            return False
        if not lines:
            return False
        records = []
        if self._file is None:
            self._file = self._begin()
            records.append(_file_version())
        for line in lines:
            if self._lines == self._before:
                records.append(_session_start(_step(line, self._lines)))
            records.append(_event(line, self._lines))
            self._lines += 1
        text = b"".join(map(_record, records))
        if os.write(self._file, text) != len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._folder)
        return True

    def close(self) -> None:
        """Write down the rest."""
        while self.follow():
            pass
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _new_lines(self) -> "list[bytes]":
        """The next complete lines of the metrics."""
        with open(self._metrics, "rb") as file:
            if self._offset is None:
                for _ in range(self._lines):
                    file.readline()
                self._offset = file.tell()
            file.seek(self._offset)
            text = file.read(_READ_AT_ONCE)
            if b"\n" not in text:  # a long one, or one that is being written
                text += file.readline()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.split(b"\n")[:-1]

    def _begin(self) -> int:
        os.makedirs(self._folder, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"{_PREFIX}.{int(time.time()):010d}.{self._attempt:04d}.{socket.gethostname()}"
        path = os.path.join(self._folder, name)
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def _lines_of(path: str) -> int:
    """How many lines of the metrics are in an event file, without what a crash cut off."""
    return sum(_is_line(record) for record in _records(path))


def _is_line(record: bytes) -> bool:
    """Whether an event comes from the metrics: what follows its time and its step says it."""
    place = 10  # behind the time, which has nine bytes, and the key of the step
    while record[place] & 0x80:
        place += 1
    return record[place + 1] == _SUMMARY << 3 | _BYTES


def _count_lines(path: str) -> int:
    try:
        with open(path, "rb") as file:
            return sum(line.endswith(b"\n") for line in file)
    except FileNotFoundError:
        return 0


def _records(path: str) -> "Iterator[bytes]":
    """The records of a file, up to the first that is not whole."""
    with open(path, "rb") as file:
        while True:
            head = file.read(12)
            if len(head) < 12 or _checksum(head[:8]) != head[8:]:
                return
            (length,) = struct.unpack("<Q", head[:8])
            body = file.read(length + 4)
            if len(body) < length + 4:
                return
            yield body[:-4]


# -- events ---------------------------------------------------------------------------------------


def _parsed(line: bytes) -> "dict[str, Any]":
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _step(line: bytes, number: int) -> int:
    """The step of a line; that of one that names none is its number."""
    step = _parsed(line).get("step")
    return step if isinstance(step, int) and abs(step) < 1 << 63 else number


def _event(line: bytes, number: int) -> bytes:
    values = b"".join(
        _field(1, _BYTES, _field(1, _BYTES, name.encode(errors="replace")) + _float(value))
        for name, value in _parsed(line).items()
        if name not in _STEPS and isinstance(value, (int, float))
    )
    return _timed(_step(line, number), _field(_SUMMARY, _BYTES, values))


def _file_version() -> bytes:
    return _timed(0, _field(3, _BYTES, b"brain.Event:2"))


def _session_start(step: int) -> bytes:
    return _timed(step, _field(7, _BYTES, _field(1, _VARINT, _START)))


def _timed(step: int, rest: bytes) -> bytes:
    return _field(1, _FIXED64, struct.pack("<d", time.time())) + _field(2, _VARINT, step) + rest


def _float(value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _field(2, _FIXED32, packed)


def _field(number: int, kind: int, value: "bytes | int") -> bytes:
    """A field of a protocol buffer: https://protobuf.dev/programming-guides/encoding/."""
    key = _varint(number << 3 | kind)
    if isinstance(value, int):
        return key + _varint(value)
    return key + (_varint(len(value)) if kind == _BYTES else b"") + value


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1  # as two's complement
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


# -- records --------------------------------------------------------------------------------------


def _record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + _checksum(length) + content + _checksum(content)


def _checksum(content: bytes) -> bytes:
    """CRC-32C (RFC 3720, appendix B.4), masked as the record format asks."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _row(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_TABLE = [_row(byte) for byte in range(256)]

"""TensorBoard's event files: records of protocol buffers, of which the scalars and hyperparameters are read.

The format: each record is its length (8 bytes), the masked CRC-32C of these, the data, and the masked CRC-32C of them
(TFRecord). The data are an `Event` of event.proto; what of it is read stands beside the numbers of its fields.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from cosmati.store.importing.imported import ImportedRun, measure_name, merged

EVENT_FILES = "*tfevents*"
_CHECKED_BYTES = 1 << 16
"""Of larger records, which hold images and graphs, only the length is checked: this is plain Python."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_TYPES = {1: "f", 2: "d", 3: "i", 9: "q"}
"""Of a tensor's numbers, by `DataType`: float, double, int32, int64."""
_HPARAMS_TAG = "_hparams_/session_start_info"
_Fields = dict[int, list[Any]]


def tensorboard_runs(source: Path, note: Callable[[str], None]) -> Iterator[ImportedRun]:
    """Yield the run of each folder with event files, or of one file."""
    files = [source] if source.is_file() else sorted(source.rglob(EVENT_FILES))
    for folder, group in groupby((one for one in files if one.is_file()), key=lambda one: one.parent):
        points, params, times = list[tuple[int, str, float]](), dict[str, Any](), list[float]()
        for path in group:
            for data in _records(path, note):
                try:
                    _take(_fields(data), points, params, times)
                except (ValueError, struct.error, UnicodeDecodeError, TypeError, IndexError) as error:
                    note(f"A record of {path} is left out: {error}.")
        name = folder.name if source.is_file() or folder == source else folder.relative_to(source).as_posix()
        yield ImportedRun(
            name=name,
            recipe_name=source.name if source.is_dir() else folder.name,
            lines=merged(points),
            params=params,
            started=min(times, default=None),
            ended=max(times, default=None),
        )


def _take(event: _Fields, points: list[tuple[int, str, float]], params: dict[str, Any], times: list[float]) -> None:
    """Take what an event says: 1 wall time, 2 step, 5 summary with 1 values, 7 session with 1 status (1 is its start).

    A start at a step takes back what came before from that step on, as TensorBoard has it.
    """
    (time,) = struct.unpack("<d", event.get(1, [bytes(8)])[-1])
    step = _signed(event.get(2, [0])[-1])
    if 7 in event and _fields(event[7][-1]).get(1, [0])[-1] == 1:
        points[:] = [point for point in points if point[0] < step]
    for value in _fields(event.get(5, [b""])[-1]).get(1, []):
        fields = _fields(value)  # 1 tag, 2 simple value, 8 tensor, 9 metadata
        tag = fields.get(1, [b""])[-1].decode()
        if tag == _HPARAMS_TAG:
            params.update(_hparams(fields))
            continue
        number = struct.unpack("<f", fields[2][-1])[0] if 2 in fields else _scalar(fields)
        if number is not None and tag:
            points.append((step, measure_name(tag), number))
            times.append(time)
            points.append((step, "seconds", max(time - times[0], 0.0)))


def _scalar(fields: _Fields) -> float | None:
    """Return the number of a tensor that is one: 1 type, 2 shape, 4 content, 5 floats, 6 doubles, 7 ints, 10 int64s."""
    if 8 not in fields:
        return None
    tensor = _fields(fields[8][-1])
    kind = _TYPES.get(tensor.get(1, [0])[-1])
    if kind is None:
        return None
    values = [one for one in tensor.get(4, []) if one]
    if not values:
        values = tensor.get({"f": 5, "d": 6, "i": 7, "q": 10}[kind], [])
        if kind in "iq":  # packed, or not
            values = [struct.pack("<Q", one if isinstance(one, int) else _varint(one, 0)[0]) for one in values]
            kind = "q"
    is_one = len(values) == 1 and len(values[0]) == struct.calcsize(kind)
    return float(struct.unpack(f"<{kind}", values[0])[0]) if is_one else None


def _hparams(fields: _Fields) -> dict[str, Any]:
    """Return hyperparameters: metadata 1 plugin 2 content, in it 3 session start, in it 1 a map of `Value`s."""
    plugin = _fields(_fields(fields[9][-1])[1][-1])
    start = _fields(_fields(plugin[2][-1]).get(3, [b""])[-1])
    found: dict[str, Any] = {}
    for entry in start.get(1, []):
        pair = _fields(entry)
        value = _fields(pair.get(2, [b""])[-1])  # 2 number, 3 text, 4 bool
        name = pair.get(1, [b""])[-1].decode()
        if 2 in value:
            found[name] = struct.unpack("<d", value[2][-1])[0]
        elif 3 in value:
            found[name] = value[3][-1].decode()
        else:
            found[name] = bool(value[4][-1]) if 4 in value else None
    return found


def _records(path: Path, note: Callable[[str], None]) -> Iterator[bytes]:
    """Yield the whole records of a file, up to the first damaged one."""
    with path.open("rb") as file:
        while head := file.read(12):
            if len(head) == 12:
                size, check = struct.unpack("<QI", head)
                if _masked_crc(head[:8]) != check:
                    note(f"{path} is damaged at byte {file.tell() - 12}: what comes after it is left out.")
                    return
                data, tail = _exactly(file.read, size), file.read(4)
                if len(tail) == 4:
                    if size <= _CHECKED_BYTES and _masked_crc(data) != struct.unpack("<I", tail)[0]:
                        note(f"A record of {path}, at byte {file.tell() - size - 4}, is damaged and left out.")
                        continue
                    yield data
                    continue
            note(f"The last record of {path} isn't whole, and left out.")
            return


def _exactly(read: Callable[[int], bytes], size: int) -> bytes:
    """Read so many bytes, or what there is: a length may be any number."""
    parts = []
    while size > 0 and (part := read(min(size, 1 << 24))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _fields(data: bytes) -> _Fields:
    """Return a message's fields by number: a varint as an int, everything else as bytes."""
    found: _Fields = {}
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        value: int | bytes
        if kind == _VARINT:
            value, place = _varint(data, place)
        else:
            size, place = (8, place) if kind == _FIXED64 else (4, place) if kind == _FIXED32 else _varint(data, place)
            if kind not in (_FIXED64, _FIXED32, _BYTES) or place + size > len(data):
                msg = "it is no protocol buffer"
                raise ValueError(msg)
            value, place = data[place : place + size], place + size
        found.setdefault(key >> 3, []).append(value)
    return found


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, place
    msg = "a number in it has no end"
    raise ValueError(msg)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _table() -> tuple[int, ...]:
    found = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        found.append(crc)
    return tuple(found)


_TABLE = _table()


def _masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF

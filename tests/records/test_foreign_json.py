"""JSON from elsewhere is read as `json` reads it, or is a ValueError: nothing in it fails whoever writes it again."""

from __future__ import annotations

import json

import pytest

from cosmati.records.foreign_json import read_foreign_json

GOOD = '{"a": [1, -2.5e3, true, null, {"b": "\\u00e4\\ud83d\\ude00"}], "big": 123456789012345678901234567890}'


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def test_what_is_right_is_read_as_json_reads_it() -> None:
    for data in (GOOD, GOOD.encode(), '"\u00e4"', b"3", nested(100)):
        assert read_foreign_json(data) == json.loads(data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("{", "Expecting"),
        (b"\xff", "utf-8"),
        (GOOD.encode("utf-16"), "utf-8"),
        ("[NaN]", "NaN is no finite number"),
        ("-Infinity", "-Infinity is no finite number"),
        ('{"a": 1e999}', "1e999 is no finite number"),
        ("9" * 400 + ".0", "^9{40} is no finite number"),
        ("9" * 5000, "limit"),
        ('["\\ud800"]', "surrogates not allowed"),
        ('{"\\udc00": 1}', "surrogates not allowed"),
        ('"\ud800"', "surrogates not allowed"),
        (b'"\xed\xa0\x80"', "utf-8"),
        (nested(101), "nested too deeply"),
        (nested(500), "nested too deeply"),
        ("[" * 200_000, "nested too deeply"),
        ('{"a":' * 200_000, "nested too deeply"),
    ],
)
def test_what_could_not_be_written_again_is_refused(data: bytes | str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_foreign_json(data)

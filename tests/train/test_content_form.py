"""The form of a content's digest, which checkpoints of earlier releases hold: a changed one is another format."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import torch

from cosmati.train.content import content_digest


def framed(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(struct.pack("<Q", len(part)) + part for part in parts)).digest()


def test_each_part_is_told_with_its_length() -> None:
    tensor = b"Tensor", b"torch.float32torch.strided", b"(2,)", struct.pack("<2f", 1, 2)
    array = b"ndarray", b"<i8(2, 1)", struct.pack("<2q", 3, 4)
    number = b"int", b"1"
    assert content_digest(torch.tensor([1.0, 2.0])) == framed(b"tuple", *number, *tensor)
    assert content_digest(np.array([[3], [4]])) == framed(b"tuple", *number, *array)
    mapping = b"dict", b"int", b"2", b"str", b"'a'", b"list", b"int", b"0", b"str", b"'x'", *tensor
    assert content_digest({"x": torch.tensor([1.0, 2.0]), "a": []}) == framed(b"tuple", *number, *mapping)
    assert content_digest(None, True) == framed(b"tuple", b"int", b"2", b"NoneType", b"bool", b"True")
    one = framed(b"tuple", *number, b"int", b"5")
    assert content_digest({5}) == framed(b"tuple", *number, b"set", one)

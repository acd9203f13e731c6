"""The form of a request to a witness, by tlog-witness: old size, at most 63 hashes, an empty line, the checkpoint."""

from __future__ import annotations

import base64

import pytest

from cosmati.ledger.witness import MAX_REQUEST_SIZE, _read_request, _UnmetError

HASHES = [bytes([n]) * 32 for n in range(64)]


def request(old: bytes, hashes: list[bytes], note: bytes = b"note\n") -> bytes:
    return b"\n".join([old, *map(base64.b64encode, hashes), b"", note])


@pytest.mark.parametrize("num", [0, 1, 62, 63])
def test_a_request_is_read(num: int) -> None:
    assert _read_request(request(b"old 17", HASHES[:num])) == (17, HASHES[:num], b"note\n")
    assert _read_request(request(b"old 0", [])) == (0, [], b"note\n")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (request(b"old 17", HASHES), "63 lines at most"),
        (request(b"new 17", []), "begins with"),
        (request(b"17", []), "begins with"),
        (request(b"old 017", []), "begins with"),
        (request(b"old -1", []), "begins with"),
        (request(b"old " + b"9" * 21, []), "begins with"),
        (request(b"old " + b"9" * 30, []), "begins with"),
        (b"old 17\nnote\n", "begins with"),
        (request(b"old 17", [bytes(31)]), "isn't a hash of 32 bytes"),
        (request(b"old 17", [bytes(33)]), "isn't a hash of 32 bytes"),
        (b"old 17\n!!!\n\nnote\n", "doesn't hold"),
        (b"old 17\n\xff\n\nnote\n", "doesn't hold"),
        (request(b"old 17", [], b"n" * MAX_REQUEST_SIZE), "bytes at most"),
    ],
)
def test_what_is_no_request_is_answered_with_400(given: bytes, said: str) -> None:
    with pytest.raises(_UnmetError) as error:
        _read_request(given)
    assert error.value.answer.status == 400
    assert said in error.value.answer.text


def test_a_request_of_the_largest_size_is_read() -> None:
    room = MAX_REQUEST_SIZE - len(request(b"old 1", [], b""))
    assert len(_read_request(request(b"old 1", [], b"n" * room))[2]) == room

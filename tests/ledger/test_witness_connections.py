"""A connection stays open after an answer, unless the request wasn't read to its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from cosmati.ledger.witness_http import WitnessServer

from .test_witness import witness_at


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WitnessServer]:
    found = WitnessServer(witness_at(tmp_path / "w"))
    threading.Thread(target=lambda: found.serve_forever(0.01), daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


@pytest.mark.parametrize(
    ("path", "length", "status", "ends"),
    [
        ("/add-checkpoint", "3", 400, False),
        ("/add-checkpoint", "", 400, True),
        ("/add-checkpoint", "-1", 400, True),
        ("/add-checkpoint", "1" + "0" * 20, 400, True),
        ("/elsewhere", "3", 404, True),
    ],
)
def test_a_connection_ends_where_a_request_is_not_read(
    server: WitnessServer, path: str, length: str, status: int, ends: bool
) -> None:
    connection = HTTPConnection(*server.server_address[:2], timeout=20)
    connection.putrequest("POST", path)
    if length:
        connection.putheader("Content-Length", length)
    connection.endheaders(b"old" if length == "3" else None)
    answer = connection.getresponse()
    assert answer.status == status
    assert (answer.getheader("Connection") == "close") == ends
    answer.read()
    connection.close()

"""The address that a machine has for others."""

from __future__ import annotations

import socket

import pytest

from cosmati.launch.address import own_address


@pytest.mark.parametrize(
    ("endpoint", "address"), [("127.0.0.1:29400", "127.0.0.1"), ("localhost:1", "127.0.0.1"), ("127.0.0.7:9", None)]
)
def test_it_is_the_one_that_the_other_sees(endpoint: str, address: str | None) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind((endpoint.partition(":")[0].replace("localhost", "127.0.0.1"), 0))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.connect(other.getsockname())
            sender.send(b"?")
        seen = other.recvfrom(1)[1][0]
    assert own_address(endpoint) == seen
    assert address in (None, seen)


def test_a_name_that_nobody_knows_is_waited_for_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = socket.getaddrinfo
    asked: list[str] = []

    def after_two(host: str, *more: object, **named: object) -> object:
        asked.append(host)
        if len(asked) <= 2:
            raise socket.gaierror(f"{host} isn't known")
        return known("127.0.0.1", *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("cosmati.launch.address.time.sleep", lambda _: None)
    monkeypatch.setattr(socket, "getaddrinfo", after_two)
    assert own_address("gpt-0.gpt:29400") == "127.0.0.1"
    assert asked == ["gpt-0.gpt"] * 3
    asked.clear()
    with pytest.raises(OSError, match="isn't known"):
        own_address("gpt-0.gpt:29400", wait_seconds=-1.0)

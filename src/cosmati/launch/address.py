"""Tells which address others reach this machine at: `python -m cosmati.launch.address HOST:PORT`."""

from __future__ import annotations

import socket
import sys
import time

_SECONDS = 60.0


def own_address(endpoint: str, wait_seconds: float = _SECONDS) -> str:
    """Return the address from which this machine speaks to another one; a host's own name may say nothing to others.

    Args:
        endpoint: `HOST:PORT` of the other one, or its own. Nothing is sent there.
        wait_seconds: for its name to be known, which in a cluster may be after this machine has begun.

    Raises:
        OSError: it isn't known even then, or no way leads there.
    """
    host, _, port = endpoint.rpartition(":")
    until = time.monotonic() + wait_seconds
    while True:
        try:
            kind, _, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
            with socket.socket(kind, socket.SOCK_DGRAM) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


if __name__ == "__main__":
    print(own_address(sys.argv[1]))  # noqa: T201

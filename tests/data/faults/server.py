"""An HTTP server on loopback that misbehaves as it's told, file by file."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Server:
    """Serves a folder.

    Attributes:
        faults: by file name: what the next requests of it suffer, in order; the last one stays if `forever`.
        has_etags: whether it says what version a file is.
        requests: how often each file was asked for its content.
        heads: how often for its length only.
        connections: all that were ever made; at the end they're cut, as those of a machine that goes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults: dict[str, list[str]] = {}
        self.forever: set[str] = set()
        self.requests: Counter[str] = Counter()
        self.heads: Counter[str] = Counter()
        self.connections: list[socket.socket] = []
        self.has_etags = True
        self.url = ""

    def fault(self, name: str, *kinds: str, forever: bool = False) -> None:
        self.faults[name] = list(kinds)
        if forever:
            self.forever.add(name)

    def next_fault(self, name: str) -> str:
        left = self.faults.get(name, [])
        if not left:
            return ""
        return left[0] if name in self.forever and len(left) == 1 else left.pop(0)


def etag(path: Path) -> str:
    """As many servers have it: of time and length."""
    status = path.stat()
    return f'"{status.st_mtime_ns:x}-{status.st_size:x}"'


@contextmanager
def serve(folder: Path) -> Iterator[Server]:  # noqa: C901  (the handler is a class within)
    state = Server(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            state.connections.append(self.connection)

        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            state.heads[self.path.lstrip("/")] += 1
            path = state.folder / self.path.lstrip("/")
            left = state.faults.get(path.name, [])
            status = int(left[0]) if left and left[0].isdigit() else 200 if path.is_file() else 404
            self.send_response(status)
            self.send_header("Content-Length", str(path.stat().st_size if status == 200 else 0))
            if status == 200 and state.has_etags:
                self.send_header("ETag", etag(path))
            self.end_headers()

        def do_GET(self) -> None:
            name = self.path.lstrip("/")
            path = state.folder / name
            state.requests[name] += 1
            fault = state.next_fault(name)
            if fault.isdigit():
                self.send_response(int(fault))
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if fault == "hang":
                time.sleep(30)
                return
            if not path.is_file():
                self.send_error(404)
                return
            data = path.read_bytes()
            start, stop, status = 0, len(data), 200
            if self.headers.get("Range"):
                first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
                start, stop, status = int(first), min(int(last or len(data) - 1) + 1, len(data)), 206
            body = data[start:stop]
            if fault == "short":
                body = body[: len(body) // 2]  # and a length to match: nothing looks wrong
            if fault == "flip":
                body = bytes([body[0] ^ 1]) + body[1:]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Accept-Ranges", "bytes")
            if state.has_etags:
                self.send_header("ETag", etag(path))
            if status == 206:
                self.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{len(data)}")
            self.end_headers()
            self._send(body, fault)

        def _send(self, body: bytes, fault: str) -> None:
            if fault == "reset":
                self.wfile.write(body[: len(body) // 2])
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True  # what is closed while it lingers for 0 s is reset
            elif fault == "drip":
                with contextlib.suppress(OSError):
                    for place in range(len(body)):
                        self.wfile.write(body[place : place + 1])
                        self.wfile.flush()
                        time.sleep(0.2)
            else:
                with contextlib.suppress(OSError):
                    self.wfile.write(body)

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: object) -> None:
            pass

    server = Quiet(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        for connection in state.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

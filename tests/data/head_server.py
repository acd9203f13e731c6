"""An HTTP server on loopback that is asked for lengths (HEAD), and says what it's told to."""

from __future__ import annotations

import gzip
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Web:
    """A server on loopback, and what it does about HEAD.

    Attributes:
        says: the length, by name, in place of the right one; None is none at all.
        status: of the answer, by name.
        packs: names of what it compresses on its way, whether it was asked to or not.
        gate: what answers about shards wait at; None where they don't.
        heads: how often each file was asked for.
        negotiates: whether it compresses whatever who asks would take compressed.
    """

    folder: Path
    url: str = ""
    says: dict[str, int | None] = field(default_factory=dict)
    status: dict[str, int] = field(default_factory=dict)
    packs: set[str] = field(default_factory=set)
    gate: threading.Barrier | None = None
    heads: Counter[str] = field(default_factory=Counter)
    negotiates: bool = False


@contextmanager
def serve(web: Web) -> Iterator[Web]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def answer(self, *, has_body: bool) -> None:
            name = self.path.rpartition("/")[2]
            path = web.folder / self.path.lstrip("/")
            status = web.status.get(name, 200) if not has_body else 200
            status = status if path.is_file() else 404
            body = path.read_bytes() if status == 200 else b""
            self.send_response(status)
            if name in web.packs or (web.negotiates and "gzip" in self.headers.get("Accept-Encoding", "")):
                body = gzip.compress(body)
                self.send_header("Content-Encoding", "gzip")
            length = web.says.get(name, len(body)) if not has_body else len(body)
            if length is not None:
                self.send_header("Content-Length", str(length))
            self.end_headers()
            if has_body:
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            name = self.path.rpartition("/")[2]
            with lock:
                web.heads[name] += 1
            if web.gate is not None and name.endswith(".mds"):
                web.gate.wait(30)
            self.answer(has_body=False)

        def do_GET(self) -> None:
            self.answer(has_body=True)

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: object) -> None:
            pass

    server = Quiet(("127.0.0.1", 0), Handler)
    web.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield web
    finally:
        server.shutdown()
        server.server_close()

"""A witness over HTTP: `POST /add-checkpoint` as C2SP tlog-witness has it, and the client that asks one."""

from __future__ import annotations

import contextlib
import ipaddress
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from cosmati.errors import LedgerError
from cosmati.ledger.cosignature import WitnessKey
from cosmati.ledger.cosigned import Send
from cosmati.ledger.witness import MAX_REQUEST_SIZE, Answer, Witness

SECONDS_TO_ANSWER = 10.0
_MAX_ANSWER = 1 << 16


class WitnessServer(ThreadingHTTPServer):
    """Answers for a witness, on this machine alone unless another address is given.

    Args:
        witness: who answers.
        host: address to listen on.
        port: of the address; 0 takes a free one, see `url`.
    """

    daemon_threads = True

    def __init__(self, witness: Witness, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.witness = witness
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """What a client is given."""
        return "http://{}:{}".format(*self.server_address[:2])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "cosmati-witness"
    sys_version = ""
    timeout = SECONDS_TO_ANSWER
    server: WitnessServer

    def do_POST(self) -> None:
        """Answer one request."""
        length = self.headers.get("Content-Length", "")
        if self.path != "/add-checkpoint":
            self._say(Answer(404, "POST /add-checkpoint is all there is.\n"), ends=True)
        elif not length.isascii() or not length.isdigit() or int(length[:12]) > MAX_REQUEST_SIZE:
            self._say(Answer(400, f"A request says its length, {MAX_REQUEST_SIZE} bytes at most.\n"), ends=True)
        else:
            request = self.rfile.read(int(length))
            try:
                answer = self.server.witness.answer(request)
            except (LedgerError, OSError) as error:
                self.log_error("%s", error)
                answer = Answer(500, "This witness can't answer: its owner finds why in its log.\n")
            self._say(answer)

    def _say(self, answer: Answer, *, ends: bool = False) -> None:
        data = answer.text.encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(data)))
        if ends:  # What the client still sends isn't read.
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(data)


def over_http(url: str, *, seconds: float = SECONDS_TO_ANSWER) -> Send:
    """Return what sends requests to the witness at a URL: the prefix of `/add-checkpoint`.

    Raises:
        LedgerError: it's no URL of http or https.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise LedgerError(f"{url!r:.200} is no address of a witness. Give one such as https://witness.example/prefix.")
    # A proxy has no way to this machine.
    opener = build_opener(ProxyHandler({})) if _is_here(parts.hostname) else build_opener()

    def send(request: bytes) -> tuple[int, bytes]:
        headers = {"Content-Type": "text/plain; charset=utf-8"}
        asked = Request(url.rstrip("/") + "/add-checkpoint", request, headers, method="POST")  # noqa: S310 (checked)
        try:
            with opener.open(asked, timeout=seconds) as answer:
                return answer.status, answer.read(_MAX_ANSWER)
        except HTTPError as error:
            with error:
                return error.code, error.read(_MAX_ANSWER)
        except HTTPException as error:
            raise ConnectionError(f"its answer is none of HTTP: {error!r}") from error

    return send


def _is_here(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def witness_and_url(text: str) -> tuple[WitnessKey, str]:
    """Return key and address of a witness from one text, with a space between them.

    Raises:
        LedgerError: it's no such text.
    """
    key, _, url = text.strip().partition(" ")
    if not url.strip():
        raise LedgerError(f"{text!r:.200} names no witness. Give its verifier key, a space, and its address.")
    found = WitnessKey.parse(key)
    over_http(url.strip())
    return found, url.strip()

"""A static file server on loopback that is as far away as it's told: a delay for each round trip, a cap on bandwidth.

    python -m benchmarks.slow_server FOLDER --delay 0.1 --megabytes 50

Serves FOLDER by HTTP; S3 clients read the same as `s3://BUCKET/KEY` with this endpoint, where BUCKET is a folder. A
connection costs one round trip, each request another; all bodies share the bandwidth.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import time
from email.utils import formatdate
from pathlib import Path
from urllib.parse import unquote, urlsplit

_CHUNK = 1 << 16


class SlowServer:
    """See the module.

    Args:
        folder: what is served.
        delay: seconds a round trip.
        bandwidth: bytes a second, over all connections; None for as fast as it goes.
    """

    def __init__(self, folder: Path, delay: float, bandwidth: float | None) -> None:
        self._folder, self._delay, self._bandwidth = folder, delay, bandwidth
        self._free_at = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        await asyncio.sleep(self._delay)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
                await asyncio.sleep(self._delay)
                await self._answer(head, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        method, target, _ = head.split(" ", 2)
        print(method, target, flush=True)
        path = self._folder / unquote(urlsplit(target).path).lstrip("/")
        if not path.is_file():
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            return
        data = path.read_bytes()
        etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
        start, stop, status = 0, len(data), "200 OK"
        asked = [line.split("=")[1] for line in head.split("\r\n") if line.lower().startswith("range: bytes=")]
        if asked:
            first, _, last = asked[0].partition("-")
            start, stop, status = int(first), min(int(last or stop) + 1, stop), "206 Partial Content"
        fields = {
            "Content-Length": stop - start,
            "Content-Type": "application/octet-stream",
            "Accept-Ranges": "bytes",
            "ETag": f'"{etag}"',
            "Last-Modified": formatdate(path.stat().st_mtime, usegmt=True),
        }
        if asked:
            fields["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        writer.write(f"HTTP/1.1 {status}\r\n{lines}\r\n".encode())
        if method == "GET":
            for at in range(start, stop, _CHUNK):
                await self._send(writer, data[at : min(at + _CHUNK, stop)])
        await writer.drain()

    async def _send(self, writer: asyncio.StreamWriter, piece: bytes) -> None:
        if self._bandwidth is not None:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + len(piece) / self._bandwidth
            await asyncio.sleep(self._free_at - now)
        writer.write(piece)
        await writer.drain()


async def main() -> None:
    """Serve until killed; print the port first, then a line a request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds a round trip")
    parser.add_argument("--megabytes", type=float, help="a second, over all connections")
    args = parser.parse_args()
    bandwidth = None if args.megabytes is None else args.megabytes * 1e6
    slow = SlowServer(args.folder, args.delay, bandwidth)
    server = await asyncio.start_server(slow.serve, "127.0.0.1", 0, limit=1 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())

"""A whole file in one request. fsspec opens a file by asking for its length first, which costs a round trip more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_CHUNK_BYTES = 1 << 20

Take = Callable[[bytes], bool]
"""Takes the next piece, and says whether it wants more."""


def stream_whole(files: Any, path: str, take: Take) -> bool:  # noqa: ANN401  (fsspec has no types)
    """Hand a file over, piece by piece.

    Args:
        files: a file system of fsspec's.
        path: in it.
        take: called with each piece.

    Returns:
        Whether there is such a way: over HTTP, and over S3 with s3fs.
    """
    protocols = {files.protocol} if isinstance(files.protocol, str) else {*files.protocol}
    if protocols & {"http", "https"} and hasattr(files, "set_session"):
        from fsspec.asyn import sync

        sync(files.loop, _over_http, files, path, take)
    elif "s3" in protocols and hasattr(files, "call_s3"):
        _over_s3(files, path, take)
    else:
        return False
    return True


async def _over_http(files: Any, path: str, take: Take) -> None:  # noqa: ANN401
    session = await files.set_session()
    options = {**files.kwargs}
    # A server that compresses on its way would send other bytes than it has.
    options["headers"] = {**options.get("headers", {}), "Accept-Encoding": "identity"}
    async with session.get(files.encode_url(path), **options) as response:
        response.raise_for_status()
        async for piece in response.content.iter_chunked(_CHUNK_BYTES):
            if not take(piece):
                return


def _over_s3(files: Any, path: str, take: Take) -> None:  # noqa: ANN401
    from fsspec.asyn import sync

    bucket, key, version = files.split_path(path)
    named = {"VersionId": version} if version else {}
    body = files.call_s3("get_object", Bucket=bucket, Key=key, **named, **files.req_kw)["Body"]
    try:
        while (piece := sync(files.loop, body.read, _CHUNK_BYTES)) and take(piece):
            pass
    finally:
        body.close()

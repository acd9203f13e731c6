"""Lengths of files where they lie: by HEAD over HTTP, where a server answers that, and by a list elsewhere."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="fsspec needs it for HTTP")

from cosmati.data.shards import lengths
from cosmati.data.shards.remote import Remote
from tests.data.head_server import Web, serve

FILES = {"manifest.json": 40, **{f"shard.{number}.mds": 100 + number for number in range(8)}}
SHARDS = {name: size for name, size in FILES.items() if name != "manifest.json"}
SURE = ("manifest.json", 40)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    for name, size in FILES.items():
        (tmp_path / name).write_bytes(bytes(size))
    with serve(Web(tmp_path)) as found:
        yield found


def asked(web: Web) -> object:
    return Remote(web.url).sizes(list(SHARDS), sure=SURE)


def test_lengths_are_those_of_the_files(web: Web) -> None:
    assert asked(web) == SHARDS
    assert web.heads == Counter(dict.fromkeys(FILES, 1))


def test_what_is_not_there_is_left_out(web: Web) -> None:
    (web.folder / "shard.3.mds").unlink()
    web.status["shard.4.mds"] = 410
    left = {name: size for name, size in SHARDS.items() if name not in {"shard.3.mds", "shard.4.mds"}}
    assert asked(web) == left


@pytest.mark.parametrize("status", [403, 405, 500, 501])
def test_a_server_that_answers_no_heads_says_nothing(web: Web, status: int) -> None:
    web.status = dict.fromkeys(FILES, status)
    assert asked(web) is None
    assert web.heads == Counter({SURE[0]: 1}), "and isn't asked again and again"


@pytest.mark.parametrize("status", [403, 429, 503])
def test_a_refused_answer_says_nothing_of_its_file(web: Web, status: int) -> None:
    web.status["shard.2.mds"] = status
    assert asked(web) == {**SHARDS, "shard.2.mds": None}


def test_a_server_that_lies_of_what_is_known_is_not_believed(web: Web) -> None:
    web.says = dict.fromkeys(FILES, 0)  # as frameworks do that answer HEAD with an empty GET
    assert asked(web) is None
    web.says = {}
    (web.folder / SURE[0]).unlink()
    assert asked(web) is None


@pytest.mark.long
def test_no_length_is_not_known(web: Web) -> None:
    web.says = dict.fromkeys(FILES, None)
    assert asked(web) == dict.fromkeys(SHARDS)


def test_the_length_of_what_is_compressed_on_its_way_is_not_the_files(web: Web) -> None:
    web.packs = {SURE[0], "shard.1.mds"}
    assert asked(web) == {**SHARDS, "shard.1.mds": None}
    web.packs, web.negotiates = set(), True
    assert asked(web) == SHARDS, "nothing compressed was asked for"


def test_many_are_asked_for_at_once(web: Web) -> None:
    web.gate = threading.Barrier(4)  # no answer before four have come
    assert asked(web) == SHARDS


def test_not_too_many_are_asked_for_at_once(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    now, most = 0, 0

    async def head(_files: object, path: str) -> tuple[int, int]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return 200, FILES[path.rpartition("/")[2]]

    monkeypatch.setattr(lengths, "_head", head)
    monkeypatch.setattr(lengths, "AT_ONCE", 3)
    assert asked(web) == SHARDS
    assert most == 3


def test_very_many_are_not_asked_for(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "MOST", len(SHARDS) - 1)
    assert asked(web) is None
    assert not web.heads


def test_what_comes_late_is_not_known(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "MOST_SECONDS", 0.3)
    web.gate = threading.Barrier(len(SHARDS) + 1)  # which never come
    assert asked(web) in (dict.fromkeys(SHARDS), None)
    web.gate.abort()


def test_elsewhere_one_list_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    for name, size in FILES.items():
        files.pipe(f"/lengths/{name}", bytes(size))
    files.rm("/lengths/shard.5.mds")
    looks: list[str] = []
    find = type(files).find
    monkeypatch.setattr(type(files), "find", lambda self, path, **how: looks.append(path) or find(self, path, **how))
    found = Remote("memory://lengths").sizes([*SHARDS, "other.mds"], sure=SURE)
    assert found == {name: size for name, size in SHARDS.items() if name != "shard.5.mds"}
    assert len(looks) == 1


def test_here_each_file_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name, size in {"a": 3, "deep/b": 0}.items():
        (tmp_path / name).write_bytes(bytes(size))
    assert Remote(str(tmp_path)).sizes(["a", "deep/b", "c", "deep/d"], sure=SURE) == {"a": 3, "deep/b": 0}

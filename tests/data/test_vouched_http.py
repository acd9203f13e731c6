"""Signed data behind HTTP: a shard that's missing or cut is told when data open, where the server answers HEAD."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")
pytest.importorskip("aiohttp", reason="fsspec needs it for HTTP")

from cosmati.data.opened import CacheOptions
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.manifest import SourceFacts
from cosmati.data.shards.remote import RemoteError
from cosmati.data.shards.upload import Destination
from cosmati.data.signing import sign_sources
from cosmati.data.streaming import StreamingDataset
from cosmati.data.vouching import TamperedShardError
from cosmati.provenance.authority.trusted import Authority
from tests.data.head_server import Web, serve
from tests.provenance.authority.people import NEWS, People

pytestmark = pytest.mark.long


@pytest.fixture
def people(tmp_path: Path) -> People:
    made = People(tmp_path).begin()
    made.delegate(NEWS, "ada")
    return made


@pytest.fixture
def web(people: People, request: pytest.FixtureRequest) -> Iterator[Web]:
    folder = people.root / "web" / "corpus"
    write_dataset(
        [{"number": number} for number in range(40)],
        Destination(str(folder)),
        {"number": "int"},
        class_of=lambda _row: NEWS,
        source="corpus",
        facts=SourceFacts(),
        size_limit=200,
        compression=getattr(request, "param", None),
    )
    list(sign_sources(str(folder), people.folder, people.ring("ada")))
    with serve(Web(people.root / "web")) as found:
        yield found


def opened(people: People, web: Web) -> StreamingDataset:
    authority = Authority(people.folder, people.pin, state=people.root / "seen")
    cache = CacheOptions(people.root / "cache", deadline_seconds=60)
    return StreamingDataset(f"{web.url}/corpus", authority=authority, cache=cache, shuffle=False)


def shards(web: Web) -> list[Path]:
    return sorted((web.folder / "corpus").rglob("*.mds*"))


@pytest.mark.parametrize("web", [None, "zstd"], indirect=True)
def test_each_shard_is_asked_for_once(people: People, web: Web) -> None:
    data = opened(people, web)
    assert {path.name: 1 for path in shards(web)}.items() <= web.heads.items()
    assert sorted(row["number"] for row in data.__getitems__(range(len(data)))) == list(range(40))


def test_a_missing_or_cut_shard_is_refused_at_opening(people: People, web: Web) -> None:
    shard = shards(web)[-1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(TamperedShardError, match=rf"{shard.name} has .* bytes in place of"):
        opened(people, web)
    shard.unlink()
    with pytest.raises(TamperedShardError, match=rf"{shard.name} is missing"):
        opened(people, web)


@pytest.mark.parametrize("packs", [False, True])
def test_where_nobody_says_fetching_tells(people: People, web: Web, *, packs: bool) -> None:
    """A server without HEAD, or one that compresses on its way: data open, and a long shard is told when it's read."""
    first, last = shards(web)[0], shards(web)[-1]
    last.write_bytes(last.read_bytes() + b"!")
    if packs:
        web.packs = {last.name}
    else:
        web.status = {path.name: 405 for path in web.folder.rglob("*.*")}
    data = opened(people, web)
    assert web.heads[first.name] == packs
    assert data[0]["number"] == 0
    with pytest.raises(RemoteError, match="more than the"):
        data[len(data) - 1]

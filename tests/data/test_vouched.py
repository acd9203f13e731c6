"""Data that an authority vouches for: a class can't be guessed or moved, and no row of a changed shard is read."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rfc8785

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati.data.loader import StreamingLoader
from cosmati.data.opened import CacheOptions
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.manifest import SourceFacts
from cosmati.data.shards.upload import Destination
from cosmati.data.signing import sign_sources
from cosmati.data.streaming import StreamingDataset
from cosmati.data.vouching import LicenceExpiredError, TamperedIndexError, TamperedShardError
from cosmati.errors import DataError
from cosmati.provenance.authority import errors
from cosmati.provenance.authority.trusted import Authority
from tests.provenance.authority.people import NEWS, PII, People

pytestmark = pytest.mark.long

CLASSES = (NEWS, PII)


def write(folder: Path, *, facts: SourceFacts | None = None, compression: str | None = None) -> Path:
    rows = [{"number": number, "class": CLASSES[number % 2]} for number in range(40)]
    write_dataset(
        [{"number": row["number"]} for row in rows],
        Destination(str(folder)),
        {"number": "int"},
        class_of=lambda row: CLASSES[row["number"] % 2],
        source="corpus",
        facts=facts or SourceFacts(licence="contract 12"),
        size_limit=200,
        compression=compression,
    )
    return folder


@pytest.fixture
def people(tmp_path: Path) -> People:
    made = People(tmp_path).begin()
    made.delegate(NEWS, "ada")
    made.delegate(PII, "bob")
    return made


@pytest.fixture
def corpus(people: People) -> Path:
    folder = write(people.root / "corpus")
    assert [state for _, state in sign_sources(str(folder), people.folder, people.ring("ada", "bob"))] == ["signed"] * 2
    return folder


def opened(people: People, folder: Path, **options: Any) -> StreamingDataset:
    authority = Authority(people.folder, people.pin, state=people.root / "seen")
    return StreamingDataset(folder, authority=authority, columns=("number",), **options)


def source_of(folder: Path, path: str) -> Path:
    entries = json.loads((folder / "sources.json").read_text())["sources"]
    return folder / next(entry["path"] for entry in entries if entry["class"] == path)


def test_signed_data_are_of_the_class_that_was_signed(people: People, corpus: Path) -> None:
    data = opened(people, corpus)
    assert data.class_names == tuple(sorted(CLASSES))
    rows = data.__getitems__(range(len(data)))
    assert {(row["number"] % 2, data.class_names[row["class_id"]]) for row in rows} == {(0, NEWS), (1, PII)}
    assert sorted(row["number"] for row in rows) == list(range(40))
    again = pickle.loads(pickle.dumps(data))  # as a worker gets it
    assert again[0] == data[0]


def test_unsigned_data_still_open_where_nobody_is_asked(people: People) -> None:
    folder = write(people.root / "corpus")
    assert StreamingDataset(folder, columns=("number",)).class_names == tuple(sorted(CLASSES))
    with pytest.raises(errors.OutOfScopeError, match="cosmati data sign"):
        opened(people, folder)


def test_a_class_is_not_what_somebody_asks_for(people: People, corpus: Path) -> None:
    with pytest.raises(DataError, match="A class is what the data say"):
        opened(people, corpus, class_path="public-domain")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """Change a file of JSON, and return its new digest."""
    content = json.loads(path.read_text())
    change(content)
    path.write_bytes(rfc8785.dumps(content))
    return sha256(path)


def relabel(folder: Path, path: str) -> None:
    """As an engineer would who wants personal data to be something else: each file agrees with the others."""
    source = source_of(folder, PII)
    manifest = edit(source / "manifest.json", lambda one: one.update(class_path=path))
    index = edit(source / "index.json", lambda one: one["cosmati"].update({"class": path, "manifest_sha256": manifest}))
    (entry,) = [one for one in json.loads((folder / "sources.json").read_text())["sources"] if one["class"] == PII]
    new = {**entry, "class": path, "index_sha256": index}
    edit(folder / "sources.json", lambda one: one.update(sources=[new if e == entry else e for e in one["sources"]]))


def test_a_relabelled_source_is_refused(people: People, corpus: Path) -> None:
    relabel(corpus, "public-domain")
    names = StreamingDataset(corpus, columns=("number",)).class_names
    assert names == (NEWS, "public-domain"), "it fits together in itself"
    with pytest.raises((errors.TamperedManifestError, errors.OutOfScopeError)):
        opened(people, corpus)


def test_another_source_in_its_folder_is_refused(people: People, corpus: Path) -> None:
    """A folder of personal data put in the place of the news, with its own manifest and its own signature."""
    news, pii = source_of(corpus, NEWS), source_of(corpus, PII)
    shutil.rmtree(news)
    shutil.copytree(pii, news)
    with pytest.raises(DataError):
        opened(people, corpus)
    # By itself it is what it was signed as.
    assert opened(people, news).class_names == (PII,)


def test_an_index_that_lists_other_shards_is_refused(people: People, corpus: Path) -> None:
    source = source_of(corpus, NEWS)
    path = source / "index.json"
    whole = json.loads(path.read_text())
    for change in (
        lambda shards: shards.pop(),
        lambda shards: shards.reverse(),
        lambda shards: shards[0].update(samples=shards[0]["samples"] - 1),
    ):
        index = json.loads(json.dumps(whole))
        change(index["shards"])
        path.write_text(json.dumps(index))
        with pytest.raises(TamperedIndexError, match=r"was signed|were signed"):
            opened(people, source)


def test_a_missing_or_cut_shard_is_refused_at_opening(people: People, corpus: Path) -> None:
    shard = max(source_of(corpus, NEWS).glob("*.mds"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(TamperedShardError, match=r"has .* bytes in place of"):
        opened(people, corpus)
    shard.unlink()
    with pytest.raises(TamperedShardError, match="is missing"):
        opened(people, corpus)


@pytest.mark.parametrize("has_cache", [False, True])
def test_no_row_of_a_changed_shard_is_read(people: People, corpus: Path, *, has_cache: bool) -> None:
    """Every hash of the index fits what was changed: only the signed manifest knows better."""
    source = source_of(corpus, NEWS)
    shard = min(source.glob("*.mds"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    path = source / "index.json"
    index = json.loads(path.read_text())
    index["shards"][0]["raw_data"]["hashes"] = {"sha256": sha256(shard)}
    path.write_text(json.dumps(index))
    data = opened(people, source, cache=CacheOptions(people.root / "cache") if has_cache else None)
    refused, num_changed = 0, int(data.sources[0].index.shard_rows[0])
    for position in range(len(data)):
        try:
            data[position]
        except TamperedShardError:
            refused += 1
    assert refused == num_changed > 0
    with pytest.raises(TamperedShardError, match="that was signed"):
        data.__getitems__(range(len(data)))
    with pytest.raises(TamperedShardError):
        list(StreamingLoader(opened(people, source, on_bad_row="skip"), batch_size=5))


def test_a_shard_that_is_replaced_later_is_compared_again(people: People, corpus: Path) -> None:
    source = source_of(corpus, NEWS)
    data = opened(people, source, shuffle=False)
    assert data[0]["number"] == 0
    shard = min(source.glob("*.mds"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    draft = shard.with_suffix(".new")
    draft.write_bytes(content)
    draft.replace(shard)
    first = range(int(data.sources[0].index.shard_rows[0]))
    with pytest.raises(DataError, match=r"signed|replaced|changed"):
        data.__getitems__(first)


def test_a_licence_that_has_ended_is_refused(people: People) -> None:
    facts = SourceFacts(licence="contract 12", licence_valid_until="2020-12-31")
    folder = write(people.root / "corpus", facts=facts)
    list(sign_sources(str(folder), people.folder, people.ring("ada", "bob")))
    with pytest.raises(LicenceExpiredError, match=r"contract 12.*2020-12-31"):
        opened(people, folder)


def test_compressed_shards_are_compared_uncompressed(people: People) -> None:
    folder = write(people.root / "corpus", compression="zstd")
    list(sign_sources(str(folder), people.folder, people.ring("ada", "bob")))
    data = opened(people, folder, cache=CacheOptions(people.root / "cache"))
    assert sorted(row["number"] for row in data.__getitems__(range(len(data)))) == list(range(40))

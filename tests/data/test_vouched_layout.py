"""An index says how a shard's bytes are read: a changed one makes other rows of signed bytes, so the shard decides."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati.data import vouching
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.manifest import SourceFacts
from cosmati.data.shards.mds import MdsShard
from cosmati.data.shards.remote import EnvironmentFaultError
from cosmati.data.shards.upload import Destination
from cosmati.data.signing import sign_sources
from cosmati.data.streaming import StreamingDataset
from cosmati.data.vouching import LicenceExpiredError, TamperedIndexError, TamperedShardError
from cosmati.provenance.authority import ceremony, errors
from cosmati.provenance.authority.trusted import Authority
from tests.provenance.authority.people import NEWS, People


@pytest.fixture
def people(tmp_path: Path) -> People:
    made = People(tmp_path).begin()
    made.delegate(NEWS, "ada")
    write_dataset(
        [{"prompt": f"p{number}", "answer": f"a{number}"} for number in range(8)],
        Destination(str(tmp_path / "corpus")),
        {"prompt": "str", "answer": "str"},
        class_of=lambda _row: NEWS,
        source="corpus",
        facts=SourceFacts(),
    )
    list(sign_sources(str(tmp_path / "corpus"), made.folder, made.ring("ada")))
    return made


def opened(people: People, authority: Authority | None = None) -> StreamingDataset:
    authority = authority or Authority(people.folder, people.pin, state=people.root / "seen")
    return StreamingDataset(people.root / "corpus" / NEWS, authority=authority, shuffle=False)


def edit(people: People, change: Callable[[dict[str, Any]], object]) -> None:
    path = people.root / "corpus" / NEWS / "index.json"
    index = json.loads(path.read_text())
    for shard in index["shards"]:
        change(shard)
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "change",
    [
        lambda shard: shard.update(column_names=shard["column_names"][::-1]),
        lambda shard: shard.update(column_encodings=["str", "bytes"]),
        lambda shard: shard.update(column_names=["answer", "question"]),
    ],
)
def test_columns_are_those_that_were_signed(people: People, change: Callable[[dict[str, Any]], object]) -> None:
    assert opened(people)[0]["prompt"] == "p0"
    edit(people, change)
    with pytest.raises(TamperedShardError, match=r"columns.*signed"):
        opened(people)[0]


def test_a_shard_is_read_in_no_other_format(people: People) -> None:
    """Offsets of somebody's own would cut rows of their own out of signed bytes."""
    meta = {"basename": "cuts", "bytes": 8, "hashes": {}}
    edit(
        people,
        lambda shard: shard.update(
            format="csv", hashes=[], newline="\n", raw_meta=meta, column_encodings=["str", "str"]
        ),
    )
    with pytest.raises(TamperedIndexError, match="csv"):
        opened(people)


def test_a_shard_swapped_before_it_is_mapped_is_not_read(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    data = opened(people)
    (path,) = (people.root / "corpus" / NEWS).glob("*.mds")
    whole, made = path.read_bytes(), MdsShard.__init__
    has_swapped: list[bool] = []

    def swap(self: MdsShard, at: Path, *rest: Any, **options: Any) -> None:
        if not has_swapped:
            has_swapped.append(True)
            draft = path.with_suffix(".new")
            draft.write_bytes(whole.replace(b"a0", b"X0"))
            draft.replace(path)
        made(self, at, *rest, **options)

    monkeypatch.setattr(MdsShard, "__init__", swap)
    with pytest.raises(EnvironmentFaultError, match=r"signed|sha256"):
        data[0]
    assert has_swapped


def test_data_opened_again_are_asked_for_again(people: People) -> None:
    """One authority, kept in a notebook for a week: what was revoked meanwhile opens no data."""
    authority = Authority(people.folder, people.pin, state=people.root / "seen")
    assert len(opened(people, authority)) == 8
    with people.repository.change(people.ring()) as change:
        ceremony.replace_key(change, people.keys["ada"].keyid, None)
    with pytest.raises(errors.OutOfScopeError):
        opened(people, authority)


@pytest.mark.parametrize(("name", "value"), [("class", "public-domain"), ("band", 3)])
def test_an_index_says_what_was_signed(people: People, name: str, value: object) -> None:
    path = people.root / "corpus" / NEWS / "index.json"
    index = json.loads(path.read_text())
    index["cosmati"][name] = value
    path.write_text(json.dumps(index))
    with pytest.raises(TamperedIndexError, match=f"says {name}"):
        opened(people)


@pytest.mark.parametrize(("day", "holds"), [(30, True), (31, True), (32, False)])
def test_a_licence_holds_through_its_last_day(people: People, day: int, *, holds: bool) -> None:
    folder = people.root / "licensed"
    write_dataset(
        [{"number": 1}],
        Destination(str(folder)),
        {"number": "int"},
        class_of=lambda _row: NEWS,
        source="licensed",
        facts=SourceFacts(licence="contract 12", licence_valid_until="2026-01-31"),
    )
    list(sign_sources(str(folder), people.folder, people.ring("ada")))
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC) + timedelta(days=day - 1)
    authority = Authority(people.folder, people.pin, state=people.root / "seen", clock=lambda: noon)
    with contextlib.nullcontext() if holds else pytest.raises(LicenceExpiredError, match="2026-01-31"):
        assert len(StreamingDataset(folder, authority=authority)) == 1


def test_sources_were_opened_when_the_first_was(people: People) -> None:
    (source,) = opened(people).sources
    assert source.vouched is not None
    times = ("2026-01-01T00:00:00+00:00", "2026-01-01T00:00:05+00:00")
    both = vouching.vouched_data([dataclasses.replace(source.vouched, opened=one) for one in reversed(times)])
    assert both is not None
    assert (both.opened, len(both.vouchers)) == (times[0], 2)
    assert vouching.vouched_data([]) is None

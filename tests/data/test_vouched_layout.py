"""An index says how a shard's bytes are read: a changed one makes other rows of signed bytes, so the shard decides."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.manifest import SourceFacts
from cosmati.data.shards.mds import MdsShard
from cosmati.data.shards.remote import EnvironmentFaultError
from cosmati.data.shards.upload import Destination
from cosmati.data.signing import sign_sources
from cosmati.data.streaming import StreamingDataset
from cosmati.data.vouching import TamperedIndexError, TamperedShardError
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
    has_swapped = []

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

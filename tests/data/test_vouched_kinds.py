"""Grades and further classes of signed data are what was signed: who edits them is refused at opening."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati.data.graded import SourceKind
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.signing import sign_sources
from cosmati.data.streaming import StreamingDataset
from cosmati.data.vouching import TamperedIndexError
from cosmati.errors import DataError
from cosmati.provenance.authority.errors import TamperedManifestError
from tests.data.test_vouched import edit, opened, source_of
from tests.provenance.authority.people import NEWS, PII, People


@pytest.fixture
def people(tmp_path: Path) -> People:
    made = People(tmp_path).begin()
    made.delegate(NEWS, "ada")
    return made


@pytest.fixture
def corpus(people: People) -> Path:
    folder = people.root / "corpus"
    rows = [{"number": number} for number in range(8)]
    kind: dict[str, Any] = {"grades": {"evidence": "low"}, "also": [PII], "band": 1, "packed": [(NEWS, SourceKind(2))]}
    write_dataset(rows, folder, {"number": "int"}, class_of=NEWS, source="corpus", **kind)
    assert [state for _, state in sign_sources(str(folder), people.folder, people.ring("ada"))] == ["signed"]
    return folder


EDITS: dict[str, dict[str, Any]] = {
    "grade": {"grades": {"evidence": "high"}},
    "another measure": {"grades": {"evidence": "low", "trust": "high"}},
    "no grades": {"grades": {}},
    "grades by another name": {"grades": {"Evidence": "low"}},
    "no further class": {"also": []},
    "another class": {"also": ["public-domain"]},
    "band": {"band": 2},
    "class ids in packs": {"packed": [{"class_path": "public-domain", "band": 2, "grades": {}, "also": []}]},
    "no class ids": {"packed": []},
}


def test_what_was_signed_opens(people: People, corpus: Path) -> None:
    data = opened(people, corpus)
    assert data.class_names == (f"{PII}&{NEWS}",)
    assert [(dict(source.grades), source.band) for source in data.sources] == [({"evidence": "low"}, 1)]


@pytest.mark.parametrize("what", EDITS)
def test_an_index_that_says_otherwise_is_refused(people: People, corpus: Path, what: str) -> None:
    """Of the source alone, and of the data set whose list of sources goes along."""
    source = source_of(corpus, NEWS)
    index = edit(source / "index.json", lambda one: one["cosmati"].update(EDITS[what]))
    with pytest.raises(TamperedIndexError, match="was signed"):
        opened(people, source)
    edit(corpus / "sources.json", lambda one: one["sources"][0].update(index_sha256=index))
    with pytest.raises(TamperedIndexError, match="was signed"):
        opened(people, corpus)


@pytest.mark.parametrize("name", ["grades", "also", "band", "packed"])
def test_an_index_that_leaves_it_out_is_refused(people: People, corpus: Path, name: str) -> None:
    source = source_of(corpus, NEWS)
    edit(source / "index.json", lambda one: one["cosmati"].pop(name))
    with pytest.raises(TamperedIndexError, match="was signed"):
        opened(people, source)


def rewrite(manifest: dict[str, Any], added: dict[str, Any]) -> None:
    """As canonical manifests are, which leave out what's empty."""
    manifest.update(added)
    for name in [name for name in added if not added[name]]:
        del manifest[name]


@pytest.mark.parametrize("what", EDITS)
def test_a_manifest_that_was_edited_along_is_refused(people: People, corpus: Path, what: str) -> None:
    """As somebody would whose policy is kinder to other grades: each file agrees with the others."""
    source = source_of(corpus, NEWS)
    manifest = edit(source / "manifest.json", lambda one: rewrite(one, EDITS[what]))
    added = {**EDITS[what], "manifest_sha256": manifest}
    index = edit(source / "index.json", lambda one: one["cosmati"].update(added))
    edit(corpus / "sources.json", lambda one: one["sources"][0].update(index_sha256=index))
    assert StreamingDataset(corpus, columns=("number",)).sources, "it fits together in itself"
    with pytest.raises(TamperedManifestError):
        opened(people, corpus)
    with pytest.raises(TamperedManifestError):
        opened(people, source)


def test_a_manifest_in_which_a_word_stands_twice_is_refused(people: People, corpus: Path) -> None:
    source = source_of(corpus, NEWS)
    path = source / "manifest.json"
    path.write_text(path.read_text().replace('"grades":', '"grades":{"evidence":"high"},"grades":'))
    assert json.loads(path.read_text())["grades"] == {"evidence": "low"}
    with pytest.raises(DataError):
        opened(people, source)

"""Sources are those that an entry names; of each, the archive's manifest is believed where it has that digest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.ledger.sources import ARCHIVE, SourceOfClass, sources_of

TARGET = "sources/licensed/news/agency/manifest.json"
MANIFEST: dict[str, Any] = {
    "class_path": "licensed/wire",
    "also": ["personal/names", "a/b"],
    "facts": {
        "licence": "CC-BY-4.0",
        "licence_valid_until": "2030-01-01",
        "origin": "an agency",
        "obtained": "by contract",
    },
}


def kept(ledger: Path, content: object) -> str:
    """Put a manifest into the archive; return its digest."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    digest = hashlib.sha256(data).hexdigest()
    (ledger / ARCHIVE).mkdir(exist_ok=True)
    (ledger / ARCHIVE / digest).write_bytes(data)
    return digest


def sources(ledger: Path, *told: tuple[str, str]) -> tuple[SourceOfClass, ...]:
    named = [{"target": target, "manifest_sha256": digest, "more": 1} for target, digest in told]
    tables: Any = SimpleNamespace(details={"provenance": {"sources": named}})
    return sources_of(ledger, tables)


def bare(digest: str, name: str = "licensed/news") -> SourceOfClass:
    return SourceOfClass(name, TARGET, "", "", "", "", digest)


def test_the_archive_lies_beside_the_ledger() -> None:
    assert ARCHIVE == "provenance"


@pytest.mark.parametrize("details", [{}, {"provenance": None}, {"provenance": {}}, {"provenance": {"sources": None}}])
def test_where_nobody_vouched_there_are_none(tmp_path: Path, details: dict[str, Any]) -> None:
    tables: Any = SimpleNamespace(details=details)
    assert sources_of(tmp_path, tables) == ()


def test_a_source_is_as_its_manifest_says(tmp_path: Path) -> None:
    digest = kept(tmp_path, MANIFEST)
    assert sources(tmp_path, (TARGET, digest)) == (
        SourceOfClass(
            class_name="a/b&licensed/wire&personal/names",
            target=TARGET,
            licence="CC-BY-4.0",
            valid_until="2030-01-01",
            origin="an agency",
            obtained="by contract",
            manifest_sha256=digest,
        ),
    )


def test_sources_keep_their_order_and_each_its_own_manifest(tmp_path: Path) -> None:
    first, second = kept(tmp_path, {"class_path": "z"}), kept(tmp_path, {"class_path": "y"})
    found = sources(tmp_path, ("s/x/a/m", first), ("s/x/b/m", second))
    assert [(one.class_name, one.target) for one in found] == [("z", "s/x/a/m"), ("y", "s/x/b/m")]


@pytest.mark.parametrize("manifest", [{}, {"facts": None}, {"facts": {}}, [], "text", 3])
def test_what_a_manifest_does_not_say_is_empty_and_the_class_is_the_targets(tmp_path: Path, manifest: object) -> None:
    digest = kept(tmp_path, manifest)
    assert sources(tmp_path, (TARGET, digest)) == (bare(digest),)


def test_a_manifest_that_is_not_in_the_archive_says_nothing(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"absent").hexdigest()
    assert sources(tmp_path, (TARGET, digest)) == (bare(digest),)
    (tmp_path / ARCHIVE / digest).mkdir(parents=True)  # which can't be read
    assert sources(tmp_path, (TARGET, digest)) == (bare(digest),)


def test_a_file_that_has_another_digest_is_not_believed(tmp_path: Path) -> None:
    digest = kept(tmp_path, MANIFEST)
    (tmp_path / ARCHIVE / digest).write_bytes(json.dumps(MANIFEST | {"class_path": "open"}).encode())
    assert sources(tmp_path, (TARGET, digest)) == (bare(digest),)
    (tmp_path / ARCHIVE / digest).write_bytes(b"no JSON")
    assert sources(tmp_path, (TARGET, digest)) == (bare(digest),)


@pytest.mark.parametrize("length", [63, 65, 0])
def test_only_what_may_be_a_digest_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    def looked(path: Path) -> bytes:
        raise AssertionError(path)

    (tmp_path / ARCHIVE).mkdir()
    monkeypatch.setattr(Path, "read_bytes", looked)
    for odd in ("a" * length, ("../" * 22)[:64], "a" * 63 + "/"):
        assert sources(tmp_path, (TARGET, odd)) == (bare(odd),)
    with pytest.raises(AssertionError):
        sources(tmp_path, (TARGET, "a" * 64))


def test_texts_are_taken_for_such(tmp_path: Path) -> None:
    ((number),) = sources(tmp_path, (3, 4))  # type: ignore[arg-type]
    assert (number.class_name, number.target, number.manifest_sha256) == ("", "3", "4")


@pytest.mark.parametrize(
    "content",
    [
        b"no JSON",
        b"\xff\xfe",
        [1],
        {"facts": 3},
        {"also": 3},
        {"class_path": None},
        {"facts": {"licence": 7}, "also": [1]},
    ],
    ids=str,
)
def test_what_is_no_manifest_says_nothing(tmp_path: Path, content: object) -> None:
    digest = kept(tmp_path, content)
    assert sources(tmp_path, (TARGET, digest)) == (bare(digest),)

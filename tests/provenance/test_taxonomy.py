"""Taxonomies: ids, digests, and what's refused."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.errors import ProvenanceError
from cosmati.provenance.sensitive import marked_in, sensitive_classes
from cosmati.provenance.spdx import RESTRICTIVENESS
from cosmati.provenance.taxonomy import Taxonomy, software_licences

SEGMENTS = st.text("abz019-", min_size=1, max_size=3)
PATHS = st.lists(SEGMENTS, min_size=1, max_size=3).map("/".join)


def is_tree(paths: set[str]) -> bool:
    return not any(other.startswith(f"{path}/") for path in paths for other in paths)


TREES = st.sets(PATHS, min_size=1, max_size=8).filter(is_tree)


def test_built_in_classes_are_in_canonical_order() -> None:
    assert software_licences().classes == (
        "open/copyleft",
        "open/permissive",
        "open/psf",
        "open/weak-copyleft",
        "proprietary",
        "public-domain",
        "restricted",
        "unknown",
    )
    assert set(RESTRICTIVENESS) == set(software_licences().classes)


def test_digest_is_sha256_of_canonical_json() -> None:
    taxonomy = Taxonomy("t", "1", (("b", "two"), ("a/x", "one")))
    text = '{"classes":{"a":{"x":"one"},"b":"two"},"name":"t","version":"1"}'
    assert taxonomy.digest == hashlib.sha256(text.encode()).digest()


def test_built_in_digest_is_golden() -> None:
    mapping = software_licences().to_mapping()
    canonical = json.dumps(mapping, sort_keys=True, separators=(",", ":"))  # ASCII only: equal to RFC 8785
    assert software_licences().digest == hashlib.sha256(canonical.encode()).digest()
    assert software_licences().digest.hex() == "dc9767ec4cfeb91f91d310f1f03a91f26240f2692203cf6c07166adffe3657f1"


def test_order_is_by_segment_not_by_text() -> None:
    assert Taxonomy("t", "1", (("a-b", ""), ("a/x", ""))).classes == ("a/x", "a-b")


@pytest.mark.long
@given(TREES, st.randoms())
def test_order_of_definition_means_nothing(paths: set[str], random: object) -> None:
    pairs = [(path, f"meaning of {path}") for path in paths]
    one = Taxonomy("t", "1", tuple(pairs))
    random.shuffle(pairs)  # type: ignore[attr-defined]
    other = Taxonomy("t", "1", tuple(pairs))
    assert one == other
    assert one.digest == other.digest
    assert [one.id_of(path) for path in one.classes] == list(range(len(paths)))


@pytest.mark.long
@given(TREES)
def test_mapping_round_trip(paths: set[str]) -> None:
    taxonomy = Taxonomy("t", "2", tuple((path, path.upper()) for path in paths))
    again = Taxonomy.from_mapping(json.loads(json.dumps(taxonomy.to_mapping())))
    assert again == taxonomy
    assert again.digest == taxonomy.digest


def test_a_changed_meaning_changes_the_digest() -> None:
    assert Taxonomy("t", "1", (("a", "x"),)).digest != Taxonomy("t", "1", (("a", "y"),)).digest


def test_contains_only_leaves() -> None:
    taxonomy = software_licences()
    assert taxonomy.contains("open/psf")
    assert not taxonomy.contains("open")
    assert taxonomy.is_branch("open")
    assert not taxonomy.is_branch("unknown")


def test_unknown_class_is_refused_with_close_matches() -> None:
    with pytest.raises(ProvenanceError, match=r"no class 'open/permisive'; did you mean open/permissive"):
        software_licences().id_of("open/permisive")


def test_branch_is_refused_with_its_classes() -> None:
    with pytest.raises(ProvenanceError, match=r"'open' is a branch .*open/copyleft, open/permissive"):
        software_licences().id_of("open")


@pytest.mark.parametrize(
    ("meanings", "message"),
    [
        ((), "has no class"),
        ((("A", ""),), r"class 'A': use \[a-z0-9-\]\+"),
        ((("a//b", ""),), "class 'a//b'"),
        ((("a\n", ""),), "class 'a"),
        ((("a", ""), ("a", "")), "class 'a' is given twice"),
        ((("a", ""), ("a/b", "")), "'a' is a class and has classes below it"),
    ],
)
def test_bad_trees_are_refused(meanings: tuple[tuple[str, str], ...], message: str) -> None:
    with pytest.raises(ProvenanceError, match=message):
        Taxonomy("t", "1", meanings)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"name": "t", "version": "1"}, "fields name, version and classes"),
        ({"name": "t", "version": 1, "classes": {"a": ""}}, "are strings"),
        ({"name": "t", "version": "1", "classes": {"a": {}}}, "below 'a'"),
        ({"name": "t", "version": "1", "classes": {"a": None}}, "below 'a'"),
        ({"name": "t", "version": "1", "classes": "a"}, "below 'the root'"),
        ({"name": "No", "version": "1", "classes": {"a": ""}}, "its name 'No'"),
        ({"name": "t", "version": "", "classes": {"a": ""}}, "version is empty"),
    ],
)
def test_bad_mappings_are_refused(mapping: dict[str, object], message: str) -> None:
    with pytest.raises(ProvenanceError, match=message):
        Taxonomy.from_mapping(mapping)


def test_provenance_needs_no_torch() -> None:
    modules = "cosmati.provenance.licences, cosmati.provenance.taxonomy"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sensitive_classes_are_part_of_what_is_published() -> None:
    plain = Taxonomy("firm", "1", (("customer/pii", "a"), ("customer/notes", "b"), ("news", "c")))
    marked = Taxonomy("firm", "1", plain.meanings, sensitive=("news", "customer", "news"))
    assert "sensitive" not in plain.to_mapping(), "what was published before keeps its digest"
    assert marked.to_mapping()["sensitive"] == ["customer", "news"]
    assert Taxonomy.from_mapping(marked.to_mapping()) == marked
    assert len({plain.digest, marked.digest, Taxonomy("firm", "1", plain.meanings, ("news",)).digest}) == 3
    assert sensitive_classes((*plain.classes, "customer/pii&news"), ["customer"]) == ("customer/notes", "customer/pii")
    assert sensitive_classes(("news", "newspapers"), ["news"]) == ("news",)
    with pytest.raises(ProvenanceError, match="neither a class nor a branch"):
        Taxonomy("firm", "1", plain.meanings, sensitive=("custom",))
    for wrong in ("news", [1], {"news": True}):
        with pytest.raises(ProvenanceError, match="a list of their names"):
            Taxonomy.from_mapping({**plain.to_mapping(), "sensitive": wrong})


def test_what_an_archive_marks_is_all_that_its_taxonomies_call_sensitive() -> None:
    told = [json.dumps({"sensitive": names}).encode() for names in (["a"], ["b", "c"])]
    archive = {"r/targets/taxonomy/firm/1.x.json": told[0], "s/targets/taxonomy/other/2.y.json": told[1]}
    archive |= {"manifests/z.json": b'{"sensitive": ["never"]}', "r/targets/taxonomy/firm/z.json": b"[]"}
    assert marked_in(archive) == {"a", "b", "c"}

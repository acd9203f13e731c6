"""What was prepared before a run, found without one: whose digest it has, what is asked of whom, what is left out."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cosmati.core.batch import Batch
from cosmati.core.state import parameter_root
from cosmati.data.plain_files import digests_of_files
from cosmati.data.tokens import ByteTokenizer
from cosmati.data.vouching import VouchedShards
from cosmati.errors import ProvenanceError
from cosmati.provenance.artifact import Artifact
from cosmati.provenance.authority.errors import DeclaredOnlyError
from cosmati.provenance.voucher import VouchedData
from cosmati.train import artifacts
from cosmati.train.artifacts import _digest_of, _num_bytes, _own_digest, artifact, artifacts_of, with_base
from cosmati.train.content import content_digest

BASE = {"root": "ab12", "file": "there.safetensors", "run": "one"}


def vouched(*roots: str) -> VouchedData:
    return VouchedData("then", tuple(SimpleNamespace(root=root) for root in roots), {})  # type: ignore[misc]


def signed(*digests: str) -> VouchedShards:
    """A folder that somebody has signed, with files of these digests."""
    found: Any = object.__new__(VouchedShards)
    shards = [SimpleNamespace(sha256=one) for one in digests]
    told = {"manifest": SimpleNamespace(shards=shards), "voucher": SimpleNamespace(root="r"), "opened": "then"}
    for name, value in (told | {"archive": {}, "lost": (), "kept": (vouched("r"),)}).items():
        object.__setattr__(found, name, value)
    made: VouchedShards = found
    return made


def given(**changed: Any) -> Any:
    config = {"artifacts": (), "require_signed": False, "load_weights": None, "trusted_roots": ()}
    own = {name: changed.pop(name) for name in list(changed) if name in config}
    return SimpleNamespace(
        **{"policy": None, "data": None, "evaluation": None} | changed, config=SimpleNamespace(**config | own)
    )


class Around:
    """A loader around so many data sets, of which the innermost has a digest."""

    def __init__(self, depth: int, digest: Any = "abcd") -> None:
        if depth:
            self.dataset = Around(depth - 1, digest)
        else:
            self.digest = digest


# ---------------------------------------------------------------------------------------- its digest


def test_a_file_has_its_bytes_digest_and_a_folder_that_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    expected = hashlib.sha256(b"x").hexdigest()
    assert _digest_of("tokenizer", tmp_path / "file") == _digest_of("tokenizer", str(tmp_path / "file")) == expected
    folder = content_digest(dict(digests_of_files(tmp_path))).hex()
    assert _digest_of("tokenizer", tmp_path) == folder != expected
    monkeypatch.setenv("HOME", str(tmp_path))
    assert artifact("tokenizer", "~/file").digest == expected


def test_what_says_a_digest_of_itself_is_believed_and_what_is_around_it_too() -> None:
    assert [_own_digest(Around(depth)) for depth in (0, 1, 7, 8)] == ["abcd", "abcd", "abcd", ""]
    assert _own_digest(None) == _own_digest(Around(0, b"ab")) == ""
    assert _digest_of("statistics", Around(2, "ef")) == "ef"
    assert _digest_of("tokenizer", ByteTokenizer()) == ByteTokenizer().digest


def test_a_model_has_its_root_and_a_nest_that_of_its_content() -> None:
    model = nn.BatchNorm1d(2)
    assert _digest_of("reference model", model) == parameter_root(dict(model.state_dict())).hex()
    nest = {"mean": np.zeros(2), "more": [torch.ones(1), 2.0]}
    assert _digest_of("statistics", nest) == content_digest(nest).hex()
    assert _digest_of("statistics", 0) == content_digest(0).hex()


def test_what_has_a_vocabulary_is_a_tokenizer_though_it_may_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    class Called:
        def get_vocab(self) -> dict[str, int]:
            return {}

        def __call__(self) -> None:
            """Tokenize."""

    own = Called()
    monkeypatch.setattr(artifacts, "HuggingFaceTokenizer", lambda one: SimpleNamespace(digest=f"of {one is own}"))
    assert _digest_of("tokenizer", own) == "of True"


@pytest.mark.parametrize("content", [None, len, iter([1])])
def test_what_can_not_be_told_is_named(content: Any) -> None:
    with pytest.raises(
        ProvenanceError, match=rf"^The content of the tokenizer can't be told of a {type(content).__name__}\."
    ):
        _digest_of("tokenizer", content)


# ---------------------------------------------------------------------------------------- named by the user


def test_a_path_is_its_own_origin_unless_another_is_given(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    found = artifact("tokenizer", tmp_path / "file")
    assert (found.kind, found.origin, found.name, found.vouched, found.sources) == (
        "tokenizer",
        str(tmp_path / "file"),
        "",
        None,
        (),
    )
    assert artifact("tokenizer", tmp_path / "file", origin="the hub", name="n").origin == "the hub"
    assert artifact("tokenizer", tmp_path / "file", origin="the hub", name="n").label == "tokenizer n"
    assert artifact("statistics", [1.0]).origin == ""


def test_who_vouches_for_a_folder_is_asked_of_that_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    asked: list[Any] = []
    source, authority = signed("ab"), object()
    monkeypatch.setattr(artifacts, "vouched_files", lambda *all_given: asked.append(all_given) or source)
    for path in (tmp_path, str(tmp_path)):
        found = artifact("tokenizer", path, authority=authority)  # type: ignore[arg-type]
        assert asked.pop() == (tmp_path, authority)
        assert (found.sources, found.vouched is None) == ((source,), False)
    for odd, kind in ((tmp_path / "file", type(tmp_path).__name__), (str(tmp_path / "no"), "str"), ([1.0], "list")):
        with pytest.raises(ProvenanceError, match=rf"^authority= is for a folder .* the tokenizer is a {kind}\. Give"):
            artifact("tokenizer", odd, authority=authority)  # type: ignore[arg-type]
    assert asked == []


def test_a_data_set_that_is_vouched_for_brings_who_does() -> None:
    source = signed("ab")
    data = SimpleNamespace(digest="cd", sources=[SimpleNamespace(vouched=source)])
    found = artifact("evaluation data", data)
    assert (found.digest, found.sources, found.vouched) == ("cd", (source,), vouched("r"))


# ---------------------------------------------------------------------------------------- what is found

EVALUATED = SimpleNamespace(data=[torch.zeros(2)])
LABELS = ("base weights", "evaluation data")


@pytest.mark.parametrize(
    ("changed", "labels"),
    [
        ({}, ()),
        ({"policy": object()}, LABELS),
        ({"data": SimpleNamespace(sources=[SimpleNamespace(vouched=signed("ab"))])}, LABELS),
    ],
)
def test_of_a_governed_run_base_weights_and_evaluation_data_are_found(
    changed: dict[str, Any], labels: tuple[str, ...]
) -> None:
    made = artifacts_of(given(evaluation=EVALUATED, **changed), BASE)
    assert tuple(one.label for one in made) == labels


def test_what_the_user_has_named_is_not_found_again() -> None:
    own = Artifact("base weights", "cd", name="mine")
    made = artifacts_of(given(policy=object(), artifacts=(own,), evaluation=EVALUATED), BASE)
    assert [one.label for one in made] == ["base weights mine", "evaluation data"]
    alone = artifacts_of(given(artifacts=(own,), evaluation=EVALUATED), BASE)
    assert alone == (own,)


def test_what_nobody_vouches_for_is_refused_where_only_what_is_signed_is_taken() -> None:
    with pytest.raises(DeclaredOnlyError, match="the evaluation data is ungoverned"):
        artifacts_of(given(evaluation=EVALUATED, require_signed=True), {})
    assert artifacts_of(given(require_signed=True), {}) == ()


def test_an_evaluation_s_data_that_are_named_stand_for_no_other_evaluation_s() -> None:
    evaluation = {name: SimpleNamespace(data=[torch.zeros(2)]) for name in ("first", "second")}
    for name in ("", "first", "third"):
        own = Artifact("evaluation data", "cd", name=name, vouched=vouched("r"))
        others = [f"evaluation data {one}" for one in evaluation if one != name]
        made = artifacts_of(given(policy=object(), artifacts=(own,), evaluation=evaluation), {})
        assert {one.label for one in made} == {f"evaluation data {name}".strip(), *others}
        with pytest.raises(DeclaredOnlyError, match=f"{others[0]} is ungoverned"):
            artifacts_of(given(artifacts=(own,), evaluation=evaluation, require_signed=True), {})


def test_base_weights_are_one_of_the_files_that_were_signed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("x")
    own = hashlib.sha256(b"x").hexdigest()

    def base(kind: str, *digests: str) -> Artifact:
        return Artifact(kind, "cd", vouched=vouched("r"), sources=(object(), signed(*digests)))

    def found(*named: Artifact, **changed: Any) -> Any:
        return artifacts_of(given(**{"artifacts": named, "require_signed": True, "load_weights": path} | changed), BASE)

    assert len(found(base("base weights", "ef", own))) == 1
    words = rf"^require_signed=True, and {path} isn't one of the files that were signed as base weights"
    with pytest.raises(DeclaredOnlyError, match=words):
        found(base("base weights", "ef"))
    with pytest.raises(DeclaredOnlyError, match=words):
        found(base("base weights", "ef"), dataclasses.replace(base("tokenizer", own)))
    with pytest.raises(DeclaredOnlyError, match="isn't one of the files"):
        found(base("base weights", own), load_weights=tmp_path)
    assert len(found(base("base weights", "ef"), require_signed=False)) == 1
    assert artifacts_of(given(artifacts=(base("base weights", "ef"),), require_signed=True), {}) != ()


@pytest.mark.parametrize(
    ("parent", "origin"), [(BASE, "there.safetensors"), ({"root": "ab12", "run": "one"}, "one"), ({"root": "ab12"}, "")]
)
def test_a_resumed_run_has_the_base_weights_that_its_checkpoint_says(parent: dict[str, str], origin: str) -> None:
    identity = {f"parent.{name}": value for name, value in parent.items()} | {"seed": 3, "parental.root": "no"}
    own = Artifact("tokenizer", "cd")
    assert with_base([own], identity) == (Artifact("base weights", "ab12", origin), own)
    named = Artifact("base weights", "ef", name="mine")
    assert with_base(iter([own, named]), identity) == (own, named)
    assert with_base([own], {"seed": 3, "parent.asked": True}) == (own,)


# ---------------------------------------------------------------------------------------- evaluation data


def test_each_evaluation_s_data_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "_LARGEST", 8)
    source = signed("ab")
    large = SimpleNamespace(sources=[SimpleNamespace(vouched=source)])
    evaluations = {
        "own": SimpleNamespace(data=Around(1, "ef")),
        "list": SimpleNamespace(data=[torch.zeros(2)]),
        "tuple": SimpleNamespace(data=(torch.zeros(2),)),
        "long": SimpleNamespace(data=[torch.zeros(3)]),
        "loader": SimpleNamespace(data=large),
        "none": SimpleNamespace(),
    }
    found = {one.name: one for one in artifacts._evaluated_on(evaluations)}
    assert list(found) == list(evaluations)
    assert {one.kind for one in found.values()} == {"evaluation data"}
    digests = {name: content_digest(evaluations[name].data).hex() for name in ("list", "tuple")}
    assert {name: one.digest for name, one in found.items() if one.digest} == {"own": "ef", **digests}
    assert [found[name].origin for name in ("long", "loader", "none")] == ["list", "SimpleNamespace", "NoneType"]
    assert (found["loader"].sources, found["loader"].vouched) == ((source,), vouched("r"))
    assert (found["long"].sources, found["long"].vouched) == ((), None)
    (alone,) = artifacts._evaluated_on(evaluations["list"])
    assert (alone.name, alone.digest) == ("", digests["list"])
    assert list(artifacts._evaluated_on(None)) == []


def test_bytes_are_counted_wherever_they_lie() -> None:
    assert _num_bytes(torch.zeros(3, dtype=torch.float64)) == 24
    assert _num_bytes(np.zeros(3, dtype=np.int16)) == 6
    assert _num_bytes(Batch({"x": torch.zeros(2)}, None)) == 8  # type: ignore[arg-type]
    assert _num_bytes([torch.zeros(1), (np.zeros(1), {"a": torch.zeros(2), "b": "text"}), 7, None]) == 20
    assert _num_bytes("text") == 0

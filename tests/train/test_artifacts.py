"""Preparation artifacts: named in plan, record, ledger and pages; and a resume with others is refused by name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rfc8785
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from cosmati import Classification, Evaluation, InMemory, RunConfig, Trainer, accuracy, artifact, batches
from cosmati.cli.main import app
from cosmati.core.batch import Batch
from cosmati.core.lineage import Lineage
from cosmati.core.state import parameter_root
from cosmati.data.plain_files import describe_files
from cosmati.data.tokens import ByteTokenizer
from cosmati.errors import CheckpointError, CosmatiError, DataError, ProvenanceError, TamperError
from cosmati.explorer.report import render_report
from cosmati.explorer.run_view import read_run
from cosmati.ledger.keys import load_or_create_key
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.verify import verify_ledger
from cosmati.ledger.writer import LedgerWriter, details_digest
from cosmati.optim import SGD
from cosmati.provenance.artifact import Artifact
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.recipes.digits import digits_baseline
from cosmati.records.artifacts import problem_with_artifacts
from cosmati.routing.policy_file import load_policy
from tests.ledger.ledgers import ORIGIN, run_entry

POLICY = load_policy("version: 1\ntaxonomy: t\nrules:\n  - {class: all, weight: 1}\n")
TAXONOMY = Taxonomy("t", "1", (("all", "All."),))
MEAN = {"mean": np.array([0.5, 0.25]), "std": 1.0}


def rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(16, 2, generator=generator), torch.arange(16) % 2


def trainer(folder: Path | None, *, governed: bool = True, evaluated: Any = None, **config: Any) -> Trainer:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"budget": "2ba", "num_microbatches": 2, "num_threads": 1, "run_folder": folder}
    return Trainer(
        nn.Linear(2, 2),
        Classification(2),
        InMemory(rows(), 8),
        optimizers=[SGD(lr=0.1)],
        policy=POLICY if governed else None,
        taxonomy=TAXONOMY if governed else None,
        evaluation=evaluated,
        config=RunConfig(**settings | {"checkpoint_every": "1ba"} | config),
    )


def told(folder: Path) -> dict[str, Mapping[str, Any]]:
    """What the ledger's last tables say, by kind."""
    details = VerifiedLedger(folder / "ledger").tables[-1].details
    return {one["kind"]: one for one in details.get("artifacts", ())}


@pytest.mark.long
def test_each_is_named_everywhere(tmp_path: Path) -> None:
    base = tmp_path / "base.safetensors"
    base.write_bytes(b"weights of somebody")
    named = [
        artifact("tokenizer", ByteTokenizer(), origin="<b>ours</b>"),
        artifact("statistics", MEAN),
        artifact("base weights", base),
        artifact("reference model", nn.Linear(1, 1), name="teacher"),
    ]
    made = trainer(tmp_path / "run", artifacts=named, evaluated=Evaluation(batches(rows(1), 8), accuracy))
    digests = {
        "tokenizer": ByteTokenizer().digest,
        "base weights": hashlib.sha256(b"weights of somebody").hexdigest(),
        "reference model": parameter_root(nn.Linear(1, 1).state_dict()).hex(),
    }
    made.fit()
    found = told(tmp_path / "run")
    assert {*found} == {"tokenizer", "statistics", "base weights", "reference model", "evaluation data"}
    assert {one["state"] for one in found.values()} == {"ungoverned"}
    for kind in ("tokenizer", "base weights"):
        assert found[kind]["digest"] == digests[kind]
    assert found["base weights"]["origin"] == str(base)
    verified = CliRunner().invoke(app, ["ledger", "verify", str(tmp_path / "run")], env={"COLUMNS": "200"})
    shown = CliRunner().invoke(app, ["ledger", "show", str(tmp_path / "run")])
    record = json.loads((tmp_path / "run" / "run.json").read_text())["digests"]
    page = render_report(title="t", run=read_run(tmp_path / "run"))
    assert verified.exit_code == shown.exit_code == 0, verified.output + shown.output
    for one in found.values():
        label = f"{one['kind']} {one['name']}".strip()
        words = f"{label}: ungoverned: nobody vouches for it; {one['digest'][:16]}"
        for text in (str(made.plan), verified.output, shown.output, page):
            assert words in text
        assert record[f"artifact: {label}"].startswith("ungoverned")
    assert "<b>ours" not in page
    assert "contradicts" not in page


def test_the_commitment_is_over_what_is_told(tmp_path: Path) -> None:
    trainer(tmp_path / "run", artifacts=artifact("tokenizer", ByteTokenizer())).fit()
    ledger = VerifiedLedger(tmp_path / "run" / "ledger")
    committed = dict(ledger.run.commitments)["artifacts"]
    assert hashlib.sha256(rfc8785.dumps({"artifacts": ledger.details["artifacts"]})).digest() == committed


def test_a_run_without_any_says_nothing(tmp_path: Path) -> None:
    """Who governs nothing notices nothing; who governs is told of evaluation data without being asked."""
    plain = trainer(
        tmp_path / "plain", governed=False, ledger=True, evaluated=Evaluation(batches(rows(1), 8), accuracy)
    )
    plain.fit()
    assert "ungoverned" not in str(plain.plan)
    assert not told(tmp_path / "plain")
    assert "artifacts" not in dict(VerifiedLedger(tmp_path / "plain" / "ledger").run.commitments)
    assert not any(name.startswith("artifacts") for name in plain.prepared.identity)


def test_base_weights_of_another_run_are_found_and_stay(tmp_path: Path) -> None:
    parent = trainer(tmp_path / "parent", governed=False)
    parent.fit()
    root = parameter_root(dict(parent.model.state_dict())).hex()
    trainer(tmp_path / "run", load_weights=tmp_path / "parent").fit()
    assert (told(tmp_path / "run")["base weights"]["digest"], told(tmp_path / "run")["base weights"]["origin"]) == (
        root,
        "parent",
    )
    (tmp_path / "parent").rename(tmp_path / "gone")
    trainer(tmp_path / "run", budget="4ba", change="budget").fit()
    assert told(tmp_path / "run")["base weights"]["digest"] == root
    changed = {name for one in verify_ledger(tmp_path / "run" / "ledger").amendments for name, _, _ in one.changes}
    assert not any("artifact" in name for name in changed)


@pytest.mark.parametrize("kind", ["tokenizer", "base weights", "statistics", "reference model", "evaluation data"])
def test_a_resume_with_another_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run"
    trainer(folder, artifacts=[artifact(kind, MEAN)]).fit()
    for other in ([artifact(kind, {"mean": 0.5})], [], [artifact(kind, MEAN, name="second")]):
        with pytest.raises(CheckpointError, match=f"of another run: artifacts: {kind}"):
            trainer(folder, artifacts=other, budget="3ba", change="budget").fit()
    trainer(folder, artifacts=[artifact(kind, MEAN)], budget="3ba", change="budget").fit()
    assert verify_ledger(folder / "ledger").num_steps == 3


def test_who_has_named_none_names_them_later_on_record(tmp_path: Path) -> None:
    """Runs of an earlier release have named none."""
    folder = tmp_path / "run"
    trainer(folder).fit()
    tokenizer = artifact("tokenizer", ByteTokenizer())
    trainer(folder, artifacts=[tokenizer], budget="3ba", change="budget").fit()
    amended = verify_ledger(folder / "ledger").amendments[-1].changes
    assert ("artifacts.tokenizer", "", tokenizer.digest) in amended
    assert told(folder)["tokenizer"]["digest"] == tokenizer.digest
    with pytest.raises(CheckpointError, match="artifacts: tokenizer"):
        trainer(folder, budget="4ba", change="budget").fit()


@pytest.mark.parametrize(
    ("kind", "content", "why"),
    [
        ("tokeniser", ByteTokenizer(), "no kind of preparation artifact"),
        ("tokenizer", None, "can't be told of a NoneType"),
        ("tokenizer", len, "can't be told of a builtin_function_or_method"),
        ("statistics", iter([1]), "can't be told"),
        ("tokenizer", "nowhere/tokenizer.json", "holds no file"),
    ],
)
def test_what_cant_be_told_is_refused(kind: str, content: Any, why: str) -> None:
    with pytest.raises(CosmatiError, match=why):
        artifact(kind, content)


def test_an_authority_is_for_folders_that_were_signed(tmp_path: Path) -> None:
    with pytest.raises(ProvenanceError, match="authority= is for a folder"):
        artifact("tokenizer", ByteTokenizer(), authority=object())  # type: ignore[arg-type]
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="nobody can have signed"):
        artifact("tokenizer", tmp_path, authority=object())  # type: ignore[arg-type]


def test_two_of_one_name_or_something_else_are_refused() -> None:
    one = artifact("tokenizer", ByteTokenizer())
    with pytest.raises(ProvenanceError, match="Two preparation artifacts"):
        RunConfig(artifacts=(one, artifact("tokenizer", MEAN)))
    with pytest.raises(ProvenanceError, match="A str is no preparation artifact"):
        RunConfig(artifacts=("tokenizer.json",))  # type: ignore[arg-type]
    with pytest.raises(ProvenanceError, match="isn't hexadecimal"):
        Artifact("tokenizer", "none")
    assert len(RunConfig(artifacts=(one, dataclasses.replace(one, name="b"))).artifacts) == 2


def test_a_folder_and_a_manifest_have_the_files_digests(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("vocab.txt", "sub/merges.txt"):
        (tmp_path / name).write_text(name)
    before = artifact("tokenizer", tmp_path)
    manifest = describe_files(tmp_path, class_path="prepared/tokenizers", source="bpe", version="1")
    assert {one.name: one.sha256 for one in manifest.shards} == {
        name: hashlib.sha256(name.encode()).hexdigest() for name in ("vocab.txt", "sub/merges.txt")
    }
    assert artifact("tokenizer", tmp_path).digest == before.digest, "manifest and salt are no content"
    assert describe_files(tmp_path, class_path="prepared/tokenizers", source="bpe", version="1") == manifest
    (tmp_path / "vocab.txt").write_text("other")
    assert artifact("tokenizer", tmp_path).digest != before.digest
    with pytest.raises(DataError, match="says otherwise"):
        describe_files(tmp_path, class_path="prepared/tokenizers", source="bpe", version="1")


GOOD = {"kind": "tokenizer", "name": "", "digest": "ab", "origin": "", "state": "ungoverned"}
SIGNED = {"state": "signed", "provenance": {"sources": [{"target": "t/c/s/1", "root": "ab"}]}}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"kind": "tokeniser"}, "no known kind"),
        ({"digest": "AB"}, "its digest is none"),
        ({"origin": 3}, "doesn't say"),
        ({"state": "trusted"}, "neither signed"),
        ({"state": "signed"}, "neither signed"),
        ({**SIGNED, "state": "ungoverned"}, "neither signed"),
        ({"state": "signed", "provenance": {"sources": []}}, "neither signed"),
        ({"state": "signed", "provenance": {"sources": [{"target": 3}]}}, "neither signed"),
    ],
)
def test_a_ledger_that_says_nonsense_is_found(wrong: Mapping[str, Any], why: str) -> None:
    assert why in problem_with_artifacts([{**GOOD, **wrong}])
    assert why in problem_with_artifacts([GOOD, {**GOOD, "name": "b", **wrong}])


def test_what_a_ledger_may_say_is_taken() -> None:
    assert not problem_with_artifacts([GOOD, {**GOOD, "name": "b", **SIGNED}])
    assert problem_with_artifacts([]) == problem_with_artifacts({}) != ""
    assert "twice" in problem_with_artifacts([GOOD, GOOD])


def test_who_names_base_weights_names_them_alone(tmp_path: Path) -> None:
    trainer(tmp_path / "parent", governed=False).fit()
    own = artifact("base weights", tmp_path / "parent" / "checkpoints", name="v2", origin="the hub")
    made = trainer(tmp_path / "run", load_weights=tmp_path / "parent", artifacts=[own])
    assert [one.label for one in made.prepared.artifacts] == ["base weights v2"]


@pytest.mark.parametrize(
    ("told", "committed", "why"),
    [
        ([GOOD], [{**GOOD, "digest": "cd"}], "it commits to other preparation artifacts than it names"),
        ([GOOD], None, "it commits to other preparation artifacts than it names"),
        (None, [GOOD], "no list of them"),
        ([{**GOOD, "state": "signed"}], [{**GOOD, "state": "signed"}], "neither signed"),
        (None, None, ""),
        ([GOOD], [GOOD], ""),
    ],
)
def test_a_ledger_that_names_others_than_it_commits_to_is_refused(
    tmp_path: Path, told: Any, committed: Any, why: str
) -> None:
    entry, details = run_entry()
    details |= {"artifacts": told}
    mine = () if committed is None else (("artifacts", details_digest({"artifacts": committed})),)
    entry = dataclasses.replace(entry, commitments=(*entry.commitments, *mine), details_digest=details_digest(details))
    key = load_or_create_key(tmp_path / "key", name=ORIGIN)
    with LedgerWriter.create(tmp_path / "ledger", origin=ORIGIN, key=key) as writer:
        writer.append(entry, details)
    if why:
        with pytest.raises(TamperError, match=why):
            verify_ledger(tmp_path / "ledger")
    else:
        assert verify_ledger(tmp_path / "ledger").size == 1


def test_a_recipes_text_is_about_how_it_trains() -> None:
    """Runs whose recipes differ in what somebody has signed are repetitions of one."""
    plain = digits_baseline()
    named = dataclasses.replace(plain.config, artifacts=(artifact("statistics", MEAN),))
    assert dataclasses.replace(plain, config=named).text == plain.text


@pytest.mark.parametrize("held", [torch.zeros, np.zeros])
def test_evaluation_data_that_are_too_large_arent_hashed_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: Any
) -> None:
    monkeypatch.setattr("cosmati.train.artifacts._LARGEST", 60)
    nothing = Evaluation([{"x": held(8), "y": held(8)}], {"m": lambda model, data: torch.zeros(())})
    made = trainer(None, evaluated={"large": nothing, "small": Evaluation([(held(1), held(1))], accuracy)})
    large, small = made.prepared.artifacts
    assert (large.label, large.digest, large.origin) == ("evaluation data large", "", "list")
    assert small.digest
    assert "evaluation data large: ungoverned: nobody vouches for it; its content isn't told, from list" in str(
        made.plan
    )


@pytest.mark.parametrize(("limit", "is_told"), [(127, False), (128, True)])
def test_what_evaluation_data_hold_is_counted_in_batches_and_whatever_lies_in_them(
    monkeypatch: pytest.MonkeyPatch, limit: int, is_told: bool
) -> None:
    """128 bytes: 32 and 64 in a batch of Cosmati's own, 16 and 16 in one of somebody's, and what has none."""
    monkeypatch.setattr("cosmati.train.artifacts._LARGEST", limit)
    own = Batch({"x": torch.zeros(8), "more": [np.zeros(8)]}, Lineage.of_rows(0, 8))
    data = [own, (torch.zeros(4), {"y": np.zeros(2), "name": "rows"}), None]
    made = trainer(None, evaluated=Evaluation(data, {"m": lambda model, data: torch.zeros(())}))
    (found,) = made.prepared.artifacts
    assert bool(found.digest) == is_told

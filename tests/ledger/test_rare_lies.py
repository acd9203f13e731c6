"""What a ledger seldom has is judged like what it often has: a change at step 0, a late cosignature, a sealed norm."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger import sealing
from cosmati.ledger.columns import ColumnScan, StepBlock
from cosmati.ledger.cosigned import cosigned_heads, keep_cosigned, refuse_contradictions
from cosmati.ledger.derived.opened import open_derived
from cosmati.ledger.derived.views import run_sql
from cosmati.ledger.difference import compare_tables
from cosmati.ledger.files import VKEY_FILE
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import TreeHead, checkpoint_text
from cosmati.ledger.reader import read_head, read_verifier_key
from cosmati.ledger.sealing import BLOCK_STEPS, SEALED, OperatorKeys, divided, seal_names, sealed
from cosmati.ledger.step_details import read_details
from cosmati.ledger.verify import LedgerReport, verify_ledger
from cosmati.ledger.writer import details_digest
from cosmati.records.ledger import ResumeEntry

from .ledgers import CLASSES, ORIGIN, run_entry, step_entry
from .test_amend import FIRST, Policy, amended
from .test_verify import KEY, write_signed

SIGNED = {"sources": [{"root": "ab" * 32, "target": "policy/main/1", "keyids": ["k"]}], "statement": {}}
LOOSE = Policy("loose", ["low", "high"], {name: [([1.0, 1.0], "admit")] * 2 for name in "abc"})


def loosened(path: Path, back: int, monkeypatch: pytest.MonkeyPatch) -> LedgerReport:
    """Write a ledger whose signed policy the operator loosens when it goes back to a step."""
    monkeypatch.setitem(FIRST.details, "policy_provenance", SIGNED)
    items: list[Any] = [FIRST.run(), *(FIRST.step(step) for step in range(3))]
    items += [(ResumeEntry(back, 1 + back, 1), None), LOOSE.amend(back), *(LOOSE.step(s, 1) for s in range(back, 5))]
    write_signed(path, items, KEY)
    return verify_ledger(path)


@pytest.mark.parametrize("back", [0, 1])
def test_what_an_operator_loosens_alone_is_told_from_step_0_on(
    back: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = loosened(tmp_path / "ledger", back, monkeypatch).policies
    assert first.problems(KEY.verifier.text) == []
    (problem,) = second.problems(KEY.verifier.text)
    assert problem.startswith(f"from step {back} on more is allowed than was signed")


def test_a_later_cosignature_of_a_smaller_tree_contradicts_one_of_a_larger_one(tmp_path: Path) -> None:
    log, witness = SigningKey.generate("log.example"), SigningKey.generate("witness.example")

    def seen(folder: Path, *cosigned: tuple[int, int]) -> None:
        folder.mkdir()
        for size, time in cosigned:
            text = checkpoint_text("log.example", TreeHead(size, bytes(32)))
            keep_cosigned(folder, log.sign_note(text), witness.cosign(text, time), witness.witness)
        heads = cosigned_heads(folder, [witness.witness])
        assert [[one.time for one in head.cosignatures] for head in heads] == [[5000], [9500]]
        refuse_contradictions(heads)

    seen(tmp_path / "one", (5, 5000), (5, 9000), (6, 9500))
    with pytest.raises(TamperError, match="5 entries at 9900, and 6 at the earlier 9500"):
        seen(tmp_path / "two", (5, 5000), (5, 9900), (6, 9500))


@pytest.mark.parametrize("norm", [-1.0, float("inf"), float("nan")])
def test_a_sealed_norm_that_is_none_is_refused_as_an_open_one_is(
    norm: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, details = run_entry()
    details = {**details, SEALED: {"classes": ["news"], "block_steps": BLOCK_STEPS}}
    step, of_step = step_entry(0)
    assert "1" in of_step["gradient_norm"]
    of_step["gradient_norm"]["1"] = [norm, 2.0]
    keys = OperatorKeys(bytes(32), ORIGIN)
    clear, parts = divided(of_step, step.microbatches, seal_names(CLASSES, ["news"]))
    # No honest writer writes what JSON doesn't have.
    monkeypatch.setattr(sealing, "rfc8785", SimpleNamespace(dumps=lambda value: json.dumps(value).encode()))
    boxed = sealed(clear, parts, keys, 0)
    items: list[Any] = [
        (replace(run, details_digest=details_digest(details)), details),
        (replace(step, details_digest=details_digest(boxed)), boxed),
    ]
    write_signed(tmp_path, items, KEY)
    blocks = ColumnScan(tmp_path, read_head(tmp_path, KEY.verifier)).blocks()
    (block,) = [one for one in blocks if isinstance(one, StepBlock)]
    with pytest.raises(TamperError, match="neither a norm nor null"):
        read_details(block, ORIGIN, keys)
    assert read_details(block, ORIGIN).sealed.any()


def test_a_derived_ledger_is_asked_twice_and_says_where_it_has_no_checkpoint(tmp_path: Path) -> None:
    write_signed(tmp_path / "ledger", amended(), KEY)
    with open_derived(tmp_path / "ledger") as derived:
        one, other = ([*run_sql(derived, "SELECT count(*) FROM steps")[1]] for _ in range(2))
        assert one == other != []
        with pytest.raises(LedgerError, match=r"Permission Error|not allowed|disabled"):
            run_sql(derived, "SELECT * FROM read_csv('/etc/hostname')")
        with pytest.raises(LedgerError, match=r"no checkpoint after 3 steps\. It has none\.$"):
            derived.milestone(step=3)


@pytest.mark.parametrize(("logged", "made"), [([], [[]]), ({}, []), ([True], [1]), ({"a": []}, {"a": {}})])
def test_what_is_empty_or_true_is_compared_like_anything(logged: object, made: object) -> None:
    assert len([*compare_tables(0, {"bands": logged}, {"bands": made}, ["bands"])]) == 1
    assert not [*compare_tables(0, {"bands": logged}, {"bands": logged}, ["bands"])]


def test_a_key_with_other_white_space_is_said_once(tmp_path: Path) -> None:
    write_signed(tmp_path, amended(), KEY)
    path = tmp_path / VKEY_FILE
    path.write_text(path.read_text() + "\n")
    with pytest.raises(TamperError) as caught:
        read_verifier_key(tmp_path)
    assert str(caught.value).count(str(path)) == 1

"""The questions to a ledger as commands: what long ledgers answer from derived tables, short ones do from entries."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cosmati.cli import ledger_queries
from cosmati.cli.main import app
from cosmati.ledger.cosigned import ask_witness
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.reader import read_head
from cosmati.ledger.replay_result import ReplayResult, SegmentResult
from cosmati.ledger.witness import Witness, create_witness
from cosmati.ledger.writer import details_digest
from cosmati.records.ledger import CheckpointEntry, RunEntry
from tests.ledger.ledgers import ORIGIN, append_steps, digest, write_run
from tests.ledger.test_amend import FIRST, SECOND, amended
from tests.ledger.test_verify import Item, write_signed

from .test_ledger_commands import no, unanswered, yes

pytest.importorskip("duckdb", reason="the extra `queries` isn't installed")

pytestmark = pytest.mark.long
KEY = SigningKey.generate(ORIGIN)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A run that was amended, with a checkpoint that was superseded and one that wasn't."""
    items = amended()
    items.insert(5, (CheckpointEntry(4, digest("first"), digest("root")), None))
    items.append((CheckpointEntry(5, digest("second"), digest("root")), None))
    write_signed(tmp_path / "run" / "ledger", items, KEY)
    return tmp_path / "run"


@pytest.fixture
def long(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, as if it were long."""
    monkeypatch.setattr(ledger_queries, "READ_WHOLE", 0)
    return path


def records(*arguments: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in yes(*arguments, "--format", "json").splitlines() if line.startswith("{")]


def asked_in_sql(path: Path, *arguments: str) -> Any:
    """Return the rows on standard output, and what they came from on the other."""
    return CliRunner().invoke(app, ["ledger", "sql", str(path), *arguments])


@pytest.mark.parametrize("asked", [[], ["--class", "b"], ["--region", "low"], ["--class", "c"]])
def test_both_ways_give_the_same_answer_and_say_what_it_came_from(
    path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    short = records("query", path, *asked)
    text = yes("query", path, *asked)
    assert "Read from all 12 signed entries, root " in text
    assert not (path / "derived").exists(), "a short ledger needs no tables"
    monkeypatch.setattr(ledger_queries, "READ_WHOLE", 0)
    for option in ([], ["--prove"]):
        told = records("query", path, *asked, *option)
        keys = [key for key in (told or [{}])[0] if key not in ("said", "first_step", "last_step")]
        assert [[one[key] for key in keys] for one in told] == [[one[key] for key in keys] for one in short]
    long = yes("query", path, *asked)
    assert "Derived from tree of size 12, root " in long
    assert "level L0" in long
    assert (
        long.splitlines()[-1].split("root ")[1].split(";")[0] == text.splitlines()[-1].split("root ")[1].split(";")[0]
    )
    assert "Read from all 12 signed entries again. Derived" in yes("query", path, *asked, "--prove")
    assert ("None." in long) == (asked == ["--class", "c"])


WAYS = (
    ["query"],
    ["query", "--prove"],
    ["query", "--class", "c", "--region", "top"],
    ["show"],
    ["derive"],
    ["policy-effect"],
)


@pytest.mark.parametrize("is_long", [pytest.param(False, marks=pytest.mark.slow), True])
def test_each_command_says_the_level_that_witnesses_and_replays_give(
    path: Path, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    if is_long:
        monkeypatch.setattr(ledger_queries, "READ_WHOLE", 0)
    create_witness(path / "w", "w.example")
    stranger = create_witness(path / "v", "v.example").text
    witness = Witness(path / "w", now=lambda: 1_700_000_000)
    witness.trust(KEY.verifier)
    ask_witness(path / "ledger", witness.key, witness.send)
    head = read_head(path / "ledger", KEY.verifier)
    whole = SegmentResult(first=0, end=6, start=0, from_entry_0=True, outcome="equal", num_differences=0)
    result = ReplayResult(
        origin=ORIGIN,
        vkey=KEY.verifier.text,
        size=head.size,
        root=head.root.hex(),
        num_steps=6,
        has_ended=True,
        is_witnessed=False,
        seed="",
        segments=(whole,),
        compares_rows=True,
    )
    (path / "replayed").write_bytes(result.to_bytes())
    seen = ("--witness", witness.key.text)
    for name, *rest in WAYS:
        for asked, level in (
            ((), "L0: "),
            (seen, "L1: witnessed"),
            (("--replayed", path / "replayed"), "L3: the whole"),
        ):
            said = yes(name, path, *rest, *asked)
            assert level in said, (name, rest, said)
            assert ("L0" in said) == (level == "L0: ")
            is_quick = name == "policy-effect" or (is_long and [name, *rest] == ["query"])
            assert not is_quick or ("--prove reads its entries" in said) == (level != "L0: ")
    sql = asked_in_sql(path, "SELECT level FROM ledger", *map(str, seen))
    assert (sql.stdout.count("L1: witnessed"), sql.stderr.count("level L1: witnessed")) == (1, 1)
    assert "too few" in yes("query", path, *seen, "--witness", stranger)
    assert unanswered("query", path, *seen, "--quorum", "2")


def test_when_something_was_taught_is_told(long: Path) -> None:
    assert "12 rows in      6 steps (0 to 5)" in yes("query", long, "--class", "a", "--region", "low", "--steps")
    assert "  steps 0-5" in yes("query", long, "--class", "a", "--region", "low", "--steps")
    (told,) = records("query", long, "--class", "b", "--region", "top", "--steps")
    assert (told["first_step"], told["last_step"], told["steps"]) == (3, 5, [[3, 5]])
    phases = {
        (one["group"], one["class_name"], one["region"]): one["num_rows"]
        for one in records("query", long, "--each", "phase")
    }
    assert (phases["warm", "a", "low"], phases["main", "a", "low"]) == (8, 4)
    policies = {
        (one["group"], one["region"]): one["num_rows"]
        for one in records("query", long, "--each", "policy", "--class", "b")
    }
    assert policies == {("0", "high"): 6, ("1", "top"): 6, ("1", "low"): 6}


@pytest.mark.parametrize(
    "how", ["4", "{run}/checkpoints/step-00000004", "{run}/checkpoints/step-00000004/model.safetensors"]
)
def test_a_checkpoint_had_learnt_what_stood_before_it(path: Path, how: str) -> None:
    """That of four steps is of the first attempt, whose last step doesn't stand any more; it stood then."""
    folder = path / "checkpoints" / "step-00000004"
    folder.mkdir(parents=True)
    given = how.format(run=path)
    told = {(o["class_name"], o["region"]): o["num_rows"] for o in records("query", path, "--checkpoint", given)}
    assert told == {("a", "low"): 8, ("a", "high"): 8, ("b", "high"): 8}
    assert "As of the checkpoint after 4 steps (entry 5)." in yes("query", path, "--checkpoint", given)
    later = {(o["class_name"], o["region"]): o["num_rows"] for o in records("query", path, "--checkpoint", 5)}
    assert later[("a", "low")] == 10
    assert later[("b", "top")] == 4
    assert "no checkpoint after 3 steps. It has some after 4, 5 steps" in unanswered("query", path, "--checkpoint", 3)
    assert "names no checkpoint" in unanswered("query", path, "--checkpoint", "elsewhere")


def test_unknown_names_and_false_statements_are_answered_as_ever(long: Path) -> None:
    assert "entry 8 (step 3), microbatch 0" in no("query", long, "--class", "b", "--region", "low")
    said = yes("query", long, "--class", "c", "--region", "low")
    assert "scanned   7 steps, 4 microbatches of the class, in all 12 signed entries" in said
    assert all(f"policy    {one.digest.hex()}" in said for one in (FIRST, SECOND))
    (told,) = records("query", long, "--class", "c", "--region", "low")
    assert (told["num_steps_scanned"], told["policy_digests"]) == (7, [FIRST.digest.hex(), SECOND.digest.hex()])
    assert not (long / "derived").exists(), "a statement reads the entries alone"
    assert "no class 'x'" in unanswered("query", long, "--class", "x")
    assert "no region 'x'" in unanswered("query", long, "--region", "x", "--steps")


def test_what_a_change_of_policy_did_is_told(path: Path) -> None:
    said = yes("policy-effect", path).splitlines()
    assert said[0] == f"policy epoch 0, from step 0 on (entry 0): {FIRST.digest.hex()}"
    assert said[1] == f"policy epoch 1, from step 3 on (entry 7): {SECOND.digest.hex()}"
    assert "  b in low, warm: 0 (admit) -> 0.5 (gate); 0 rows in 0 steps before, 6 in 3 after" in said
    assert "  a in high, main: 1 (admit) -> not there; 6 rows in 3 steps before, 0 in 0 after" in said
    assert not any(line.startswith("  a in low") for line in said)
    rows = list(csv.DictReader(io.StringIO(yes("policy-effect", path, "--format", "csv"))))
    (row,) = (one for one in rows if (one["class_name"], one["region"], one["phase"]) == ("b", "low", "warm"))
    assert (row["before"], row["after"], row["decision_after"]) == ("0.0", "0.5", "gate")


def test_sql_is_answered_for_people_and_for_programs(path: Path) -> None:
    sql = "SELECT class, region, sum(rows)::INT AS rows FROM taught WHERE stands GROUP BY ALL ORDER BY ALL LIMIT 2"

    def told(*arguments: str) -> Any:
        return asked_in_sql(path, *arguments)

    table = told(sql)
    assert table.stdout.splitlines() == ["class  region  rows", "a      high    6", "a      low     12"]
    assert table.stderr.startswith("Derived from tree of size 12, root ")
    assert told(sql, "--format", "csv").stdout == "class,region,rows\na,high,6\na,low,12\n"
    assert [json.loads(line) for line in told(sql, "--format", "json").stdout.splitlines()] == [
        {"class": "a", "region": "high", "rows": 6},
        {"class": "a", "region": "low", "rows": 12},
    ]
    nasty = told("SELECT '=1+1' AS a, e'\\x1b[31m' AS b, NULL AS c, 'nan'::DOUBLE AS d", "--format", "csv")
    assert nasty.stdout.splitlines()[1] == "'=1+1,\\x1b[31m,,nan"
    shown = told("SELECT e'\\x1b[31m' AS b, NULL AS c")
    assert shown.stdout.splitlines()[1] == "\\x1b[31m  –"
    for wrong in (
        "SELECT class::INT FROM cells",
        "DROP VIEW cells",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT 1; SELECT 2",
    ):
        assert told(wrong).exit_code == 2
    many = told("SELECT * FROM range(1200)")
    assert "the first 1000 rows are shown" in many.stdout


def test_tables_are_derived_told_and_made_anew(long: Path) -> None:
    assert "7 steps, 21 cells" in yes("derive", long)
    (file,) = (long / "derived").glob("cells-*.parquet")
    file.write_bytes(b"other")
    assert "was changed since it was derived" in unanswered("query", long)
    assert "said something else than the entries, and were replaced" in yes("query", long, "--prove")
    assert "replaced" not in yes("query", long, "--prove")
    file.write_bytes(b"other")
    yes("derive", long, "--anew")
    yes("query", long)
    assert "you trust" in unanswered("query", long, "--vkey", SigningKey.generate(ORIGIN).verifier.text)


def test_without_duckdb_entries_are_read(long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = yes("query", long, "--prove")
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert "Read from all 12 signed entries, root" in yes("query", long)
    assert yes("query", long, "--prove").splitlines()[0].split("rows")[0] == expected.splitlines()[0].split("rows")[0]
    for question in (["query", long, "--each", "phase"], ["sql", long, "SELECT 1"], ["derive", long]):
        assert "pip install 'cosmati[queries]'" in unanswered(*question)


def test_what_is_not_signed_is_not_in_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_queries, "READ_WHOLE", 0)
    writer = write_run(tmp_path / "open", KEY, 2, every=1000)
    writer.checkpoint()
    append_steps(writer, range(2, 3))
    writer.flush()
    for question in (["query"], ["show"], ["policy-effect"]):
        said = yes(question[0], tmp_path / "open", *question[1:])
        assert "1 further entries aren't signed yet, and weren't read" in said
    assert "Rows over 2 steps" in yes("show", tmp_path / "open")
    writer.close()
    assert "Rows over 3 steps" in yes("show", tmp_path / "open")
    assert (tmp_path / "open-derived").is_dir()


def test_sources_and_licences_are_told_where_they_were_signed(tmp_path: Path) -> None:
    """The manifest is taken from the archive by its SHA-256, and from nowhere else."""
    facts = {"licence": "CC-BY-4.0", "licence_valid_until": "2027-01-31", "origin": "a contract"}
    manifest = json.dumps({"class_path": "a", "also": [], "facts": facts}).encode()
    sha = hashlib.sha256(manifest).hexdigest()
    named = (("words/a/papers/3", sha, "one"), ("words/b/other/1", "0" * 64, "two"))
    sources = [dict(zip(("target", "manifest_sha256", "index_sha256"), one, strict=True)) for one in named]
    text = json.dumps([[["one", "a"], ["two", "b"]]])
    details = FIRST.details | {"provenance": {"sources": sources}, "data_text": text}
    data = hashlib.sha256(hashlib.sha256(text.encode()).hexdigest().encode()).digest()
    commitments = (("data", data), ("policy", FIRST.digest))
    first: Item = (RunEntry("r", commitments, details_digest(details)), details)
    ledger = tmp_path / "run" / "ledger"
    write_signed(ledger, [first, FIRST.step(0)], KEY)
    (ledger / "provenance").mkdir()
    (ledger / "provenance" / sha).write_bytes(manifest)
    said = yes("query", tmp_path / "run", "--class", "a")
    assert "source words/a/papers/3: licence CC-BY-4.0 until 2027-01-31, from a contract" in said
    assert "words/b" not in said
    assert "source words/b/other/1: no licence in its manifest" in yes("query", tmp_path / "run", "--region", "high")
    (ledger / "provenance" / sha).write_bytes(manifest.replace(b"CC-BY", b"MIT--"))
    assert "source words/a/papers/3: no licence in its manifest" in yes("query", tmp_path / "run", "--class", "a")
    assert asked_in_sql(
        tmp_path / "run", "SELECT licence, target FROM sources", "--format", "csv"
    ).stdout.splitlines() == [
        "licence,target",
        ",words/a/papers/3",
        ",words/b/other/1",
    ]

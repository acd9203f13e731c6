"""A run under a policy that attenuates by grades: shards say them, a step goes by them, and the ledger holds them."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from cosmati import RunConfig, Taxonomy, Trainer, load_policy
from cosmati.cli.main import app
from cosmati.core.source import Source
from cosmati.data.packed import PackedSource, read_packs
from cosmati.data.packing import Pack
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.manifest import SourceManifest
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.data.tombstoned import Tombstoned
from cosmati.errors import DataError, LedgerError, PolicyError, TamperError
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.verify import verify_ledger
from cosmati.optim.optimizers import SGD
from cosmati.routing.proposals import proposals
from cosmati.train.observers.ledger import LedgerObserver

TAXONOMY = Taxonomy("t", "1", (("notes", ""), ("papers", "")))
POLICY = """
version: 1
taxonomy: t
phases: [{name: start, until: 2ba}, {name: rest}]
measures: {evidence: {grades: [report, trial]}, trust: {grades: [low, high], thresholds: [0.5]}}
rules:
  - {class: "**", weight: 1}
attenuate:
  - {class: papers, measure: evidence, grade: report, factor: %s}
"""
KINDS: tuple[tuple[str, dict[str, str], int], ...] = (
    ("papers", {"evidence": "trial", "trust": "high"}, 1),
    ("papers", {"evidence": "report"}, 1000),
    ("notes", {}, 1),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Papers of two grades of evidence, those of reports a thousand times as large, and notes that nobody measured."""
    folder = tmp_path_factory.mktemp("graded")
    for number, (name, grades, scale) in enumerate(KINDS):
        rows = [{"number": scale * (row + 1)} for row in range(16)]
        write_dataset(rows, folder / str(number), {"number": "int"}, class_of=name, source=f"s{number}", grades=grades)
    return folder


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    output: Tensor = model(rows.float()[:, None])
    return output.square().mean()


def train(corpus: Path, policy: str | None, *, names: str = "012", folder: Path | None = None) -> Trainer:
    torch.manual_seed(0)
    data = StreamingDataset([corpus / name for name in names], columns=("number",))
    given: dict[str, Any] = {} if policy is None else {"policy": load_policy(policy), "taxonomy": TAXONOMY}
    trainer = Trainer(
        nn.Linear(1, 1),
        loss,
        StreamingSource(data, 8),
        optimizers=SGD(lr=1e-6),
        config=RunConfig(budget="6ba", num_threads=1, num_microbatches=2, run_folder=folder, ledger=folder is not None),
        **given,
    )
    trainer.fit()
    return trainer


def test_what_is_left_of_graded_rows_has_its_grades(corpus: Path) -> None:
    """Where some rows are tombstones, the others teach by their own grade, as they did."""
    policy = load_policy(POLICY % 0.25)
    source = StreamingSource(StreamingDataset([corpus / name for name in "012"], columns=("number",)), 8)

    def routes(data: Source) -> set[tuple[int | None, int, tuple[float, ...]]]:
        config = RunConfig(budget="6ba", num_threads=1, num_microbatches=2)
        made = Trainer(
            nn.Linear(1, 1), loss, data, optimizers=SGD(lr=1e-6), policy=policy, taxonomy=TAXONOMY, config=config
        )
        order = data.order(seed=0, num_microbatches=2, route_pure=True)
        positions = [(step, index) for step in range(6) for index in range(2)]
        asked = [(order.class_id(*at), order.band(*at), at[0]) for at in positions]  # type: ignore[attr-defined]
        router = made.assembly.router
        return {(own, band, router.route_of(own, step, band).weights) for own, band, step in asked}

    assert routes(Tombstoned(source, rows=[0])) == routes(source)


@pytest.mark.parametrize(
    ("measured", "told"), [({"band": 1}, "band 1"), ({"grades": {"trust": "high"}}, "band 0, trust high")]
)
def test_packs_of_which_something_was_measured_are_refused(tmp_path: Path, measured: Any, told: str) -> None:
    """Their documents would teach as the lowest band does, of which nobody has measured anything."""
    packs = [Pack(np.arange(4), np.array([[0, 0, 0, 4, 0]])).to_row()]
    columns = dict.fromkeys(packs[0], "ndarray:int64")
    write_dataset(packs, tmp_path / "packs", columns, class_of="papers", source="s", **measured)
    data = PackedSource(
        StreamingSource(StreamingDataset(tmp_path / "packs", transform=read_packs), 1), ("papers", "notes")
    )
    text = "version: 1\ntaxonomy: t\nbands: {measure: m, names: [low, high], thresholds: [0.5]}\n"
    text += "measures: {trust: {grades: [low, high]}}\nrules: [{class: '**', weight: 1}]\n"
    text += "attenuate: [{class: papers, measure: trust, grade: low, factor: 0.5}]"
    for source in (data, Tombstoned(data, rows=[0])):
        with pytest.raises(PolicyError, match=f"The packs' shards say {told}, and"):
            Trainer(
                nn.Linear(1, 1),
                loss,
                source,
                optimizers=SGD(lr=1.0),
                policy=load_policy(text),
                taxonomy=TAXONOMY,
                config=RunConfig(budget="1ba", num_microbatches=1),
            )


def size(trainer: Trainer) -> float:
    return max(float(parameter.detach().abs().max()) for parameter in trainer.model.parameters())


def test_rows_of_a_grade_teach_by_its_factor(corpus: Path, tmp_path: Path) -> None:
    nothing, some = train(corpus, POLICY % 0, folder=tmp_path / "run"), train(corpus, POLICY % 0.5)
    assert size(nothing) < 2 < size(some)
    result = CliRunner().invoke(app, ["ledger", "verify", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    ledger = VerifiedLedger(tmp_path / "run" / "ledger")
    (tables,) = ledger.tables
    assert len(tables.bands) == len(tables.kinds) == 9
    found: dict[tuple[str, str], set[tuple[float, bool]]] = {}
    for item, step, _ in ledger.steps():
        for cell in step.microbatches:
            name = tables.classes[cell.class_id], str(dict(tables.kinds[cell.band][1]))
            found.setdefault(name, set()).add((tables.route(cell, item)[0], bool(cell.num_rows)))
    assert found == {
        ("papers", "{'evidence': 'trial', 'trust': 'high'}"): {(1.0, True)},
        ("papers", "{'evidence': 'report', 'trust': ''}"): {(0.0, False)},
        ("notes", "{'evidence': '', 'trust': ''}"): {(1.0, True)},
    }


def test_the_ledger_says_what_became_of_each_row_and_why(corpus: Path, tmp_path: Path) -> None:
    text = POLICY.replace("rules:", "rules:\n  - {class: papers, phase: start, decision: defer}") % 0.5
    run = train(corpus, text, folder=tmp_path / "run")
    result = CliRunner().invoke(app, ["ledger", "decisions", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    found = {(one.class_name, one.kind, one.start_step): one for one in proposals(open_(tmp_path))}
    assert len(found) == 2 * 9 * 2
    report, trial = "evidence report, trust unmeasured", "evidence trial, trust high"
    assert [found["papers", report, step].decision for step in (0, 2)] == ["defer", "gate"]
    assert [found["papers", trial, step].decision for step in (0, 2)] == ["defer", "admit"]
    deferred, gated = found["papers", report, 0], found["papers", report, 2]
    assert deferred.because[0].startswith("class papers, phase start: defer (")
    assert "its rows come again in phase rest" in deferred.because[0]
    assert "class papers, evidence report: times 0.5" in gated.because[0]
    assert f"gate   papers, {report}, steps 2 to 6: {gated.num_rows} rows" in result.output
    # Kinds that no microbatch had share a line, and one class alone is told whole.
    assert "gate   papers, 5 kinds of rows, steps 2 to 6: 0 rows in 0 microbatches" in result.output
    assert result.output.count("\nadmit  papers") == 2, "the one that is there, and the others"
    whole = CliRunner().invoke(app, ["ledger", "decisions", str(tmp_path / "run"), "--class", "papers"]).output
    assert whole.count("defer  papers, ") == whole.count(", steps 2 to 6") == 9
    # Rows by kind and phase, as the order gives them.
    order, rows = run.feed._order, Counter[tuple[str, str, int]]()  # type: ignore[union-attr]
    for step, index in product(range(6), range(2)):
        batch = order.microbatch(step, index)
        values = [value for value in batch.data.flatten().tolist() if value]
        kind = report if max(values) > 100 else trial if batch.class_id == 1 else ""
        rows[("papers" if batch.class_id == 1 else "notes"), kind, 2 * (step >= 2)] += len(values)
    for (name, kind, start), num in rows.items():
        assert found[name, kind or "evidence unmeasured, trust unmeasured", start].num_rows == num


def test_what_has_no_policy_decides_nothing(corpus: Path, tmp_path: Path) -> None:
    train(corpus, None, folder=tmp_path / "run")
    with pytest.raises(LedgerError, match="has no policy"):
        proposals(open_(tmp_path))


def test_a_text_that_isnt_that_of_the_digest_is_told(corpus: Path, tmp_path: Path) -> None:
    real = LedgerObserver._details

    def other(self: LedgerObserver) -> dict[str, object]:
        told = real(self)
        return told | {"policy_text": {**dict(told["policy_text"]), "starvation": "stop"}}  # type: ignore[call-overload]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LedgerObserver, "_details", other)
        train(corpus, POLICY % 1, folder=tmp_path / "run")
    with pytest.raises(TamperError, match="the text of its policy isn't that of the digest"):
        verify_ledger(tmp_path / "run" / "ledger")


def open_(folder: Path) -> VerifiedLedger:
    return VerifiedLedger(folder / "run" / "ledger")


def test_microbatches_are_of_one_grade(corpus: Path) -> None:
    order = train(corpus, POLICY % 0.5).feed._order  # type: ignore[union-attr]
    for step, index in ((step, index) for step in range(6) for index in range(2)):
        rows = order.microbatch(step, index).data.flatten().tolist()
        assert len({row >= 1000 for row in rows if row}) == 1


def test_a_deferred_class_comes_again_but_for_what_is_attenuated_to_nothing(corpus: Path) -> None:
    text = POLICY.replace("rules:", "rules:\n  - {class: papers, phase: start, decision: defer}")
    late, never = train(corpus, text % 0.5), train(corpus, text % 0)
    assert size(never) < 2 < size(late)
    kinds = {order.band(step, index) for order in [late.feed._order] for step in range(2) for index in range(2)}  # type: ignore[union-attr]
    assert kinds == {0}, "only notes at first"


def test_rows_that_nobody_measured_count_as_the_worst(corpus: Path) -> None:
    text = (POLICY % 1).replace("papers, measure", "notes, measure")
    assert torch.equal(*(train(corpus, one, names="02").model.weight for one in (text, POLICY % 1)))
    with pytest.warns(UserWarning, match="no rows that may teach"):
        still = train(corpus, text.replace("factor: 1}", "factor: 0}"), names="2")
    torch.manual_seed(0)
    assert torch.equal(still.model.weight, nn.Linear(1, 1).weight)


def test_a_grade_that_the_policy_lacks_is_refused_before_anything_runs(corpus: Path, tmp_path: Path) -> None:
    write_dataset(
        [{"number": 1}] * 16, tmp_path / "3", {"number": "int"}, class_of="notes", source="n", grades={"trust": "none"}
    )
    with pytest.raises(PolicyError, match=r"Rows of notes say trust 'none', and the policy has the grades high, low"):
        train(tmp_path, POLICY % 1, names="3")


def test_data_without_grades_are_what_they_were(corpus: Path) -> None:
    one, two = (SourceManifest.from_bytes(path.read_bytes()) for path in sorted(corpus.glob("*/*/manifest.json"))[::2])
    assert one.grades == {"evidence": "trial", "trust": "high"}
    assert "grades" not in json.loads(two.to_bytes())
    assert "grades" not in json.loads((corpus / "2" / "notes" / "index.json").read_text())["cosmati"]
    assert StreamingSource(StreamingDataset(corpus / "2", columns=("number",)), 8).measured == {0: (0, {})}


@pytest.mark.parametrize("grades", [["trial"], {"evidence": 1}, "trial"])
def test_an_index_that_says_something_else_is_refused(corpus: Path, tmp_path: Path, grades: object) -> None:
    write_dataset([{"number": 1}], tmp_path / "one", {"number": "int"}, class_of="notes", source="n")
    path = tmp_path / "one" / "notes" / "index.json"
    index = json.loads(path.read_text())
    index["cosmati"]["grades"] = grades
    path.write_text(json.dumps(index))
    with pytest.raises(DataError, match="grades are words by measure"):
        StreamingDataset(path.parent)

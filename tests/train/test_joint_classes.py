"""Runs over rows of several classes: each row by itself, MixUp's parents, packs' documents, shards, the ledger."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati import Classification, InMemory, PolicyFile, RunConfig, Taxonomy, Trainer, load_policy
from cosmati.core.batch import Batch
from cosmati.core.plan import Promise
from cosmati.data.packed import PackedSource, pack_tensors
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.manifest import SourceManifest
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError, PlanError, PolicyError, RefutedError
from cosmati.ledger.query import VerifiedLedger, direct_write_exclusion, regions_of_class
from cosmati.ledger.verify import verify_ledger
from cosmati.methods import MixUp
from cosmati.optim import SGD
from tests.train.packs import samples

NAMES = ("mail&news", "news", "mail")
TAXONOMY = Taxonomy("t", "1", (("mail", ""), ("news", "")))
POLICY = """
version: 1
taxonomy: t
regions: {low: {params: "0.*"}, high: {params: "2.*"}}
rules:
  - {class: news, weight: 1}
  - {class: news, region: high, weight: 2}
  - {class: mail, weight: 0.25}
  - {class: mail, region: low, weight: %s}
allow: {amplify: true}
"""
WEIGHTS = {"mail&news": (0.5, 0.25), "news": (1.0, 2.0), "mail": (0.5, 0.25)}
ROWS = torch.randn(32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 3
CLASS_OF_ROW = (torch.arange(32) // 8).clamp(max=2)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def loss(model: nn.Module, rows: Any) -> Tensor:
    return nn.functional.cross_entropy(model(rows[0]), rows[1])


def trainer(model: nn.Module, data: Any = None, weight: float = 0.5, **options: Any) -> Trainer:
    config = {"budget": "1ba", "num_threads": 1, "num_microbatches": 4} | options.pop("config", {})
    return Trainer(
        model,
        options.pop("loss", loss),
        data or InMemory(ROWS, 32, CLASS_OF_ROW, NAMES),
        optimizers=SGD(lr=1.0),
        policy=load_policy(POLICY % weight),
        taxonomy=TAXONOMY,
        config=RunConfig(**config),
        **options,
    )


def by_row(model: nn.Module) -> dict[str, Tensor]:
    """Take each row alone, times the least weight of its classes, over the rows that may teach the region."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    teachers = dict.fromkeys(total, 0)
    for row, target, own in zip(*ROWS, CLASS_OF_ROW.tolist(), strict=True):
        model.zero_grad()
        loss(model, (row[None], target[None])).backward()
        for name, parameter in model.named_parameters():
            weight = WEIGHTS[NAMES[own]][name.startswith("2.")]
            assert parameter.grad is not None
            total[name] += weight * parameter.grad
            teachers[name] += weight > 0
    return {name: value / teachers[name] for name, value in total.items()}


def test_a_step_is_that_of_each_row_by_itself() -> None:
    expected, model = by_row(network()), network()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer(model).fit()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(before[name] - parameter.detach(), expected[name], rtol=1e-12, atol=1e-14)


def test_plan_and_ledger_say_it(tmp_path: Path) -> None:
    run = trainer(network(), weight=0, config={"run_folder": tmp_path, "budget": "3ba"})
    pairs = {g.pair for g in run.plan.guarantees if g.promise is Promise.NO_DIRECT_WRITE and g.holds}
    assert pairs == {("mail&news", "low"), ("mail", "low")}
    assert "no_direct_write(mail&news, low)" in str(run.plan)
    run.fit()
    verify_ledger(tmp_path / "ledger")
    ledger = VerifiedLedger(tmp_path / "ledger")
    assert ledger.classes == ("mail", "news", "mail&news")
    statement = direct_write_exclusion(ledger, "mail", "low")
    assert statement.num_class_microbatches == 9, "those of both classes are of each of them"
    with pytest.raises(RefutedError, match=r"gave rows of 'mail&news' weight 0\.25 in 'high'"):
        direct_write_exclusion(ledger, "mail&news", "high")
    with pytest.raises(RefutedError):
        direct_write_exclusion(ledger, "mail", "high")
    found = {(one.class_name, one.region, one.num_rows) for one in regions_of_class(ledger, "mail")}
    assert found == {("mail", "high", 48), ("mail&news", "high", 24)}


def test_a_statement_of_one_class_counts_rows_of_several(tmp_path: Path) -> None:
    data = InMemory(ROWS, 32, CLASS_OF_ROW.clamp(max=1), NAMES[:2])
    trainer(network(), data, config={"run_folder": tmp_path}).fit()
    with pytest.raises(RefutedError, match=r"gave rows of 'mail&news' weight 0\.25 in 'high'"):
        direct_write_exclusion(tmp_path / "ledger", "mail", "high")
    found = {(one.class_name, one.num_rows) for one in regions_of_class(tmp_path / "ledger", "mail")}
    assert {name for name, _ in found} == {"mail&news"}


def test_rows_are_mixed_with_rows_of_the_same_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Batch]()
    run = trainer(
        network().float(),
        InMemory((ROWS[0].float(), ROWS[1]), 32, CLASS_OF_ROW, NAMES),
        methods=[MixUp(alpha=0.9)],
        loss=Classification(3),
    )
    real = run.methods.batch
    monkeypatch.setattr(run.methods, "batch", lambda *given: seen.append(real(*given)) or seen[-1])
    run.fit()
    assert len(seen) == 4
    for batch in seen:
        assert batch.lineage.parents is not None
        assert len({int(CLASS_OF_ROW[row]) for row in batch.lineage.parents.flatten().tolist()}) == 1


def test_documents_of_several_classes_in_a_pack_teach_by_the_least() -> None:
    names = ("doubtful&open", "doubtful", "open&personal")
    data = PackedSource(InMemory(pack_tensors(samples.documents()), 4, tail="pad"), names)
    weights: list[Mapping[str, float]] = [
        {r: min(samples.WEIGHTS[one][r] for one in name.split("&")) for r in samples.REGIONS} for name in names
    ]
    model = samples.model().double()
    before = samples.values(model)
    expected = samples.oracle(model, samples.first_step(data), lambda c, name: weights[c][samples.region_of(name)])
    run = samples.trainer(model, data, samples.policy(), loss=samples.exact)
    assert ("doubtful&open", "lower") in {g.pair for g in run.plan.guarantees}
    run.fit()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(before[name] - parameter.detach(), expected[name], rtol=1e-12, atol=1e-14)


def number_loss(model: nn.Module, rows: Tensor) -> Tensor:
    output: Tensor = model(rows.float()[:, None].expand(-1, 4))
    return output.square().mean()


def test_shards_say_it_and_their_manifest_signs_it(tmp_path: Path) -> None:
    for name, also in (("both", ["mail"]), ("one", [])):
        write_dataset([{"number": 1}] * 12, tmp_path / name, {"number": "int"}, class_of="news", source=name, also=also)
    data = StreamingDataset([tmp_path / "both", tmp_path / "one"], columns=("number",))
    assert data.class_names == ("mail&news", "news")
    manifest = SourceManifest.from_bytes((tmp_path / "both" / "news" / "manifest.json").read_bytes())
    assert (manifest.class_path, manifest.also, manifest.class_name) == ("news", ("mail",), "mail&news")
    run = trainer(network().float(), StreamingSource(data, 12), loss=number_loss, config={"budget": "2ba"})
    run.fit()
    route = run.assembly.router.route_of(0, 0)
    assert (run.assembly.policy.classes[route.class_id], route.weights) == ("mail&news", (0.5, 0.25))  # type: ignore[union-attr]


@pytest.mark.parametrize("also", ["mail", [1], {"mail": 1}])
def test_an_index_that_says_something_else_is_refused(tmp_path: Path, also: object) -> None:
    write_dataset([{"number": 1}], tmp_path, {"number": "int"}, class_of="news", source="n", also=["mail"])
    path = tmp_path / "news" / "index.json"
    index = json.loads(path.read_text())
    assert index["cosmati"]["also"] == ["mail"]
    index["cosmati"]["also"] = also
    path.write_text(json.dumps(index))
    with pytest.raises(DataError, match="a list of classes"):
        StreamingDataset(path.parent)


def test_a_class_that_the_taxonomy_lacks_is_refused() -> None:
    data = InMemory(ROWS, 32, CLASS_OF_ROW, ("mail&letters", "news", "mail"))
    with pytest.raises((PlanError, PolicyError), match="no class 'letters'"):
        trainer(network(), data)


def test_policies_are_found_where_they_were(tmp_path: Path) -> None:
    """A run over rows of several classes goes on under another policy."""
    run = trainer(network(), config={"run_folder": tmp_path, "budget": "4ba"})
    with run:
        run._take(*run._next(run.feed))  # type: ignore[arg-type, misc]
        run.save()
    trainer(network(), weight=0.25, config={"run_folder": tmp_path, "budget": "4ba", "change": ("policy",)}).fit()
    report = verify_ledger(tmp_path / "ledger")
    assert [policy.step for policy in report.policies] == [0, 1]
    assert isinstance(load_policy(POLICY % 0), PolicyFile)

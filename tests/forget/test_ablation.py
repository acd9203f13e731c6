"""Ablation's arithmetic: which regions are whose, by counting; what is zeroed, what stays; what is said."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cosmati.core.source import Source
from cosmati.data.in_memory import InMemory
from cosmati.data.tombstoned import Tombstoned
from cosmati.errors import CheckpointError, CosmatiError, PlanError, TamperError
from cosmati.forget.ablation import STRENGTH, RegionShare, ablate, region_shares, separated
from cosmati.ledger.query import VerifiedLedger
from cosmati.optim import SGD
from cosmati.routing.gradient_routing import GradientRouting
from cosmati.routing.policy_file import load_policy
from cosmati.routing.selective_masking import SelectiveGradientMasking
from cosmati.train.config import RunConfig
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.trainer import Trainer
from tests.train.strategies.samples import CLASSES, REGIONS, TAXONOMY, Net, policy, region_of, summed

pytestmark = pytest.mark.long

KEPT = {"stem": 1.0, "side": 1.0, "forget": 0.0, "head": 1.0}
GONE = {"stem": 0.0, "side": 0.0, "forget": 1.0, "head": 0.0}
APART = {"kept": KEPT, "gone": GONE, "both": KEPT}
MOSTLY = {"kept": KEPT, "gone": {**GONE, "head": 1.0}, "both": {**KEPT, "forget": 0.25}}
MASKING = SelectiveGradientMasking(forget="forget")
Make = Callable[..., Trainer]


def rows() -> InMemory:
    draw = torch.Generator().manual_seed(2)
    inputs = torch.randn(48, 5, generator=draw, dtype=torch.float64)
    return InMemory((inputs, torch.randint(0, 3, (48,), generator=draw)), 8, torch.arange(48) % 3, CLASSES, tail="drop")


def maker(weights: Mapping[str, Mapping[str, float]], *methods: Any) -> Make:
    def make(wrap: Callable[[object], Source] = lambda source: source, **config: Any) -> Trainer:  # type: ignore[assignment]
        settings = {"budget": "6ba", "num_microbatches": 4, **config}
        return Trainer(
            Net(),
            summed,
            wrap(rows()),
            optimizers=[SGD(lr=0.1, momentum=0.9)],
            methods=methods,
            policy=policy(weights),
            taxonomy=TAXONOMY,
            config=RunConfig(**settings),
        )

    return make


def trained(folder: Path, weights: Mapping[str, Mapping[str, float]] = APART, *methods: Any) -> Make:
    make = maker(weights, *methods)
    make(run_folder=folder).fit()
    return make


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(read_checkpoint(list_checkpoints(folder / "checkpoints")[0]).model)


@pytest.mark.parametrize("methods", [(), (MASKING,), (GradientRouting(),)], ids=["policy", "sgtm", "gradient routing"])
def test_the_region_is_zeroed_and_the_rest_trained_on_without_the_class(tmp_path: Path, methods: Any) -> None:
    """Against the same done by hand: zeroes in the file, a run over tombstoned data from it, each loss row by row."""
    make = trained(tmp_path / "run", APART, *methods)
    report = ablate(
        tmp_path / "run", make, ["gone"], tmp_path / "out", repair_steps=3, measure=lambda model: {"size": _size(model)}
    )
    assert [one.region for one in report.ablated] == ["forget"]
    assert report.ablated[0].share == 1
    assert report.left == ()
    before, after = weights_of(tmp_path / "run"), weights_of(tmp_path / "out")
    zeroed = {name: value * (region_of(name) != "forget") for name, value in before.items()}
    assert report.num_parameters == sum(v.numel() for name, v in before.items() if region_of(name) == "forget")
    save_file(zeroed, tmp_path / "by-hand.safetensors")
    repaired = make(
        lambda source: Tombstoned(source, ["gone"]),
        run_folder=tmp_path / "again",
        budget="3ba",
        load_weights=tmp_path / "by-hand.safetensors",
    )
    repaired.fit()
    assert all(torch.equal(value, after[name]) for name, value in weights_of(tmp_path / "again").items())
    assert all(bool((value == 0).all()) for name, value in after.items() if region_of(name) == "forget")
    for weights, found in ((before, report.before), (zeroed, report.between), (after, report.after)):
        network, expected = Net(), by_hand(weights)
        network.load_state_dict(weights)
        assert found == pytest.approx({**expected, "size": _size(network)}, rel=1e-12)


def _size(model: torch.nn.Module) -> float:
    return sum(float(p.detach().square().sum()) for p in model.parameters())


def by_hand(weights: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Mean losses of the first four steps' rows, one by one."""
    network = Net()
    network.load_state_dict(weights)
    order, sums = rows().order(seed=0, num_microbatches=4, route_pure=True), {"retain": [], "forget": []}
    for step in range(4):
        for index in range(4):
            batch = order.microbatch(step, index)
            for x, y, class_id in zip(*batch.data, batch.lineage.class_ids.tolist(), strict=True):
                loss = summed(network, (x[None], y[None])).sum
                sums["forget" if CLASSES[class_id] == "gone" else "retain"].append(float(loss.detach()))
    return {name: sum(values) / len(values) for name, values in sums.items()}


def test_shares_are_what_counting_cells_gives(tmp_path: Path) -> None:
    trained(tmp_path / "run", MOSTLY)
    ledger = VerifiedLedger(tmp_path / "run" / "ledger")
    order, taught = (
        rows().order(seed=0, num_microbatches=4, route_pure=True),
        {region: [0.0, 0.0] for region in REGIONS},
    )
    for step in range(6):
        for index in range(4):
            name = CLASSES[order.class_id(step, index) or 0]
            for region in REGIONS:
                own, total = taught[region]
                weight = 2 * MOSTLY[name][region]
                taught[region] = [own + weight * (name == "gone"), total + weight]
    shares = region_shares(ledger, ["gone"])
    assert {one.region: one.share for one in shares} == pytest.approx(
        {r: own / all_ for r, (own, all_) in taught.items()}
    )
    everything = region_shares(ledger, list(CLASSES))
    assert {one.share for one in everything} == {1.0}
    assert all(one.norm_share is not None and 0 <= one.norm_share <= 1 + 1e-12 for one in shares)


def test_mostly_is_said_and_what_is_left_is_named(tmp_path: Path) -> None:
    make = trained(tmp_path / "run", MOSTLY)
    with pytest.raises(
        PlanError, match=r"No region separates gone from the rest: .*head 33\.3%, forget 80\.0%, and 90%"
    ):
        ablate(tmp_path / "run", make, ["gone"], tmp_path / "out", repair_steps=1)
    assert not (tmp_path / "out").exists()
    report = ablate(tmp_path / "run", make, ["gone"], tmp_path / "out", repair_steps=1, min_share=0.75, fill="initial")
    assert [one.region for one in report.left] == ["head"]
    ablated = load_file(tmp_path / "out.ablated.safetensors")
    initial, before = dict(Net().state_dict()), weights_of(tmp_path / "run")
    for name, value in ablated.items():
        assert torch.equal(value, initial[name] if region_of(name) == "forget" else before[name])
    told = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert told == json.loads(report.to_json())
    assert told["strength"] == STRENGTH


def test_it_never_says_erased(tmp_path: Path) -> None:
    make = trained(tmp_path / "run")
    report = ablate(tmp_path / "run", make, ["gone"], tmp_path / "out", repair_steps=1)
    for text in (str(report), report.to_json()):
        assert "approximate" in text
        assert "not_covered" in text or "not covered" in text
        assert not any(
            word in text.lower() for word in ("erase", "exact", "deleted", "removed", "unlearn", "guarantee")
        )


def test_called_again_after_a_kill_it_comes_to_the_same(tmp_path: Path) -> None:
    """The repair was stopped in its middle, or the report wasn't written."""
    make = trained(tmp_path / "run")
    whole = ablate(tmp_path / "run", make, ["gone"], tmp_path / "out", repair_steps=4)
    stopped = maker(APART)

    class StoppedError(Exception):
        pass

    def failing(wrap: Any, **config: Any) -> Trainer:
        trainer = stopped(wrap, **config)
        if config.get("run_folder"):
            step = trainer._take

            def take(*given: Any) -> Any:
                if trainer.clock.step == 2:
                    trainer.save()
                    raise StoppedError
                return step(*given)

            trainer._take = take  # type: ignore[method-assign]
        return trainer

    with pytest.raises(StoppedError):
        ablate(tmp_path / "run", failing, ["gone"], tmp_path / "killed", repair_steps=4)
    assert ablate(tmp_path / "run", make, ["gone"], tmp_path / "killed", repair_steps=4) == whole


def test_another_ablation_isnt_taken_for_this_one(tmp_path: Path) -> None:
    make = trained(tmp_path / "run")
    ablate(tmp_path / "run", make, ["gone"], tmp_path / "out", repair_steps=1)
    before = (tmp_path / "out" / "ablation.json").read_bytes()
    with pytest.raises(PlanError, match="doesn't repair these weights"):
        ablate(tmp_path / "run", make, ["gone"], tmp_path / "out", repair_steps=1, fill="initial")
    with pytest.raises(CosmatiError, match="budget"):
        ablate(tmp_path / "run", make, ["gone"], tmp_path / "out", repair_steps=2)
    with pytest.raises(PlanError, match="doesn't repair these weights"):
        ablate(tmp_path / "run", make, ["gone"], tmp_path / "run", repair_steps=1)
    assert (tmp_path / "out" / "ablation.json").read_bytes() == before


def test_what_isnt_in_the_measured_steps_is_said(tmp_path: Path) -> None:
    run = maker(APART)
    run(run_folder=tmp_path / "run").fit()

    def make(wrap: Any, **config: Any) -> Trainer:
        return run(lambda source: wrap(Tombstoned(source, ["gone"])), **config)

    with pytest.raises(PlanError, match="forget can't be measured: nan; no such row may be in the steps"):
        ablate(tmp_path / "run", make, ["gone"], tmp_path / "out", repair_steps=1)


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    make = trained(tmp_path / "run")
    run, out = tmp_path / "run", tmp_path / "out"
    with pytest.raises(PlanError, match="no class 'nobody'; it has both, gone, kept"):
        ablate(run, make, ["nobody"], out, repair_steps=1)
    with pytest.raises(PlanError, match=r"min_share=0\.5"):
        ablate(run, make, ["gone"], out, repair_steps=1, min_share=0.5)
    with pytest.raises(PlanError, match="1 at least"):
        ablate(run, make, ["gone"], out, repair_steps=0)
    other = load_policy("version: 1\ntaxonomy: t\nrules:\n  - {class: '**', weight: 1}\n")

    def otherwise(wrap: Any, **config: Any) -> Trainer:
        return Trainer(
            Net(),
            summed,
            wrap(rows()),
            optimizers=[SGD(lr=0.1)],
            policy=other,
            taxonomy=TAXONOMY,
            config=RunConfig(num_microbatches=4, budget="6ba", **config),
        )

    with pytest.raises(PlanError, match="no region forget, and the run's has"):
        ablate(run, otherwise, ["gone"], out, repair_steps=1)
    with pytest.raises(PlanError, match="are a list"):
        ablate(run, lambda wrap, **config: make(lambda _: wrap([]), **config), ["gone"], out, repair_steps=1)
    newest = list_checkpoints(run / "checkpoints")[0]
    oldest = list_checkpoints(run / "checkpoints")[-1]
    assert newest != oldest
    for path in list_checkpoints(run / "checkpoints"):
        path.rename(path.with_name(f"away-{path.name}"))
    with pytest.raises(CheckpointError, match="no checkpoint"):
        ablate(run, make, ["gone"], out, repair_steps=1)
    newest.with_name(f"away-{newest.name}").rename(newest)
    other_run = tmp_path / "other"
    trained(other_run, MOSTLY)
    theirs = list_checkpoints(other_run / "checkpoints")[0]
    for file in newest.iterdir():
        if file.is_file():
            file.write_bytes((theirs / file.name).read_bytes())
    for file in (newest / "state").iterdir():
        file.write_bytes((theirs / "state" / file.name).read_bytes())
    with pytest.raises(TamperError, match="doesn't sign"):
        ablate(run, make, ["gone"], out, repair_steps=1)


def test_a_region_is_separated_by_its_share() -> None:
    shares = [RegionShare("a", 0.9, None), RegionShare("b", 0.89, 1.0), RegionShare("c", 1.0, 0.0)]
    assert [one.region for one in separated(shares, ["x"], 0.9)] == ["a", "c"]
    assert [one.region for one in separated(shares, ["x"], 1.0)] == ["c"]

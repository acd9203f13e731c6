"""What the ledger says of what was learnt, against brute force: directions, updates, digests, entropies."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cosmati.core.loss import Classification
from cosmati.core.state import parameter_root
from cosmati.data.in_memory import InMemory
from cosmati.errors import PlanError
from cosmati.ledger.query import VerifiedLedger
from cosmati.methods import SAM
from cosmati.optim import SGD, AdamW
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import load_policy
from cosmati.train import entropy_profile
from cosmati.train.config import RunConfig
from cosmati.train.entropy_profile import MAX_SAMPLES, places_of_regions, spectral_entropy
from cosmati.train.leaf_facts import LeafFigures
from cosmati.train.observers.observer import Observer, WatchedRun
from cosmati.train.outcome import StepOutcome
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.trainer import Trainer
from tests.train import learning_oracles as oracle

SEED = 5
GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.randn(64, 1, 6, 6, generator=GENERATOR), torch.randint(3, (64,), generator=GENERATOR)
TAXONOMY = Taxonomy("two", "1", (("cold", "cold rows"), ("hot", "hot rows")))
POLICY = """
version: 1
taxonomy: two
regions: {body: {params: ["0.*"]}, middle: {params: ["3.*"]}, head: {params: ["5.*"]}}
rules:
  - {class: "**", weight: 1}
  - {class: cold, region: middle, weight: 0.5}
  - {class: cold, region: body, weight: 0}
"""
REGIONS = {"body": ("0.weight", "0.bias"), "middle": ("3.weight", "3.bias"), "head": ("5.weight", "5.bias")}
EVERY: Mapping[str, Any] = {
    "details_every": 1,
    "update_norm_every": 1,
    "direction_every": 1,
    "update_direction_every": 1,
    "digests_every": 1,
    "entropy_every": 1,
}
NOTHING: Mapping[str, Any] = dict.fromkeys([*EVERY][2:], 0) | {"details_every": 99, "update_norm_every": 99}


def network() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)
    return nn.Sequential(*layers)


Weights = dict[str, Tensor]


@dataclass
class Watch(Observer):
    """Keeps the weights before and after each step, and its rows."""

    before: list[Weights] = field(default_factory=list)
    after: list[Weights] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)

    def on_open(self, run: WatchedRun) -> None:
        self.model = run.model

    def on_step_begin(self, clock: object) -> None:
        self.before.append({name: p.detach().clone() for name, p in self.model.named_parameters()})

    def on_step(self, outcome: StepOutcome) -> None:
        self.after.append({name: p.detach().clone() for name, p in self.model.named_parameters()})
        self.outcomes.append(outcome)


def trained(folder: Path, *, watch: Observer | None = None, **options: Any) -> Trainer:
    given: dict[str, Any] = {"optimizers": [AdamW(lr=0.01, weight_decay=0.3)], "methods": []} | {
        name: options.pop(name) for name in [*options] if name in ("optimizers", "methods")
    }
    settings = {"budget": "5ba", "seed": SEED, "num_threads": 1, "num_microbatches": 4, "run_folder": folder} | options
    trainer = Trainer(
        network(),
        Classification(3),
        InMemory(ROWS, 24, torch.arange(64) % 2, ("cold", "hot")),
        policy=load_policy(POLICY),
        taxonomy=TAXONOMY,
        observers=[watch] if watch else [],
        config=RunConfig(**settings),
        **given,
    )
    trainer.fit()
    return trainer


def steps_in(folder: Path) -> list[dict[str, Any]]:
    told = map(json.loads, (folder / "ledger/details.jsonl").read_text().splitlines())
    return [one for one in told if "gradient_norm" in one]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watch]:
    folder, watch = tmp_path_factory.mktemp("learning") / "run", Watch()
    trained(folder, watch=watch, checkpoint_every="1ba", num_checkpoints=9, **EVERY)
    return folder, watch


def gradients_of(weights: Weights, rows: Tensor, labels: Tensor) -> dict[str, np.ndarray[Any, Any]]:
    """Return a microbatch's gradients by name, in float64: another model's, and no hook of ours."""
    model = network().double()
    model.load_state_dict(weights)
    nn.functional.cross_entropy(model(rows.double()), labels).backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.long
def test_directions_are_sketches_of_each_microbatchs_gradient(run: tuple[Path, Watch]) -> None:
    folder, watch = run
    seen = 0
    for told, before, outcome in zip(steps_in(folder), watch.before, watch.outcomes, strict=True):
        assert sorted(told["direction"]) == ["0", "1", "2", "3"]
        for m, batch in enumerate(outcome.batches):
            gradients = gradients_of(before, *batch.data)
            route = outcome.routes[m].weights
            for region, (names, text) in enumerate(zip(REGIONS.values(), told["direction"][str(m)], strict=True)):
                assert (text is None) == (route[region] == 0)
                if text is not None:
                    own = {name: gradients[name] for name in names}
                    wanted = oracle.sketch_of(SEED, own) / oracle.norm_of(own)
                    assert oracle.decoded(text) == pytest.approx(wanted, rel=2e-3, abs=2e-4)
                    seen += 1
    assert seen > 40


def test_norm_and_direction_of_updates_are_those_of_what_the_parameters_moved(run: tuple[Path, Watch]) -> None:
    folder, watch = run
    for told, before, after in zip(steps_in(folder), watch.before, watch.after, strict=True):
        for region, names in enumerate(REGIONS.values()):
            change = {name: after[name].double().numpy() - before[name].double().numpy() for name in names}
            assert told["update_norm"][region] == pytest.approx(oracle.norm_of(change), rel=1e-5)
            wanted = oracle.sketch_of(SEED, change) / oracle.norm_of(change)
            assert oracle.decoded(told["update_direction"][region]) == pytest.approx(wanted, rel=2e-3, abs=2e-4)


def test_weight_decay_is_in_an_update(tmp_path: Path) -> None:
    """With a rate of learning of nothing but decay, the update is the weights, backwards."""
    watch = Watch()
    trained(tmp_path / "run", watch=watch, budget="1ba", optimizers=[SGD(lr=1e-6, weight_decay=1e5)], **EVERY)
    (told,) = steps_in(tmp_path / "run")
    for region, names in enumerate(REGIONS.values()):
        weights = {name: watch.before[0][name].double().numpy() for name in names}
        assert told["update_norm"][region] == pytest.approx(0.1 * oracle.norm_of(weights), rel=1e-3)
        backwards = -oracle.sketch_of(SEED, weights) / oracle.norm_of(weights)
        assert oracle.decoded(told["update_direction"][region]) == pytest.approx(backwards, rel=5e-3, abs=1e-3)


def test_digests_are_of_the_regions_parameters_and_follow_one_another(run: tuple[Path, Watch]) -> None:
    folder, watch = run
    steps = steps_in(folder)
    for told, before, after in zip(steps, watch.before, watch.after, strict=True):
        for when, weights in (("before", before), ("after", after)):
            wanted = [oracle.digest_of({n: weights[n].numpy() for n in names}) for names in REGIONS.values()]
            assert told["region_digests"][when] == wanted
    for earlier, later in itertools.pairwise(steps):
        assert earlier["region_digests"]["after"] == later["region_digests"]["before"]
    # From the folder alone: the parameters of a signed checkpoint, by the names that entry 0 gives.
    names = VerifiedLedger(folder / "ledger").details["parameters"]
    checkpoint = read_checkpoint(folder / "checkpoints/step-00000003")
    found = [parameter_root({name: checkpoint.model[name] for name in own}).hex() for own in names]
    assert found == steps[2]["region_digests"]["after"]


def test_entropies_are_those_of_what_each_region_gives(run: tuple[Path, Watch]) -> None:
    folder, watch = run
    for told, before, outcome in zip(steps_in(folder), watch.before, watch.outcomes, strict=True):
        for m, batch in enumerate(outcome.batches):
            model, rows = network().double(), batch.data[0].double()
            model.load_state_dict(before)
            with torch.no_grad():
                images = model[0](rows)  # type: ignore[index]
                hidden = model[3](model[2](images.relu()))  # type: ignore[index]
                logits = model[5](hidden.relu())  # type: ignore[index]
            given = [images.permute(0, 2, 3, 1).reshape(-1, 4), hidden, logits]
            wanted = [oracle.entropy_of(one.numpy()) for one in given]
            assert told["entropy"][str(m)] == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.long
def test_nothing_of_it_changes_the_bits_of_training(run: tuple[Path, Watch], tmp_path: Path) -> None:
    trained(tmp_path / "run", checkpoint_every="1ba", num_checkpoints=9, **NOTHING)
    for path in list_checkpoints(tmp_path / "run/checkpoints"):
        one, other = read_checkpoint(path), read_checkpoint(run[0] / "checkpoints" / path.name)
        assert parameter_root(one.model) == parameter_root(other.model)
        assert parameter_root(one.state) == parameter_root(other.state)
    quiet = steps_in(tmp_path / "run")
    assert {name for told in quiet[1:] for name in told} == {"step", "loss", "gradient_norm", "update_norm"}
    both = zip(quiet, steps_in(run[0]), strict=True)
    assert all(one["loss"] == other["loss"] for one, other in both)


def test_each_has_a_cadence_of_its_own(tmp_path: Path) -> None:
    every = {"direction_every": 2, "update_direction_every": 3, "digests_every": 4, "entropy_every": 5}
    trained(tmp_path / "run", budget="7ba", details_every=6, update_norm_every=99, **every)
    due = {"direction": [0, 2, 4, 6], "update_direction": [0, 3, 6], "region_digests": [0, 4], "entropy": [0, 5]}
    steps = steps_in(tmp_path / "run")
    assert {name: [told["step"] for told in steps if name in told] for name in due} == due
    # What has a direction has a length.
    assert [told["step"] for told in steps if told["gradient_norm"]] == [0, 2, 4, 6]
    assert [told["step"] for told in steps if told["update_norm"]] == [0, 3, 6]


@pytest.mark.long
def test_directions_of_the_pass_that_is_applied_and_entropies_of_the_weights_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, plain, computed = Watch(), Watch(), list[Tensor]()
    monkeypatch.setattr(
        entropy_profile, "spectral_entropy", lambda samples: [computed.append(samples), spectral_entropy(samples)][1]
    )
    trained(tmp_path / "sharp", watch=watch, methods=[SAM(rho=0.5)], budget="1ba", **EVERY)
    assert len(computed) == 4 * len(REGIONS), "once, not in each pass"
    trained(tmp_path / "plain", watch=plain, budget="1ba", **EVERY)
    (sharp,), (told,) = steps_in(tmp_path / "sharp"), steps_in(tmp_path / "plain")
    assert sharp["entropy"] == told["entropy"]
    assert sharp["direction"] != told["direction"]
    norms, sketches = watch.outcomes[0].norms, watch.outcomes[0].sketches
    assert norms is not None
    assert sketches is not None
    # The sketch of the applied gradient has its length: that of the first pass would be another.
    lengths = torch.linalg.vector_norm(sketches, dim=2) / norms
    assert bool(((lengths > 0.4) & (lengths < 1.8)).logical_or(norms.isnan()).all())


def test_a_plain_run_takes_the_road_on_which_it_is_measured(tmp_path: Path) -> None:
    def made(name: str, **settings: Any) -> Trainer:
        data = InMemory(ROWS, 24)
        config = RunConfig(budget="2ba", num_threads=1, ledger=True, run_folder=tmp_path / name, **settings)
        trainer = Trainer(network(), Classification(3), data, optimizers=[SGD(lr=0.1)], config=config)
        trainer.fit()
        return trainer

    plain, measured = made("plain"), made("measured", digests_every=1, entropy_every=1)
    assert (plain.is_plain, measured.is_plain) == (True, False)
    assert parameter_root(plain.model.state_dict()) == parameter_root(measured.model.state_dict())
    assert all("entropy" in told and "region_digests" in told for told in steps_in(tmp_path / "measured"))


@pytest.mark.parametrize("name", [name for name in EVERY if name.startswith(("direction", "digests", "entropy"))])
def test_a_cadence_is_a_number_of_steps_or_none(name: str) -> None:
    assert RunConfig(**{name: 0}) == RunConfig(**{name: 0})
    with pytest.raises(PlanError, match=f"{name} = -1; it's a number of steps, or 0 for never"):
        RunConfig(**{name: -1})


def test_compiled_blocks_have_no_hooks() -> None:
    with pytest.raises(PlanError, match="Leave out entropy_every, or compile_blocks"):
        RunConfig(entropy_every=5, compile_blocks=True)


# Entropy by itself.


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (1, 4), (4, 1), (200, 3)])
def test_spectral_entropy_is_that_of_the_singular_values(shape: tuple[int, int]) -> None:
    samples = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    wanted = oracle.entropy_of(samples.numpy())
    assert spectral_entropy(samples) == pytest.approx(wanted, abs=1e-9)
    assert spectral_entropy(samples * 1e200) == pytest.approx(wanted, abs=1e-9)
    assert spectral_entropy(samples + 7.0) == pytest.approx(wanted, abs=1e-9)


def test_spectral_entropy_at_its_ends() -> None:
    assert spectral_entropy(torch.eye(5)) == pytest.approx(np.log(4))  # as many directions as five samples can have
    line = torch.outer(torch.arange(6.0), torch.tensor([1.0, -2.0, 0.5]))
    assert spectral_entropy(line) == pytest.approx(0, abs=1e-9)
    assert spectral_entropy(torch.ones(4, 3)) == 0
    assert spectral_entropy(torch.ones(0, 3)) == 0
    assert np.isnan(spectral_entropy(torch.tensor([[1.0, torch.inf], [0.0, 1.0]])))


class Odd(nn.Module):
    """Has a parameter of its own, a part that isn't run, one that gives no tensor, and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 40, 4))
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.idle = nn.Linear(4, 4)
        self.head = nn.ModuleDict({"out": nn.LSTM(4, 3, batch_first=True)})

    def forward(self, rows: Tensor) -> Tensor:
        hidden = rows[..., None] + self.position
        for block in self.blocks:
            hidden = block(hidden)
        found: Tensor = self.head["out"](hidden)[0]
        return found.mean(1)


ODD = """
version: 1
taxonomy: two
regions:
  position: {params: [position]}
  blocks: {params: ["blocks.*"]}
  idle: {params: ["idle.*"]}
  head: {params: ["head.*"]}
rules: [{class: "**", weight: 1}]
"""


def test_where_nothing_can_be_hooked_it_is_said_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rows = torch.randn(32, 40), torch.randint(3, (32,))
    data = InMemory(rows, 32, torch.arange(32) % 2, ("cold", "hot"))
    config = RunConfig(budget="1ba", num_microbatches=2, num_threads=1, run_folder=tmp_path, entropy_every=1)
    policy, model = load_policy(ODD), Odd()
    given: dict[str, Any] = {"policy": policy, "taxonomy": TAXONOMY, "optimizers": [SGD(lr=0.0)], "config": config}
    trainer = Trainer(model, Classification(3), data, **given)
    places = places_of_regions(trainer.model, trainer.assembly.regions)
    assert list(places) == ["blocks.0", "blocks.1", "idle", "head.out"]
    before = {name: [*module._forward_hooks.items()] for name, module in model.named_modules()}
    with pytest.warns(UserWarning, match="No module has parameters of position alone"):
        trainer.fit()
    assert {name: [*m._forward_hooks.items()] for name, m in model.named_modules()} == before
    (told,) = steps_in(tmp_path)
    order = {name: index for index, name in enumerate(trainer.assembly.regions.names)}
    for values in told["entropy"].values():
        assert [values[order[name]] is None for name in ("position", "idle")] == [True, True]
        assert all(0 < values[order[name]] <= np.log(4) for name in ("blocks", "head"))
    # The last module of a region to run, and 256 of its 640 positions.
    with torch.no_grad():
        hidden = model.blocks[0](rows[0][..., None] + model.position)
        last = model.blocks[1](hidden)
    wanted = []
    for m in range(2):
        positions = last[torch.arange(32) % 2 == m].reshape(-1, 4)
        kept = positions[[i * len(positions) // MAX_SAMPLES for i in range(MAX_SAMPLES)]]
        wanted.append(oracle.entropy_of(kept.double().numpy()))
    found = [told["entropy"][str(m)][order["blocks"]] for m in range(2)]
    assert sorted(found) == pytest.approx(sorted(wanted), rel=1e-3)


def test_sub_steps_are_taken_together_region_by_region() -> None:
    """Each has parameters of its own: lengths add as squares, sketches as they are; what no sub-step has is absent."""
    nan, first, second = torch.nan, torch.randn(16, generator=GENERATOR), torch.randn(16, generator=GENERATOR)
    absent, entropies = torch.full((16,), nan), torch.ones(1, 3)
    one = LeafFigures(torch.tensor([[3.0, 2.0, nan]]), torch.stack([first, second, absent])[None], entropies)
    other = LeafFigures(torch.tensor([[4.0, nan, nan]]), torch.stack([second, absent, absent])[None])
    norms, sketches, kept = one.joined([other])
    assert norms is not None
    assert sketches is not None
    assert norms.nan_to_num(nan=-1.0).tolist() == [[5.0, 2.0, -1.0]]
    assert torch.equal(sketches[0, :2], torch.stack([first + second, second]))
    assert bool(sketches[0, 2].isnan().all())
    assert kept is entropies
    assert one.joined([]) is one

"""Three signed sources, their people, and runs over them in which somebody takes something back at a given step."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cosmati import PolicyFile, RunConfig, Trainer, load_policy
from cosmati.core.loss import Loss
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.manifest import SourceFacts
from cosmati.data.shards.upload import Destination
from cosmati.data.signing import sign_sources
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.ledger.query import VerifiedLedger
from cosmati.optim.optimizers import SGD
from cosmati.provenance.authority import ceremony
from cosmati.provenance.authority.trusted import Authority
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome
from tests.provenance.authority.people import NEWS, PII, TAXONOMY, People

OPEN = "public-domain"
PEOPLE = {NEWS: "ada", PII: "bob", OPEN: "carol"}
POLICY = """
version: 1
taxonomy: firm
rules:
  - {class: "**", weight: 1}
"""
Events = Mapping[int, Callable[["World"], object]]


@dataclass
class World:
    """Where it all lies.

    Attributes:
        people: of the authority.
        ahead: by how much the clock of who trusts them is.
        ask: whether runs ask them at all.
    """

    people: People
    ahead: timedelta = timedelta()
    ask: bool = True

    @classmethod
    def made_in(cls, root: Path, *, news_until: str = "") -> World:
        """Make an authority with three people, and a data set with a source of each."""
        people = People(root).begin()
        for path, name in PEOPLE.items():
            people.delegate(path, name)
            facts = SourceFacts(licence="contract 12", licence_valid_until=news_until if path == NEWS else "")
            write_dataset(
                [{"number": number} for number in range(24)],
                Destination(str(root / "data" / name)),
                {"number": "int"},
                class_of=lambda _row, path=path: path,  # type: ignore[misc]
                source=name,
                facts=facts,
            )
            list(sign_sources(str(root / "data" / name), people.folder, people.ring(name)))
        (root / "pin").write_text(people.pin)
        return cls(people)

    @classmethod
    def found_in(cls, root: Path) -> World:
        """Return one that lies there already."""
        people = People(root)
        people.pin = (root / "pin").read_text()
        return cls(people)

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead

    def set_back(self) -> None:
        """Set the clock back, on a machine that has never asked anybody."""
        self.ahead = timedelta()
        shutil.rmtree(self.people.root / "seen")

    def sources(self, **authority: Any) -> StreamingSource:
        people = self.people
        trusted = Authority(people.folder, people.pin, state=people.root / "seen", clock=self.now, **authority)
        urls = [people.root / "data" / name for name in PEOPLE.values()]
        return StreamingSource(StreamingDataset(urls, columns=("number",), authority=trusted if self.ask else None), 8)

    def trainer(
        self, folder: Path | None, events: Events, *, grace: str = "", budget: str = "24ba", **more: Any
    ) -> Trainer:
        """Return a run's trainer.

        Args:
            folder: of the run.
            events: what happens after how many steps; whoever asks then finds it.
            grace: of the policy.
            budget: of the run.
            more: settings of the run; the `policy`, text or signed; an `evaluation`; and how an authority is opened
                (`run`, `refresh`).
        """
        torch.manual_seed(0)
        own = {name: more.pop(name) for name in ("run", "refresh") if name in more}
        text, evaluation = more.pop("policy", POLICY), more.pop("evaluation", None)
        policy = text if isinstance(text, PolicyFile) else None
        if text and policy is None:
            policy = load_policy(f"{text}{grace and 'grace: ' + grace}")
        settings: Any = {"budget": budget, "num_threads": 1, "num_microbatches": 4, "run_folder": folder}
        settings |= {} if folder is None else {"checkpoint_every": "3ba"}
        seen = Happening(self, events)
        seen.trainer = Trainer(
            nn.Linear(1, 1),
            loss,
            self.sources(**own),
            optimizers=SGD(lr=1e-3, momentum=0.9),
            policy=policy,
            taxonomy=TAXONOMY,
            observers=seen,
            evaluation=evaluation,
            config=RunConfig(**settings | more),
        )
        return seen.trainer


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    output: Tensor = model(rows.float()[:, None] / 24)
    return (output - 1).square().mean()


def loss_by_row(model: nn.Module, rows: Tensor) -> Loss:
    """Return the same for each row, so that one can be left out."""
    per_row = (model(rows.float()[:, None] / 24) - 1).square()[:, 0]
    return Loss(per_row.sum(), len(rows), per_row)


class Happening(Observer):
    """Lets things happen after given steps, and asks the authority then and there: no clock has a part in it."""

    def __init__(self, world: World, events: Events) -> None:
        self._world, self._events = world, events
        self.trainer: Trainer | None = None

    def on_step(self, outcome: StepOutcome) -> None:
        assert self.trainer is not None
        if outcome.clock.step in self._events and self.trainer.assembly.ranks.rank == 0:
            self._events[outcome.clock.step](self._world)
            assert self.trainer.prepared.watch is not None
            self.trainer.prepared.watch.look()


def revoke(path: str) -> Callable[[World], None]:
    """Return what takes the key of a class's signer back."""

    def act(world: World) -> None:
        people = world.people
        (keyid,) = next(one.keyids for one in ceremony.status(people.repository) if one.role == path)
        with people.repository.change(people.ring()) as change:
            ceremony.replace_key(change, keyid, None)

    return act


def rotate(path: str) -> Callable[[World], None]:
    """Return what puts Dora's key in the place of that of a class's signer."""

    def act(world: World) -> None:
        people = world.people
        (keyid,) = next(one.keyids for one in ceremony.status(people.repository) if one.role == path)
        dora = people.person("dora")
        with people.repository.change(people.ring("dora")) as change:
            ceremony.replace_key(change, keyid, dora)

    return act


def go_on(days: float) -> Callable[[World], None]:
    """Return what lets time pass for who trusts."""

    def act(world: World) -> None:
        world.ahead += timedelta(days=days)

    return act


def hide(world: World) -> None:
    """Let nobody reach the repository."""
    world.people.folder.rename(world.people.root / "hidden")


def show(world: World) -> None:
    (world.people.root / "hidden").rename(world.people.folder)


def rows_by_step(folder: Path, path: str) -> list[int]:
    """Return how many rows of a class have taught in each step that stands, as the ledger says."""
    ledger = VerifiedLedger(folder / "ledger")
    return [
        sum(cell.num_rows for cell in entry.microbatches if tables.class_of(cell, item) == path)
        for item, entry, tables in ledger.steps()
        if item.index in ledger.standing
    ]

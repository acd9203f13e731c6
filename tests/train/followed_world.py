"""An authority for policies, and small runs under what it has signed, in which it does something at a given step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cosmati import PolicyFile, Trainer, load_policy
from cosmati.ledger.reader import read_verifier_key
from cosmati.provenance.authority import ceremony
from cosmati.provenance.authority.policies import sign_policy
from cosmati.routing.signed_policy import signed_policy
from tests.provenance.authority.test_policies import PolicyPeople
from tests.train.policy_world import BEFORE, POLICY
from tests.train.policy_world import trainer as world_trainer


@dataclass
class World(PolicyPeople):
    """The people of an authority for policies, and by how much the clock of who trusts them is ahead."""

    ahead: timedelta = timedelta()

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead

    def opened(self, **more: Any) -> PolicyFile:
        return signed_policy(self.folder, root=self.pin, state=self.root / "seen", clock=self.now, **more)

    def trainer(self, folder: Path, events: Mapping[int, Callable[[], object]], **more: Any) -> Trainer:
        """Return a run's trainer; after each event the authority is asked then and there."""

        def asking(act: Callable[[], object]) -> Callable[[Trainer], None]:
            def happen(run: Trainer) -> None:
                act()
                assert run.prepared.watch is not None
                run.prepared.watch.look()

            return happen

        opened = {name: more.pop(name) for name in ("run", "number", "refresh") if name in more}
        policy = more.pop("policy", None) or self.opened(**opened)
        return world_trainer(folder, {step: asking(act) for step, act in events.items()}, policy=policy, **more)

    def sign(self, text: str, *names: str, **said: str | int) -> Callable[[], None]:  # type: ignore[override]
        """Return what signs the next version."""
        return lambda: self.signed(load_policy(POLICY + text), *(names or ("ada",)), **said)

    def signed(self, policy: PolicyFile, *names: str, **said: str | int) -> None:
        sign_policy(self.repository, self.ring(*names), "main", policy.canonical, custom=said or None)

    def meant(self, folder: Path, text: str, *names: str, step: int, **other: str | int) -> Callable[[], None]:
        """Return what signs the next version for a run, from a step on."""

        def act() -> None:
            previous = load_policy(POLICY + BEFORE).digest.hex()
            said: dict[str, str | int] = {
                "run": read_verifier_key(folder / "ledger").text,
                "previous": previous,
                "from_step": step,
            }
            self.sign(text, *names, **said | other)()

        return act

    def revoke(self) -> None:
        (keyid,) = next(one.keyids for one in ceremony.status(self.repository) if one.role == "policy.main")
        with self.repository.change(self.ring()) as change:
            ceremony.replace_key(change, keyid, None)

    def hide(self) -> None:
        self.folder.rename(self.root / "hidden")

    def show(self) -> None:
        (self.root / "hidden").rename(self.folder)

    def go_on(self) -> None:
        self.ahead = timedelta(days=8)


def made_in(root: Path, *, grace: str = "", signers: tuple[str, ...] = ("ada",)) -> World:
    world = World(root)
    world.begin()
    world.let_sign(*signers)
    world.sign(BEFORE + (grace and f"grace: {grace}\n"))()
    (root / "pin").write_text(world.pin)
    return world

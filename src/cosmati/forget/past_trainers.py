"""The trainers of a run's legs: to read its rows again in the order that each had, and to train them again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from cosmati.core.batch import Batch
from cosmati.errors import CosmatiError, ForgetError
from cosmati.forget.ablation import Wrap
from cosmati.forget.legs import Leg, leg_at, legs_after, legs_of
from cosmati.forget.making import Make, RecipeThen
from cosmati.forget.past_run import PastRun, Start
from cosmati.provenance.kept_vouchers import kept_policy
from cosmati.provenance.voucher import FOLDER
from cosmati.routing.policy_file import PolicyFile
from cosmati.train.config import CHANGEABLE
from cosmati.train.identity import kind_of, schedules_in
from cosmati.train.policy_change import Anchor, anchor_of, change_policy
from cosmati.train.trainer import Trainer


class PastTrainers:
    """The trainers of a run's legs, over what it has now, each made when it's asked for.

    Args:
        run: that was trained.
        make: makes its trainer.

    Attributes:
        legs: of the run.
        last: trainer of the last leg, which is what the recipe says.
    """

    def __init__(self, run: PastRun, make: Make) -> None:
        self._run, self._make = run, make
        self.legs = legs_of(run)
        self._made = dict[int, Trainer]()
        self.last = self.of(self.legs[-1])

    def of(self, leg: Leg) -> Trainer:
        """Return the trainer of a leg.

        Raises:
            ForgetError, CosmatiError: nobody can make it again.
        """
        if leg.first not in self._made:
            gone, run = self._run.gone, self._run
            wrap = lambda source: gone.of(source, run.salt)  # noqa: E731
            self._made[leg.first] = trainer_of(run, self.legs, leg, self._make, wrap, run.folder)
        return self._made[leg.first]

    def at(self, step: int) -> Trainer:
        """Return the trainer of a step's leg."""
        return self.of(leg_at(self.legs, step))

    def again(self, step: int) -> Iterable[Batch]:
        """Return the microbatches of a step, as the run had them."""
        feed = self.at(step).feed
        assert feed is not None, "a run that's read by position has one in each leg"
        return feed.again(step)

    def close(self) -> None:
        """Let go of what their feeds hold."""
        for trainer in self._made.values():
            if trainer.feed is not None:
                trainer.feed.close()

    def refused(self, start: Start) -> Iterator[str]:
        """Yield why the legs after a start can't be trained again, or not be gone through one after another."""
        legs = legs_after(self.legs, start.step)
        if len(self.legs) == 1:
            return
        anchor = None if start.checkpoint is None else start.checkpoint.facts.get("signed_policy")
        for leg in legs:
            try:
                trainer = self.of(leg)
                refuse_unlike(self.legs, leg, trainer)
                anchor = self._changed(leg, trainer, anchor, begins=start.checkpoint is None and leg is legs[0])
            except CosmatiError as error:
                yield str(error) if isinstance(error, ForgetError) else f"{_steps(leg)} can't be taken again: {error}"
                return

    def _changed(self, leg: Leg, trainer: Trainer, anchor: Anchor | None, *, begins: bool) -> Anchor | None:
        """Ask what the resume at a leg's beginning asks; return what changes after the leg are held against.

        Raises:
            CheckpointError: the resume would be refused.
        """
        a, policy = trainer.assembly, trainer.prepared.given.policy
        anchor = anchor_of(policy) if begins else change_policy(anchor, policy, a, leg.first)[0]
        for one in leg.policy_changes:
            if leg.first < one["step"] and (leg.end is None or one["step"] < leg.end):
                anchor = one["anchor"] and {"text": one["text"], **one["anchor"]}
        return anchor


def trainer_of(run: PastRun, legs: Sequence[Leg], leg: Leg, make: Make, wrap: Wrap, folder: Path) -> Trainer:
    """Make the trainer of a leg: it goes on from the leg before it, with what the run changed there.

    Args:
        run: that was trained.
        legs: of it.
        leg: one of them.
        make: makes the run's trainer.
        wrap: puts another source around its own.
        folder: in which it trains.

    Raises:
        ForgetError: the ledger doesn't say what the leg went by.
    """
    if len(legs) == 1:
        return make(wrap, folder)
    if leg == legs[-1]:
        trainer = make(wrap, folder, change=CHANGEABLE)
    else:
        then = RecipeThen(_policy_of(run, leg), schedules_in(leg.recipe))
        trainer = make(wrap, folder, then=then, budget=leg.recipe["budget.span"], change=CHANGEABLE)
    if trainer.policy_watch is not None:
        # The folder's own ledger may not have come to them yet.
        trainer.policy_watch.recorded = leg.policy_changes
    return trainer


def _policy_of(run: PastRun, leg: Leg) -> PolicyFile | None:
    """Return the policy with which a leg began, with who has signed it.

    Raises:
        ForgetError: the ledger has no text of it. ProvenanceError: its archive doesn't bear out who has signed it.
    """
    digest = leg.recipe.get("policy", "")
    if not digest:
        return None
    for tables in run.ledger.tables:
        if dict(tables.entry.commitments).get("policy", b"").hex() != digest or not tables.details.get("policy_text"):
            continue
        policy = PolicyFile.model_validate(tables.details["policy_text"])
        facts = tables.details.get("policy_provenance")
        return policy.with_voucher(kept_policy(run.folder / "ledger" / FOLDER, facts)) if facts else policy
    msg = f"The ledger commits to the policy {digest[:16]}, under which steps {leg.first}:{leg.end} were taken, and has"
    raise ForgetError(f"{msg} no text of it, so that nobody can take them again. Train anew without the content.")


def refuse_unlike(legs: Sequence[Leg], leg: Leg, trainer: Trainer) -> None:
    """Compare the trainer of a leg with what the ledger says of it: no resume does, where anything may change.

    Raises:
        ForgetError: policy, budget or a schedule is another one.
    """
    made = {name: value for name, value in trainer.prepared.identity.items() if kind_of(name) in CHANGEABLE}
    now = {name: "" if value is None else str(value) for name, value in made.items()}
    names = [name for name in {**leg.recipe, **now} if leg.recipe.get(name, "") != now.get(name, "")]
    what = f"{_steps(leg)} had another {' and another '.join(sorted(set(map(kind_of, names))))} than"
    if names and leg == legs[-1]:
        raise ForgetError(f"{what} the recipe. Give the one that the run ended with.")
    if names:
        msg = (
            f"{what} can be made again. From before a stop the ledger gives policies, budgets and the schedules of "
            "cosmati.optim. Train anew without the content, or forget what came after that stop."
        )
        raise ForgetError(msg)


def _steps(leg: Leg) -> str:
    return f"Steps {leg.first} to {'the end' if leg.end is None else leg.end - 1}"

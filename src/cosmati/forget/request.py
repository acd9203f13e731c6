"""A deletion that is asked for: which classes and rows of which run are meant, and when it first had them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from cosmati.errors import CosmatiError, ForgetError
from cosmati.forget.asked import ToForget
from cosmati.forget.contact import Contact, contact_of, refuse_another
from cosmati.forget.holds import Hold, holds_in_force
from cosmati.forget.legs import Leg, legs_of
from cosmati.forget.making import Make
from cosmati.forget.past_run import Gone, PastRun
from cosmati.forget.past_trainers import PastTrainers
from cosmati.train.trainer import Trainer


@dataclass(frozen=True)
class Request:
    """A deletion that is asked for of a run.

    Attributes:
        run: of which.
        asked: what.
        make: makes the run's trainer; None without its recipe.
        names: classes that are meant, as the ledger and the data name them.
        contact: what the run had of it.
        trainers: the run's own; None without its recipe.
        not_its: why the recipe isn't the run's; empty where it is.
        repair_steps: of an ablation; 0 takes a tenth of the run's.
    """

    run: PastRun
    asked: ToForget
    make: Make | None
    names: tuple[str, ...]
    contact: Contact
    trainers: PastTrainers | None = field(default=None, repr=False)
    not_its: str = ""
    repair_steps: int = 0

    @classmethod
    def open(cls, run: PastRun, asked: ToForget, make: Make | None, *, repair_steps: int = 0) -> Request:
        """Look up what is meant.

        Raises:
            ForgetError: a legal hold is on it, the run has no such class, or its rows can't be told.
        """
        trainers = None if make is None else PastTrainers(run, make)
        try:
            not_its = "" if trainers is None else _not_its(run, trainers.last)
            names = _names(run, asked, None if trainers is None else trainers.last)
            # Another's data don't tell of which class a row is.
            _refuse_held(run, asked, None if not_its else trainers)
            contact = _contact(run, asked, names, trainers)
            return cls(run, asked, make, names, contact, trainers, not_its, repair_steps)
        finally:
            if trainers is not None:
                trainers.close()

    @property
    def trainer(self) -> Trainer | None:
        """The trainer that the recipe makes; None without one."""
        return None if self.trainers is None else self.trainers.last

    @property
    def legs(self) -> tuple[Leg, ...]:
        """The legs of the run."""
        return legs_of(self.run) if self.trainers is None else self.trainers.legs

    @property
    def gone(self) -> Gone:
        """What has tombstones in its place afterwards."""
        return self.run.gone.and_also(self.names, self.asked.rows)

    def begins_alike(self) -> bool:
        """Say whether the recipe makes the weights that entry 0 commits to."""
        assert self.trainer is not None, "asked where there's one"
        return self.trainer.assembly.layout.digest() == dict(self.run.ledger.run.commitments)["model"]


def _not_its(run: PastRun, trainer: Trainer) -> str:
    try:
        refuse_another(run, trainer, run.any_checkpoint())
    except CosmatiError as error:
        return str(error)
    return ""


def _names(run: PastRun, asked: ToForget, trainer: Trainer | None) -> tuple[str, ...]:
    """Return the classes that are meant: the ledger knows them under a policy, the data always."""
    data = trainer.prepared.given.data if trainer is not None else None
    known = run.ledger.classes if run.is_governed else tuple(getattr(data, "class_names", ()))
    if asked.classes and not known:
        msg = (
            "The run has no policy, so that its ledger tells no classes apart: its data do. Give the run's recipe, "
            "--recipe FILE[:FUNCTION]."
        )
        raise ForgetError(msg)
    return asked.names_in(known)


def _contact(run: PastRun, asked: ToForget, names: Collection[str], trainers: PastTrainers | None) -> Contact:
    if asked.classes and run.is_governed:
        return Contact(run.first_contact(names), frozenset(names), 0)
    if trainers is None:
        msg = (
            "Which steps had which rows is told by the data, read again as the run read them. Give the run's recipe, "
            "--recipe FILE[:FUNCTION]."
        )
        raise ForgetError(msg)
    return contact_of(run, trainers, asked.rows, names)


def _refuse_held(run: PastRun, asked: ToForget, trainers: PastTrainers | None) -> None:
    """Refuse what a legal hold is on.

    Raises:
        ForgetError: it is, or may be.
    """
    for hold in holds_in_force(run.folder):
        is_alike = bool(hold.asked.rows) == bool(asked.rows)
        is_told = is_alike or trainers is not None
        if not hold.may_mean(asked) or (not is_alike and trainers and not _classes_meet(run, hold, asked, trainers)):
            continue
        maybe = "" if is_told else " Whether these are its rows the run's recipe can tell: --recipe."
        msg = (
            f"Legal hold {hold.number} is on {hold.asked.words}, because {hold.because} ({hold.at}): nothing of it is "
            f"forgotten before it's released.{maybe} When it may be: cosmati forget release {run.folder} {hold.number} "
            "--because TEXT."
        )
        raise ForgetError(msg)


def _classes_meet(run: PastRun, hold: Hold, asked: ToForget, trainers: PastTrainers) -> bool:
    """Say whether rows on the one side belong to a class on the other."""
    by_rows, by_class = (hold.asked, asked) if hold.asked.rows else (asked, hold.asked)
    return by_class.has_any(contact_of(run, trainers, by_rows.rows).classes)

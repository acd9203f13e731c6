"""A deletion that is asked for: which classes and rows of which run are meant, and when it first had them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from cosmati.data.opened import OpenedSource
from cosmati.data.packed import PackedSource
from cosmati.data.tombstoned import beneath
from cosmati.errors import CosmatiError, ForgetError
from cosmati.forget.asked import ToForget
from cosmati.forget.contact import Contact, contact_of, refuse_another
from cosmati.forget.holds import Hold, holds_in_force
from cosmati.forget.past_run import Gone, PastRun
from cosmati.forget.reading import columns_of
from cosmati.forget.replay import Make
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
        trainer: the run's own; None without its recipe.
        not_its: why the recipe isn't the run's; empty where it is.
    """

    run: PastRun
    asked: ToForget
    make: Make | None
    names: tuple[str, ...]
    contact: Contact
    trainer: Trainer | None = field(default=None, repr=False)
    not_its: str = ""

    @classmethod
    def open(cls, run: PastRun, asked: ToForget, make: Make | None) -> Request:
        """Look up what is meant.

        Raises:
            ForgetError: a legal hold is on it, the run has no such class, or its rows can't be told.
        """
        trainer = None if make is None else make(lambda source: run.gone.of(source, run.salt), run.folder)
        try:
            not_its = "" if trainer is None else _not_its(run, trainer)
            names = _names(run, asked, trainer)
            _refuse_documents(asked, trainer)
            # Another's data don't tell of which class a row is.
            _refuse_held(run, asked, None if not_its else trainer)
            return cls(run, asked, make, names, _contact(run, asked, names, trainer), trainer, not_its)
        finally:
            if trainer is not None and trainer.feed is not None:
                trainer.feed.close()

    @property
    def gone(self) -> Gone:
        """What has tombstones in its place afterwards."""
        return self.run.gone.and_also(self.names, self.asked.rows)

    def begins_alike(self) -> bool:
        """Say whether the recipe makes the weights that entry 0 commits to."""
        assert self.trainer is not None, "asked where there's one"
        return self.trainer.assembly.layout.digest() == dict(self.run.ledger.run.commitments)["model"]


def _refuse_documents(asked: ToForget, trainer: Trainer | None) -> None:
    """Refuse a subject's rows where these are documents, and the run's own rows whole packs, which have other ids.

    Raises:
        ForgetError: they are.
    """
    data = trainer.prepared.given.data if trainer is not None and asked.subject else None
    inner, _ = beneath(data)
    sources: Sequence[OpenedSource] = getattr(getattr(inner, "dataset", None), "sources", ())
    if not isinstance(inner, PackedSource) and any({"tokens", "spans"} <= columns_of(one) for one in sources):
        msg = (
            f"A subject's rows in packs are documents, and {type(inner).__name__} gives packs whole, whose ids are "
            "others. `cosmati data find` names the packs: ask for those, --rows FILE. Runs over a PackedSource forget "
            "documents."
        )
        raise ForgetError(msg)


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


def _contact(run: PastRun, asked: ToForget, names: Collection[str], trainer: Trainer | None) -> Contact:
    if asked.classes and run.is_governed:
        return Contact(run.first_contact(names), frozenset(names), 0)
    if trainer is None:
        msg = (
            "Which steps had which rows is told by the data, read again as the run read them. Give the run's recipe, "
            "--recipe FILE[:FUNCTION]."
        )
        raise ForgetError(msg)
    return contact_of(run, trainer, asked.rows, names)


def _refuse_held(run: PastRun, asked: ToForget, trainer: Trainer | None) -> None:
    """Refuse what a legal hold is on.

    Raises:
        ForgetError: it is, or may be.
    """
    for hold in holds_in_force(run.folder):
        is_alike = bool(hold.asked.rows) == bool(asked.rows)
        is_told = is_alike or trainer is not None
        if not hold.may_mean(asked) or (not is_alike and trainer and not _classes_meet(run, hold, asked, trainer)):
            continue
        maybe = "" if is_told else " Whether these are its rows the run's recipe can tell: --recipe."
        msg = (
            f"Legal hold {hold.number} is on {hold.asked.words}, because {hold.because} ({hold.at}): nothing of it is "
            f"forgotten before it's released.{maybe} When it may be: cosmati forget release {run.folder} {hold.number} "
            "--because TEXT."
        )
        raise ForgetError(msg)


def _classes_meet(run: PastRun, hold: Hold, asked: ToForget, trainer: Trainer) -> bool:
    """Say whether rows on the one side belong to a class on the other."""
    by_rows, by_class = (hold.asked, asked) if hold.asked.rows else (asked, hold.asked)
    return by_class.has_any(contact_of(run, trainer, by_rows.rows).classes)

"""The plan of a deletion: what is possible, how strong it is, what it costs, and what it doesn't cover."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from cosmati.errors import CosmatiError, RefutedError
from cosmati.forget.ablation import NOT_COVERED, STRENGTH, region_shares, separated
from cosmati.forget.contact import without_rows
from cosmati.forget.derived import EVERYWHERE, Derived, derived_of
from cosmati.forget.legs import amended_after, changed_at
from cosmati.forget.past_run import PastRun, Start
from cosmati.forget.repaired_run import single_classes
from cosmati.forget.request import Request
from cosmati.forget.sealing import why_not_sealed
from cosmati.ledger.query import direct_write_exclusions
from cosmati.train.facts import describe_environment
from cosmati.train.identity import SURROUNDINGS

EXACT = "exact with respect to content; that rows were there, and where, remains"
_KEPT = "the weights and their averages are kept, the optimizer's state isn't: to train on, begin another run from them"
FROM_ENTRY_0 = "exact with respect to content from entry 0 on; that rows were there, and where, remains"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to do what's asked.

    Attributes:
        method: its name.
        strength: of the result, in words; empty where it isn't possible.
        why_not: why it isn't possible; empty where it is.
        num_steps: that it trains.
        minutes: that it takes, by the run's own measured steps; None where nobody measured.
        from_step: where a replay begins.
        notes: what limits the strength, or has to be known besides.
        is_approximate: whether what it leaves is measured, and no more: it's done where it's asked for by name.
    """

    method: str
    strength: str = ""
    why_not: tuple[str, ...] = ()
    num_steps: int = 0
    minutes: float | None = None
    from_step: int = 0
    notes: tuple[str, ...] = ()
    is_approximate: bool = False

    @property
    def is_possible(self) -> bool:
        """Whether it can be done."""
        return not self.why_not


@dataclass(frozen=True, kw_only=True)
class DeletionPlan:
    """What can be done: what is exact first, the cheapest before the others.

    Attributes:
        run: its name, of its ledger.
        asked: what, in words.
        digest: of the request, keyed: it names no row.
        classes: that are meant.
        num_rows: of those asked for, how many the run was given; 0 where classes are asked for.
        first_contact: the first step with any; None where no step had it.
        options: the methods: exact ones that are possible, exact ones that aren't, then ablation.
        derived: what was made of the run, and may hold it.
        not_covered: what no method covers.
        notes: on what was asked for.
    """

    run: str
    asked: str
    digest: str
    classes: tuple[str, ...]
    num_rows: int
    first_contact: int | None
    options: tuple[Option, ...]
    derived: tuple[Derived, ...]
    not_covered: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def option(self, method: str) -> Option | None:
        """Return a method's; None where there is no such method."""
        return next((one for one in self.options if one.method == method), None)

    def to_mapping(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        told = asdict(self)
        for one, option in zip(told["options"], self.options, strict=True):
            one["is_possible"] = option.is_possible
        return told


def assess_drop(request: Request) -> Option:
    """Say whether what is a class's own can be taken out, and that's all there is of it."""
    why_not = tuple(_why_not_drop(request))
    if why_not:
        return Option(method="drop", why_not=why_not)
    outcome = request.run.record.outcome
    is_whole = outcome in ("completed", "exhausted")
    notes = (_KEPT,) if is_whole else (_KEPT, f"the run is recorded as {outcome}: its weights aren't a finished run's")
    return Option(method="drop", strength=EXACT, notes=notes)


def own_regions(run: PastRun, classes: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return pairs of class and region where the region is the class's own: the run promises it, or did."""
    promised = {one.name for one in run.record.guarantees}
    return [(c, r) for c in classes for r in run.ledger.regions if f"isolated({c}, {r})" in promised]


def _why_not_drop(request: Request) -> Iterator[str]:
    run, classes = request.run, request.names
    if request.asked.rows:
        yield "rows are asked for, and what can be dropped is a class's own as a whole"
        return
    pairs = own_regions(run, classes)
    for name in classes:
        own = [region for one, region in pairs if one == name]
        if not own:
            yield f"class {name} isn't isolated: it has no region of its own (IsolatedAdapters), and taught shared ones"
        for region in own:
            if reason := run.broken(f"isolated({name}, {region})"):
                yield f"isolated({name}, {region}) isn't the run's throughout: {reason}"
    mine = {name: {region for one, region in pairs if one == name} for name in classes}
    asked = [
        (one, region)
        for one in run.ledger.classes
        for region in run.ledger.regions
        if (one in mine and mine[one] and region not in mine[one])
        or (one not in mine and any(region in regions for regions in mine.values()))
    ]
    try:
        direct_write_exclusions(run.ledger, asked)
    except RefutedError as error:
        yield str(error)


def assess_replay(request: Request) -> Option:
    """Say whether the run can be trained again from before first contact."""
    run, contact = request.run, request.contact.first_step
    why_not = list(_why_not_replay(request))
    if contact is None or why_not:
        return Option(method="replay", why_not=tuple(why_not or ["no step had any of it"]))
    start = run.start(contact)
    budget = request.trainer.assembly.budget.num_steps if request.trainer is not None else None
    num_steps = (budget or run.num_steps) - start.step
    seconds = run.seconds_per_step
    tainted = tuple(_prepared_with(request))
    return Option(
        method="replay",
        strength=FROM_ENTRY_0 if tainted else EXACT,
        num_steps=num_steps,
        minutes=None if seconds is None else seconds * num_steps / 60,
        from_step=start.step,
        notes=(*_where(start, contact), *changed_at(request.legs, start.step), *tainted, *_surroundings(request)),
    )


def _why_not_replay(request: Request) -> Iterator[str]:
    run, contact = request.run, request.contact.first_step
    if request.trainer is None:
        yield "it trains, and needs the run's recipe: --recipe FILE[:FUNCTION]"
    if request.not_its:
        yield request.not_its
    if reason := run.broken("replayable"):
        yield reason if reason.startswith("replayable") else f"replayable isn't promised: {reason}"
    if contact is None:
        return
    gone = request.gone
    try:
        start = run.start(contact)
        if request.trainer is not None:
            gone.of(request.trainer.prepared.given.data, run.salt)
    except CosmatiError as error:
        yield str(error)
        return
    if told := amended_after(run, start, request.names, request.legs):
        yield (
            f"the run was amended after step {start.step}, which a replay from there doesn't do again: "
            f"{', '.join(told)}. Train anew without the content, or forget what came after that"
        )
        return
    if request.trainer is not None:
        yield from why_not_sealed(run, request.trainer)
    if request.trainers is not None and not request.not_its:
        yield from request.trainers.refused(start)
    if start.checkpoint is None and request.trainer is not None and not request.begins_alike():
        yield (
            f"no checkpoint from before the first contact (step {contact}) is kept, and the recipe makes other first "
            "weights than entry 0 of the ledger commits to"
        )
    trainers = request.trainers
    if trainers is not None and not request.not_its and (reason := without_rows(trainers, contact, gone)):
        yield reason


def _where(start: Start, contact: int) -> Iterator[str]:
    if start.checkpoint is not None:
        yield f"it begins from the checkpoint of step {start.step}; first contact is at step {contact}"
    else:
        yield f"it begins anew, since no checkpoint from before first contact (step {contact}) is kept"
    yield from (f"passed over: {one}" for one in start.passed_over)


def _prepared_with(request: Request) -> Iterator[str]:
    """Yield what was prepared before the run, and may have been with the content."""
    for one in request.run.artifacts():
        provenance: Any = one.get("provenance")
        targets = [str(source["target"]) for source in provenance["sources"]] if provenance else []
        classes = ["/".join(target.split("/")[1:-2]) for target in targets]
        label = f"{one['kind']} {one['name']}".rstrip()
        if one["kind"] == "evaluation data":
            continue  # They teach nothing.
        if not classes:
            yield f"the {label} isn't made again, and nobody says from what it was made: rebuild it if that had it"
        elif request.asked.rows or request.asked.has_any(classes):
            yield f"the {label} isn't made again, and was made from {', '.join(classes)}: rebuild it if that had it"


def _surroundings(request: Request) -> Iterator[str]:
    if request.trainer is None:
        return
    now, was = describe_environment(request.trainer.assembly.device), request.run.record.environment
    odd = [f"{name} {now.get(name)}, was {was.get(name)}" for name in SURROUNDINGS if now.get(name) != was.get(name)]
    if odd:
        yield f"this machine computes other bits ({'; '.join(odd)}): free of the content, and not bit for bit the run's"


def assess_ablate(request: Request) -> Option:
    """Say whether regions that only or mostly the classes taught can be set to zero, and the rest be repaired."""
    run, classes = request.run, single_classes(request.asked, request.names)
    if why_not := tuple(_why_not_ablate(request)):
        return Option(method="ablate", why_not=why_not, is_approximate=True)
    try:
        shares = region_shares(run.ledger, classes)
        chosen = separated(shares, classes)
        run.final_checkpoint()
    except CosmatiError as error:
        return Option(method="ablate", why_not=(str(error),), is_approximate=True)
    isolated = {region for _, region in own_regions(run, request.names)} & {one.region for one in chosen}
    if isolated:
        why = f"region {', '.join(sorted(isolated))} runs for its class alone, so no measure tells: drop or replay"
        return Option(method="ablate", why_not=(why,), is_approximate=True)
    notes = [f"region {one.region} is set to zero: of its teaching {one.share:.1%} was theirs" for one in chosen]
    left = [one for one in shares if one.share and one not in chosen]
    notes += [f"stays: region {one.region}, of whose teaching {one.share:.1%} was theirs" for one in left]
    num_steps, seconds = request.repair_steps or max(1, run.num_steps // 10), run.seconds_per_step
    return Option(
        method="ablate",
        strength=STRENGTH,
        num_steps=num_steps,
        minutes=None if seconds is None else seconds * num_steps / 60,
        notes=(
            *notes,
            *(f"stays: {one}" for one in NOT_COVERED),
            "the result is a run of its own, and this one isn't superseded by it",
        ),
        is_approximate=True,
    )


def _why_not_ablate(request: Request) -> Iterator[str]:
    run = request.run
    if request.asked.rows:
        yield "rows are asked for, and what can be ablated is a region that classes taught"
    if request.trainer is None:
        yield "it trains, and needs the run's recipe: --recipe FILE[:FUNCTION]"
    elif request.trainer.assembly.ranks.is_parallel:
        yield "it's measured in one process: run it without torchrun"
    if request.not_its:
        yield request.not_its
    if not run.is_governed:
        yield "the run has no policy, so that its ledger tells no classes and no regions apart"
    if request.contact.first_step is None:
        yield "no step had any of it"


METHODS = {"drop": assess_drop, "replay": assess_replay, "ablate": assess_ablate}
"""What can be done: what is exact, cheapest first, then what isn't; each says whether it's possible."""


def plan_deletion(request: Request) -> DeletionPlan:
    """Return what can be done about a request.

    Raises:
        TamperError: the ledger doesn't verify.
    """
    run, contact = request.run, request.contact
    found = [assess(request) for assess in METHODS.values()]
    # A replay says it of itself; where no step had any, the weights that it began from still may.
    prepared = _prepared_with(request) if contact.first_step is None else ()
    evaluated = [f"{one['kind']} {one['name']}".rstrip() for one in run.artifacts() if one["kind"] == "evaluation data"]
    return DeletionPlan(
        run=run.ledger.key.name,
        asked=request.asked.words,
        digest=request.asked.digest(run.salt),
        classes=tuple(sorted({*request.names, *contact.classes})),
        num_rows=contact.num_rows if request.asked.rows else 0,
        first_contact=contact.first_step,
        options=tuple(sorted(found, key=lambda one: (one.is_approximate, not one.is_possible))),
        derived=() if contact.first_step is None else derived_of(run, contact.first_step),
        not_covered=(
            *EVERYWHERE,
            *(f"the {label}, which may hold it: nothing learnt from it" for label in evaluated),
            *prepared,
        ),
        notes=tuple(_on_ids(request)),
    )


def _on_ids(request: Request) -> Iterator[str]:
    asked, contact = request.asked, request.contact
    if asked.meant:
        yield f"the ids are of {asked.meant}"
    if asked.rows and contact.num_rows < len(asked.rows):
        yield f"{len(asked.rows) - contact.num_rows} of the {len(asked.rows)} ids are of nothing that the run was given"
    if asked.doubtful:
        own, other = ("documents", "packs") if "documents" in asked.meant else ("packs", "documents")
        yield (
            f"{len(asked.doubtful)} of them are ids of {other} as well, and taken for those of {own}, as the run reads "
            f"them: say which are meant by --{own} or --{other} in place of --rows"
        )

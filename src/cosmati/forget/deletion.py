"""A deletion from its plan to its end: replay or drop, then the certificate, then what's superseded is erased.

Each part leaves the disk such that the same call, after a kill anywhere, goes on with the next: the successor's folder
appears whole with the request in it, training resumes, a certificate counts once the ledger has signed it, and what is
erased is what the last certificate still lists.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cosmati.errors import CosmatiError, ForgetError, RunError
from cosmati.export.publishing import Say
from cosmati.forget.asked import ToForget
from cosmati.forget.certificate import certify, pending, read_certificate
from cosmati.forget.derived import DELETED, Derived, derived_of
from cosmati.forget.drop import drop
from cosmati.forget.holds import all_holds, holds_in_force
from cosmati.forget.legs import legs_of
from cosmati.forget.making import Make
from cosmati.forget.past_run import PastRun
from cosmati.forget.planning import DeletionPlan, Option, plan_deletion
from cosmati.forget.repaired_run import repair, single_classes
from cosmati.forget.replay import replay
from cosmati.forget.request import Request
from cosmati.forget.shredding import SALTED, LostKeys, kept_keys, keys_to_lose, shred, superseded_by
from cosmati.forget.stored_copies import erase_copies
from cosmati.forget.succession import CERTIFICATES, EARLIER, REQUEST
from cosmati.ledger.roots import signed_certificates
from cosmati.records.run import RunRecord
from cosmati.storage.atomic import sync
from cosmati.train.ranks import Ranks


@dataclass(frozen=True)
class Begun:
    """A deletion that was begun, as the successor's folder has it.

    Attributes:
        plan: by which it was begun.
        option: of the plan.
        names: classes that have tombstones in their place.
        told: what the ledger says of it.
        last_hold: number of the last legal hold that was looked at.
    """

    plan: DeletionPlan
    option: Option
    names: tuple[str, ...]
    told: Mapping[str, Any]
    last_hold: int = 0

    def to_mapping(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        method = self.option.method
        told = {"told": dict(self.told), "plan": self.plan.to_mapping(), "method": method, "names": list(self.names)}
        return told | {"last_hold": self.last_hold}

    def is_of(self, digest: str, method: str | None, repair_steps: int) -> bool:
        """Say whether it's what is asked for; None and 0 leave open how."""
        is_as_long = repair_steps in (0, self.option.num_steps)
        return self.plan.digest == digest and method in (None, self.option.method) and is_as_long

    @classmethod
    def of_mapping(cls, told: Mapping[str, Any]) -> Begun:
        """Read it from what JSON holds."""
        plan = dict(told["plan"])
        options = [{name: value for name, value in one.items() if name != "is_possible"} for one in plan["options"]]
        plan["options"] = tuple(
            Option(**{**one, "why_not": tuple(one["why_not"]), "notes": tuple(one["notes"])}) for one in options
        )
        plan["derived"] = tuple(Derived(**one) for one in plan["derived"])
        plan |= {name: tuple(plan[name]) for name in ("classes", "not_covered", "notes") if name in plan}
        made = DeletionPlan(**plan)
        option = made.option(told["method"])
        assert option is not None, "the plan that was kept has it"
        return cls(made, option, tuple(told["names"]), told["told"], told["last_hold"])


@dataclass(frozen=True)
class Deletion:
    """How far a deletion is.

    Attributes:
        out: the successor's folder.
        outcome: of its training: `completed`, or `stopped` where somebody asked for it; then there's no certificate.
        certificate: the last one.
        told: what it says.
    """

    out: Path
    outcome: str
    certificate: Path | None = None
    told: Mapping[str, Any] | None = None


def default_out(run: PastRun, asked: ToForget, method: str | None = None) -> Path:
    """Return where a successor goes if nobody says otherwise: beside the run."""
    how = "ablated" if method == "ablate" else "without"
    return run.folder.with_name(f"{run.folder.name}-{how}-{asked.digest(run.salt)[:8]}")


def begin(request: Request, method: str, out: Path) -> Begun:
    """Plan a deletion, unless the successor's folder says that it was begun.

    Raises:
        ForgetError: the method isn't possible, or the folder is something else's.
    """
    digest = request.asked.digest(request.run.salt)
    begun = begun_in(out)
    if begun is not None:
        if not begun.is_of(digest, method, request.repair_steps):
            was = f"{begun.plan.asked}, by {begun.option.method}"
            was += f" with {begun.option.num_steps} steps" if begun.option.is_approximate else ""
            raise ForgetError(f"{out} is of another deletion ({was}). Give another --out.")
        return begun
    request.run.refuse_succeeded()
    plan = plan_deletion(request)
    option = plan.option(method)
    if option is None:
        known = ", ".join(one.method for one in plan.options)
        raise ForgetError(f"There is no method {method!r} here. Take one of {known}.")
    if not option.is_possible:
        raise ForgetError(f"{method} isn't possible: {'; '.join(option.why_not)}.")
    head = request.run.ledger.head
    told = {
        "asked": digest,
        "classes": list(plan.classes),
        "num_rows": plan.num_rows,
        "method": method,
        "from_step": option.from_step,
        "succeeds": {"tree_size": head.size, "root": head.root.hex()},
    }
    return Begun(plan, option, request.names, told, len(all_holds(request.run.folder)))


def begun_in(out: Path) -> Begun | None:
    """Return the deletion whose successor a folder is; None where there is no folder.

    Raises:
        ForgetError: it's something else.
    """
    if not out.exists():
        return None
    try:
        return Begun.of_mapping(json.loads((out / REQUEST).read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        msg = f"{out} is there already, and isn't what a deletion has begun. Give another --out."
        raise ForgetError(msg) from error


def carry_out(
    run: PastRun, asked: ToForget, begun: Begun, make: Make | None, out: Path, *, delete_superseded: bool, say: Say
) -> Deletion:
    """Do it, or go on with it: successor, certificate, erasure.

    Args:
        run: that has the content.
        asked: what is to be forgotten.
        begun: how.
        make: makes the run's trainer; only dropping does without.
        out: the successor's folder.
        delete_superseded: delete the run's own checkpoints that have learnt the content, once that's certified.
        say: told of what's done, a line at a time.

    Raises:
        ForgetError, CosmatiError: it can't be done, or a hold was put on it since; what's done so far stands.
    """
    if begun.option.is_approximate and delete_superseded:
        raise ForgetError("An ablation supersedes nothing: what it leaves may have the content. Delete after a replay.")
    _refuse_held(out, asked, begun)
    outcome = _succeed(run, asked, begun, make, out, say)
    if outcome not in ("completed", "exhausted"):
        return Deletion(out, outcome)
    lost = keys_to_lose(run, asked, begun.names, make) if delete_superseded else None
    if Ranks().rank:
        return Deletion(out, outcome)
    found = last_certificate(out, begun.plan.digest)
    if found is None:
        say("Certifying")
        derived = () if begun.plan.first_contact is None else derived_of(run, begun.plan.first_contact)
        found = certify(run, out, begun.plan, begun.option, derived, kept_keys(out))
    return Deletion(out, outcome, *(found if lost is None else _erase(run, asked, begun, lost, out, found, say)))


def _refuse_held(out: Path, asked: ToForget, begun: Begun) -> None:
    for hold in holds_in_force(out):
        if hold.number > begun.last_hold and hold.may_mean(asked):
            msg = f"Legal hold {hold.number} of {out} may be on it, because {hold.because}. Release it first."
            raise ForgetError(msg)


def _erase(
    run: PastRun,
    asked: ToForget,
    begun: Begun,
    lost: LostKeys,
    out: Path,
    found: tuple[Path, dict[str, Any]],
    say: Say,
) -> tuple[Path, dict[str, Any]]:
    """Delete checkpoints that learnt the content, shred the keys of its rows, and certify that, once."""
    _refuse_held(out, asked, begun)  # One may have been put on it while the steps were taken.
    left = pending(found[1])
    for one in left:
        say(f"Deleting {one.path} of {run.folder}")
        erase(run.folder / one.path)
    listed = tuple(Derived(**one) for one in found[1]["derived"])
    derived = tuple(replace(one, status=DELETED) if one in left else one for one in listed)
    if begun.plan.first_contact is not None:
        derived = erase_copies(run, begun.plan.first_contact, derived, say)
    shredded = shred(run, lost, out, (read_certificate(found[0])[1], int(found[0].stem)))
    if derived == listed and shredded.status == found[1].get("row_keys", SALTED):
        return found
    say(f"Row keys: {shredded.status}")
    return certify(run, out, begun.plan, begun.option, derived, shredded)


def _succeed(run: PastRun, asked: ToForget, begun: Begun, make: Make | None, out: Path, say: Say) -> str:
    gone = run.gone.and_also(begun.names, asked.rows)
    told, kept = begun.told, {**begun.to_mapping(), "run": str(run.folder.resolve())}
    kept[EARLIER] = list(map(str, superseded_by(run.folder)))
    if begun.option.method == "drop":
        if Ranks().rank == 0:
            say(f"Dropping what is {', '.join(begun.names)}'s own")
            drop(run, begun.names, out, told, kept, gone)
        return "completed"
    if make is None:
        raise ForgetError(
            f"To {begun.option.method} is to train, and needs the run's recipe: --recipe FILE[:FUNCTION]."
        )
    if begun.option.method == "ablate":
        num_steps, classes = begun.option.num_steps, single_classes(asked, begun.names)
        say(f"Ablating what {', '.join(classes)} taught, with {num_steps} steps of repair")
        return "completed" if repair(run, classes, make, out, num_steps, kept, gone) else "stopped"
    if over := _outcome(run, out):
        return over
    start = run.start(begun.option.from_step) if not out.exists() else None
    say(f"Replaying from step {begun.option.from_step}")
    return replay(run, make, out, start, told, kept, gone).outcome


def _outcome(run: PastRun, out: Path) -> str:
    """Return how the replay of a run has ended; empty where it isn't over: each of its legs ends, too."""
    with suppress(OSError, RunError):
        record = RunRecord.from_json((out / "run.json").read_text())
        is_over = record.outcome in ("completed", "exhausted")
        return record.outcome if is_over and record.num_steps > legs_of(run)[-1].first else ""
    return ""


def last_certificate(out: Path, asked: str) -> tuple[Path, dict[str, Any]] | None:
    """Return the last certificate of a deletion that the ledger has signed; None where there's none yet."""
    number = len(signed_certificates(PastRun(out).ledger))
    while number:
        path = out / CERTIFICATES / f"{number:04d}.json"
        try:
            told, digest = read_certificate(path)
        except CosmatiError as error:
            raise ForgetError(f"The ledger has signed {path.name}, and it isn't whole: {error}") from error
        if told["asked"]["digest"] == asked and digest in signed_certificates(PastRun(out).ledger):
            return path, told
        number -= 1
    return None


def erase(path: Path) -> None:
    """Delete a checkpoint's folder, durably; one that's gone stays gone. Blocks of the disk aren't overwritten."""
    hidden = path.with_name(f".erasing-{path.name}")
    if path.exists():
        path.replace(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
    if path.parent.exists():
        sync(path.parent)
    if path.exists() or hidden.exists():
        raise ForgetError(f"{path} can't be deleted. Make its folder writable, and give the same command again.")

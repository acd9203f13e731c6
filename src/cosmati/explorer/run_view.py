"""Everything that a page shows of one run, read from its folder alone: the record, the losses, and the ledger."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cosmati.errors import LedgerError, RunError
from cosmati.explorer.learning import ClassSchedule, governance_facts
from cosmati.explorer.trust import Trust, read_trust
from cosmati.ledger.evidence import NOBODY, TrustedEvidence
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.sealing import ColumnKeys
from cosmati.ledger.tables import Tables
from cosmati.ledger.verify import LedgerReport, verify_ledger
from cosmati.records.about import ABOUT_FILE, RunAbout
from cosmati.records.artifacts import ARTIFACT, words_of
from cosmati.records.governance import GovernanceFacts, LedgerFacts
from cosmati.records.run import CLOCK_FIELDS, RunRecord
from cosmati.storage.lock import is_locked
from cosmati.store.live import extremes
from cosmati.store.scan import is_plain, plain_bytes, what_is_not_plain
from cosmati.store.summary import finite, is_step

Points = tuple[tuple[int, float | None], ...]
"""Step and value; None where the value wasn't finite."""
RECORD_FILE = "run.json"
BESIDE = {"learning_rate": "learning rate", "gradient_norm": "norm of the gradients"}
"""What is drawn of `steps.jsonl` beside the loss, with its words."""
PACE = "rows a second"
_NO_POLICY = "0" * 64
_MAX_ABOUT = 4 << 20
_TRIES = 3
_OPENED = "What a credential opens of sealed columns is shown here: this page is for its holder alone."
_MAX_BESIDE = 2000


@dataclass(frozen=True, kw_only=True)
class RunView:
    """All that the page shows of one run.

    Attributes:
        record: The content of `run.json`.
        status: The record's outcome, or `still going` or `broken off` where it has no end.
        num_steps: Steps done, as far as the folder says.
        losses: Mean loss by step.
        metrics: What was measured by step, by the metric's name.
        beside: Learning rate, norm of the gradients and pace by step, as far as they were logged.
        ledger: State of the ledger, None for a run without one.
        governance: Policy and contribution; None where there was no policy, or where nothing believable says it.
        trust: Who vouched for the data, and who decided the policy; None as of `governance`.
        schedule: Classes of the microbatches of each step that stands.
        about: What the program that trained it tells besides, unsigned; None where it told nothing.
        warnings: What is wrong.
        notes: What else a reader must know, and what the folder doesn't hold.
    """

    record: RunRecord
    status: str
    num_steps: int
    losses: Points = ()
    metrics: Mapping[str, Points]
    beside: Mapping[str, Points] = field(default_factory=dict)
    ledger: LedgerFacts | None = None
    governance: GovernanceFacts | None = None
    trust: Trust | None = None
    schedule: ClassSchedule = ()
    about: RunAbout | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_governed(self) -> bool:
        """Whether the run had a policy."""
        return bool(self.record.digests.get("policy"))

    @property
    def data_signed(self) -> str:
        """Whether the classes of the data are signed, in words; empty where they have none."""
        root = self.record.digests.get("data_root", "")
        if root in ("", "declared"):
            return root and "The classes of the data are declared: nobody has signed them."
        names = ", ".join(one[:12] for one in root.split(","))
        return f"The data were signed, of the authority {names}: the command follows the signatures."

    @property
    def prepared(self) -> tuple[tuple[str, str], ...]:
        """Label of each preparation artifact, and whether it's signed or ungoverned, in words."""
        told = self.record.digests.items()
        return tuple((name.removeprefix(ARTIFACT), words) for name, words in told if name.startswith(ARTIFACT))

    @property
    def is_imported(self) -> bool:
        """Whether another tool kept the run: it has no plan, and nobody says whether it had a policy."""
        return "imported from" in self.record.environment

    @property
    def classes_seen(self) -> tuple[str, ...]:
        """The classes that microbatches were of, in the policy's order: their places give colours."""
        seen = {name for step in self.schedule for name in step}
        return tuple(name for name in self.governance.classes if name in seen) if self.governance else ()


def read_run(
    folder: str | Path,
    *,
    has_ledger: bool = True,
    witnesses: TrustedEvidence = NOBODY,
    keys: ColumnKeys | None = None,
) -> RunView:
    """Read a run folder: of a run that ended, was broken off or is still going, governed or not.

    A ledger that doesn't verify is no error: it's a warning of the view, and nothing is drawn from it.

    Args:
        folder: of the run.
        has_ledger: read and verify the ledger, too, which takes long where it's long.
        witnesses: whom the reader trusts to have seen the ledger.
        keys: of sealed columns that the reader may read.

    Raises:
        RunError: it's no run folder, or `run.json` can't be read.
    """
    folder = Path(folder).expanduser()
    record = _read_record(folder)
    status = record.outcome
    if status == "running":
        status = "still going" if is_locked(folder / "lock") else "broken off"
    paths = (folder / "steps.jsonl", folder / "evaluations.jsonl")
    (steps, torn), (evaluations, torn_too) = map(_read_lines, paths)
    losses = tuple((_step(line), finite(line.get("loss"))) for line in steps)
    names = dict.fromkeys(name for line in evaluations for name in line if name not in CLOCK_FIELDS)
    metrics = {name: tuple((_step(line), finite(line[name])) for line in evaluations if name in line) for name in names}
    metrics = metrics or {name: ((record.num_steps, finite(value)),) for name, value in record.metrics.items()}
    tries = _TRIES if status == "still going" else 1
    read = _read_ledger(folder, record, witnesses, keys, tries=tries) if has_ledger else _LedgerReading(None)
    logged = [_step(line) for line in (*steps, *evaluations)]
    notes = [*read.notes, *(() if keys is None else (_OPENED,))]
    if not losses and "imported from" not in record.environment:
        notes.append("The folder holds no losses: steps.jsonl has a line for each tenth step.")
    if not metrics:
        notes.append("The folder holds no metrics: the run had no evaluation, or never came to its first.")
    odd = [path.name for path in paths if path.exists() and not is_plain(path)]
    notes += [f"{name} is a link or no plain file, and isn't read." for name in odd]
    about, told = _read_about(folder)
    notes += told
    if torn or torn_too:
        notes.append(f"{torn + torn_too} damaged lines of steps.jsonl and evaluations.jsonl are left out.")
    return RunView(
        record=record,
        status=status,
        num_steps=max([record.num_steps, len(read.schedule), *logged]),
        losses=losses,
        metrics=metrics,
        beside=_beside(steps),
        ledger=read.facts,
        governance=_with_sources(read.governance, about),
        trust=read.trust,
        schedule=read.schedule,
        about=about,
        warnings=read.warnings,
        notes=tuple(notes),
    )


def with_ledger_of(view: RunView, checked: RunView) -> RunView:
    """Return the view of a run with what an earlier one of it read from the ledger."""
    return replace(
        view,
        num_steps=max(view.num_steps, len(checked.schedule)),
        ledger=checked.ledger,
        governance=checked.governance,
        trust=checked.trust,
        schedule=checked.schedule,
        warnings=checked.warnings,
        notes=tuple(dict.fromkeys((*checked.notes, *view.notes))),
    )


def _read_about(folder: Path) -> tuple[RunAbout | None, tuple[str, ...]]:
    """Return what `about.json` holds; where it can't be read, why."""
    path = folder / ABOUT_FILE
    if not path.exists():
        return None, ()
    try:
        if path.stat().st_size > _MAX_ABOUT:
            return None, (f"{ABOUT_FILE} has more than {_MAX_ABOUT:,} bytes, and isn't read.",)
        return RunAbout.from_json(plain_bytes(path).decode()), ()
    except (OSError, UnicodeDecodeError, RecursionError, RunError) as error:
        return None, (f"{ABOUT_FILE} is left out: {error}",)


def _with_sources(facts: GovernanceFacts | None, about: RunAbout | None) -> GovernanceFacts | None:
    """Put in what the program tells of its data, and its notes."""
    if facts is None or about is None:
        return facts
    return replace(facts, sources=about.sources, notes=(*facts.notes, *about.notes))


def _read_record(folder: Path) -> RunRecord:
    path = folder / RECORD_FILE
    try:
        return RunRecord.from_json(plain_bytes(path).decode())
    except (FileNotFoundError, NotADirectoryError) as error:
        msg = f"{folder} is no run folder: it has no {RECORD_FILE}. {_mend(folder)}"
        raise RunError(msg) from error
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{path} can't be read: {error}. Restore it from a copy, or make it readable."
        raise RunError(msg) from error


def _mend(folder: Path) -> str:
    """Say which folder was probably meant."""
    if folder.name == RECORD_FILE or (folder.parent / RECORD_FILE).exists():
        return f"Give {folder.parent}."
    try:
        runs = sorted(path.parent.name for path in folder.glob(f"*/{RECORD_FILE}"))
    except OSError:  # somebody removes it while it's looked through
        runs = []
    if runs:
        return f"It holds {len(runs)} of them; give one: {', '.join(runs[:4])}{', ...' if len(runs) > 4 else ''}."
    return "Give the folder that RunConfig(run_folder=...) or `cosmati train --run-folder` named."


def _read_lines(path: Path) -> tuple[list[dict[str, object]], int]:
    """Return the lines that are objects with a step, and how many aren't; a last line may be torn by a crash."""
    try:
        *whole, last = plain_bytes(path).decode(errors="replace").split("\n")
    except OSError:
        return [], 0
    found, num_bad = [], 0
    for text in [*whole, *([last] if last else [])]:
        if (line := line_of(text)) is not None:
            found.append(line)
        else:
            num_bad += text is not last
    return found, num_bad


def line_of(text: str) -> dict[str, object] | None:
    """Return a line of `steps.jsonl` or `evaluations.jsonl`, None where it's damaged: no object, or none of a step."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and is_step(value.get("step")) else None


def _beside(steps: Sequence[Mapping[str, object]]) -> dict[str, Points]:
    found = {
        words: tuple((_step(line), finite(line[name])) for line in steps if name in line)
        for name, words in BESIDE.items()
    }
    found[PACE] = tuple(pace_points(steps))
    drawn = {name: [(step, value) for step, value in points if value is not None] for name, points in found.items()}
    return {
        name: tuple(zip(*extremes([one[0] for one in points], [one[1] for one in points], _MAX_BESIDE), strict=True))
        for name, points in drawn.items()
        if points
    }


def pace_points(steps: Iterable[Mapping[str, object]]) -> Iterator[tuple[int, float | None]]:
    """Yield step and rows a second between each line and the one before, None where no time went by."""
    for before, line in itertools.pairwise(steps):
        clocks = [finite(one.get(name)) for one in (before, line) for name in ("rows", "seconds")]
        if None not in clocks:
            rows, seconds = clocks[2] - clocks[0], clocks[3] - clocks[1]  # type: ignore[operator]
            yield _step(line), rows / seconds if seconds > 0 else None


def _step(line: Mapping[str, object]) -> int:
    step = line["step"]
    assert isinstance(step, int), "checked where the line was read"
    return step


@dataclass(frozen=True)
class _LedgerReading:
    facts: LedgerFacts | None
    governance: GovernanceFacts | None = None
    trust: Trust | None = None
    schedule: ClassSchedule = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _read_ledger(
    folder: Path, record: RunRecord, witnesses: TrustedEvidence, keys: ColumnKeys | None, *, tries: int
) -> _LedgerReading:
    """Verify the ledger, compare it with the record, and draw from it what it says; a live one may need more tries."""
    is_governed = bool(record.digests.get("policy"))
    directory = folder / "ledger"
    if not directory.is_dir():
        missing = (
            "The run had a policy, and the folder holds no ledger: it was switched off (RunConfig(ledger=False)), "
            "or it is gone. What the policy said, and who taught what, can't be shown."
        )
        return _LedgerReading(None, warnings=(missing,) if is_governed else ())
    if odd := what_is_not_plain(directory):
        return _LedgerReading(_facts(folder, None, problems=(f"{odd} is a link or no plain file, and isn't read.",)))
    try:
        report = verify_ledger(directory, witnesses=witnesses)
        facts = _facts(folder, report)
        if report.size == 0:
            return _LedgerReading(facts, notes=("The ledger is empty: the run never came to its first signed entry.",))
        ledger = VerifiedLedger(directory, None, witnesses)
        ledger.keys = keys
        governance, schedule = governance_facts(ledger, facts) if is_governed else (None, ())
        trust = read_trust(directory, report) if is_governed else None
    except (LedgerError, OSError) as error:
        if tries > 1:
            return _read_ledger(folder, record, witnesses, keys, tries=tries - 1)
        return _LedgerReading(_facts(folder, None, problems=(str(error),)))
    warnings = _contradictions(ledger.tables[-1], record)
    if report.diverged_steps:
        steps = ", ".join(map(str, report.diverged_steps[:8])) + (" and more" if len(report.diverged_steps) > 8 else "")
        warnings += (f"{len(report.diverged_steps)} steps came out differently when they were run again: {steps}.",)
    warnings += tuple(
        f"The signatures of data or policy don't hold: {text}." for text in (trust.problems if trust else ())
    )
    return _LedgerReading(facts, governance, trust, schedule, warnings, _notes(report))


def _contradictions(tables: Tables, record: RunRecord) -> tuple[str, ...]:
    """Compare the record, which nobody signed, with the ledger's last commitments: entry 0's or amended ones."""
    committed = {name: digest.hex() for name, digest in tables.entry.commitments}
    given = {name: record.digests.get(name) or _NO_POLICY for name in ("plan", "model", "policy")}
    others = [
        what
        for what, told in (("data", "provenance"), ("policy", "policy_provenance"))
        if record.digests.get(f"{what}_root") not in _roots_of(tables.details.get(told))
    ]
    prepared = {ARTIFACT + label: words_of(one) for label, one in tables.artifacts.items()}
    if prepared != {name: told for name, told in record.digests.items() if name.startswith(ARTIFACT)}:
        others.append("preparation artifacts")
    return tuple(
        f"{RECORD_FILE} contradicts the ledger: it says otherwise who has signed the {what}." for what in others
    ) + tuple(
        f"{RECORD_FILE} contradicts the ledger: it names the {name} {digest[:16]}…, and entry {tables.index} commits "
        f"to {committed[name][:16]}…. What stands here from {RECORD_FILE} isn't what this ledger is about."
        for name, digest in given.items()
        if committed.get(name, digest) != digest
    )


def _roots_of(facts: Any) -> tuple[str | None, ...]:  # noqa: ANN401  (whoever wrote the ledger may have made it up)
    """Return what a record may say of who signed something, by what the ledger says."""
    if facts is None:
        return None, "declared"
    try:
        return (",".join(sorted({str(one["root"]) for one in facts["sources"]})),)
    except (TypeError, KeyError):
        return ("",)


def _notes(report: LedgerReport) -> tuple[str, ...]:
    notes = []
    if report.num_attempts > 1:
        again = f"{report.num_superseded} steps were run again, {report.num_confirmed} of them with equal content"
        times = "once" if report.num_attempts == 2 else f"{report.num_attempts - 1} times"
        notes.append(f"The run went on {times} after a break: {again}.")
    for amendment in report.amendments:
        changes = "; ".join(f"{name}: {now}, was {was}" for name, was, now in amendment.changes)
        notes.append(f"From step {amendment.step} on the run commits to something else: {changes}.")
    for policy in report.policies:
        signed = "was signed, says the ledger; the command cosmati ledger verify follows the signatures"
        said = signed if policy.facts is not None else "is declared: nobody signed it"
        notes.append(f"The policy {policy.digest.hex()[:16]}, from step {policy.step} on, {said}.")
    notes += [f"The run's ledger was to be attested, and wasn't throughout: {lapse}." for lapse in report.lapses]
    if report.clock_went_back:
        notes.append("The operator's clock went back in the course of the run: what it says of times is in doubt.")
    if report.num_unsigned:
        notes.append(f"{report.num_unsigned} further entries of the ledger aren't signed yet, and are left out here.")
    if not report.has_ended:
        notes.append("The ledger has no end yet: what stands here of it is what was signed so far.")
    return tuple(notes)


def _facts(folder: Path, report: LedgerReport | None, problems: Sequence[str] = ()) -> LedgerFacts:
    where = shlex.quote(str(folder))
    return LedgerFacts(
        origin=report.origin if report else "",
        size=report.size if report else 0,
        root=report.root if report else "",
        level=report.evidence_level.partition(":")[0] if report else "",
        checked=True,
        problems=tuple(problems),
        num_witnesses=report.witnessed.num_seen if report and report.witnessed and report.witnessed.size else 0,
        commands=(f"cosmati ledger verify {where}", f"cosmati ledger show {where}"),
        evidence=report.evidence_level if report else "",
    )

"""What a run's program told about it, as pages show it: samples side by side, and how licences were decided."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cosmati.explorer.run_view import RunView
from cosmati.records.about import PackageRecord, SampleRecord
from cosmati.records.governance import SourceRow

_MAX_NAMED, _MAX_SOURCES, _MAX_LICENCES = 12, 3, 4


@dataclass(frozen=True)
class SamplePair:
    """What two models wrote after one prompt with the same draws; the second is None where there's no twin."""

    shown: SampleRecord
    twin: SampleRecord | None


@dataclass(frozen=True)
class LicenceRow:
    """Packages whose class was decided by the same words.

    Attributes:
        names: of the packages with the most rows.
        num_more: packages beyond these.
        licence: SPDX expression, or that none is named exactly.
        evidence: what was read.
        num_rows: of all of them, for training and held out.
    """

    names: tuple[str, ...]
    num_more: int
    licence: str
    evidence: tuple[str, ...]
    num_rows: int


@dataclass(frozen=True)
class LicenceClass:
    """How the packages of one class got there."""

    class_name: str
    num_packages: int
    num_rows: int
    rows: tuple[LicenceRow, ...]


@dataclass(frozen=True)
class SourceClass:
    """The training data of one class: the largest sources by name, and the licences with their numbers of packages."""

    class_name: str
    num_rows: int
    num_packages: int
    names: str
    licences: str


def sample_pairs(run: RunView, twin: RunView | None) -> tuple[SamplePair, ...]:
    """Return what the run's model wrote, each beside what the twin's wrote after the same prompt, drawn alike."""
    own = run.about.samples if run.about else ()
    others = {_draws(one): _printable(one) for one in (twin.about.samples if twin and twin.about else ())}
    return tuple(SamplePair(_printable(one), others.get(_draws(one))) for one in own)


def _printable(sample: SampleRecord) -> SampleRecord:
    """Put the replacement character in place of what has no shape: control characters but line ends and tabs."""
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in sample.text)
    return replace(sample, text=text)


def _draws(sample: SampleRecord) -> tuple[str, int, float]:
    return sample.prompt, sample.seed, sample.temperature


def plain_commands(commands: Sequence[str]) -> tuple[str, ...]:
    """Return the commands that are a plain call of `cosmati`: a reader pastes them, and anybody may have written them.

    What a shell would read as more than words, such as `;`, `$` or a line end, stands in quotes there, or isn't shown.
    """
    found = []
    for text in commands:
        try:
            words = shlex.split(text)
        except ValueError:
            continue
        if words[:1] == ["cosmati"] and text == shlex.join(words) and text.isprintable():
            found.append(text)
    return tuple(found)


def source_classes(sources: Sequence[SourceRow]) -> tuple[SourceClass, ...]:
    """Group the sources of training data by class, by name; the names and licences with the most rows come first."""
    groups: dict[str, list[SourceRow]] = defaultdict(list)
    for one in sources:
        groups[one.class_name].append(one)
    found = []
    for class_name, rows in sorted(groups.items()):
        ordered = sorted(rows, key=lambda one: -one.num_rows)
        packages: Counter[str] = Counter()
        for one in ordered:
            packages[one.licence] += one.num_packages
        licences = [f"{licence} ({num:,})" for licence, num in packages.most_common(_MAX_LICENCES)]
        if len(packages) > _MAX_LICENCES:
            licences.append(f"and {len(packages) - _MAX_LICENCES} more")
        found.append(
            SourceClass(
                class_name,
                sum(one.num_rows for one in rows),
                sum(one.num_packages for one in rows),
                "; ".join(one.name for one in ordered[:_MAX_SOURCES]) + ("; …" if len(rows) > _MAX_SOURCES else ""),
                ", ".join(licences),
            )
        )
    return tuple(found)


def split_exclusions(run: RunView) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what is stated of classes that came, and of those of which no microbatch came."""
    stated = run.governance.exclusions if run.governance else ()
    seen = tuple(one for one in stated if any(f"tagged {name} " in one for name in run.classes_seen))
    return seen, tuple(one for one in stated if one not in seen)


def licence_rows(packages: Sequence[PackageRecord]) -> tuple[LicenceClass, ...]:
    """Group packages by class, and in it by licence and evidence: classes by name, then those with the most rows."""
    classes: dict[str, dict[tuple[str, str, str], list[PackageRecord]]] = defaultdict(lambda: defaultdict(list))
    for one in packages:
        classes[one.class_name][one.licence, one.licence_state, one.evidence].append(one)
    return tuple(
        LicenceClass(
            class_name,
            sum(map(len, groups.values())),
            sum(one.num_rows for found in groups.values() for one in found),
            tuple(sorted(map(_licence_row, groups.values()), key=lambda row: (-row.num_rows, row.names))),
        )
        for class_name, groups in sorted(classes.items())
    )


def _licence_row(found: Sequence[PackageRecord]) -> LicenceRow:
    """Return one row for packages that were decided alike."""
    first, ordered = found[0], sorted(found, key=lambda one: (-one.num_rows, one.name))
    return LicenceRow(
        names=tuple(one.name for one in ordered[:_MAX_NAMED]),
        num_more=max(0, len(found) - _MAX_NAMED),
        licence=first.licence or ("unknown" if first.licence_state == "unknown" else "not named exactly"),
        evidence=tuple(first.evidence.split("; ")),
        num_rows=sum(one.num_rows for one in found),
    )

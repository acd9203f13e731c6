"""Which class of `software_licences` a package's licence metadata puts it in.

Metadata says it in three ways, and the best one present decides: a `License-Expression` (PEP 639, SPDX),
which stands alone; else licence classifiers and the free text of `License:` together. Where these two differ,
and where several classifiers stand side by side, the most restrictive counts: metadata doesn't say whether
they are a choice.

A whole text in `License:` may end in notices of bundled works. Those of compiled libraries are told and don't count,
since the class is of the source; those of any other files do. A licence file makes a vague name exact ("BSD"), where
it speaks of the same class. It never changes the class.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cosmati.provenance.bundled_works import BundledWork, split_bundled_works
from cosmati.provenance.licence_names import CLASSIFIERS, GNU_NAME, NAMES, SAY_NOTHING, SENTENCES, TEXTS, ClassedLicence
from cosmati.provenance.spdx import most_restrictive, parse_expression

LicenceState = Literal["declared", "normalised", "unknown"]

_MAX_EXPRESSION = 2000
_MAX_NAME = 200
_MAX_QUOTE = 80


@dataclass(frozen=True)
class LicenceFinding:
    """What licence metadata comes to.

    Args:
        class_path: class in `software_licences`.
        spdx: SPDX expression with identifiers in canonical case, or None where the metadata doesn't name one
            exactly.
        state: `declared` by an SPDX expression, `normalised` from classifiers or free text, or `unknown`.
        evidence: which metadata said so.
    """

    class_path: str
    spdx: str | None
    state: LicenceState
    evidence: str


def classify_licence(
    expression: str | None,
    classifiers: Sequence[str] = (),
    text: str | None = None,
    files: Mapping[str, str] | None = None,
) -> LicenceFinding:
    """Classify a package by its licence metadata. Never raises: unknown is a state.

    Args:
        expression: the field `License-Expression`, or None.
        classifiers: all trove classifiers; those that don't begin with `License ::` are passed over.
        text: the field `License`, an identifier, a common name or a whole licence text; or None.
        files: content of the licence files by their names.
    """
    if expression is not None and expression.strip():
        return _from_expression(expression.strip())
    licences = [entry for entry in classifiers if entry.startswith("License ::") and entry not in SAY_NOTHING]
    found = [finding for finding in (_from_classifiers(licences), _from_text(text or "")) if finding is not None]
    known = [finding for finding in found if finding.state != "unknown"]
    if not known:
        evidence = "; ".join(finding.evidence for finding in found) or "no licence metadata"
        return LicenceFinding("unknown", None, "unknown", evidence)
    path = most_restrictive(*(finding.class_path for finding in known))
    names = {finding.spdx for finding in known if finding.class_path == path and finding.spdx}
    spdx = names.pop() if len(names) == 1 else None
    finding = LicenceFinding(path, spdx, "normalised", "; ".join(finding.evidence for finding in known))
    return finding if spdx or not files else _made_exact(finding, files)


def _made_exact(finding: LicenceFinding, files: Mapping[str, str]) -> LicenceFinding:
    """Name the licence by its file, where there is one that holds one well-known text of the same class."""
    if len(files) != 1:
        return finding
    ((name, content),) = files.items()
    named = exact_text(content)
    if named is None or named[0] != finding.class_path:
        return finding
    return replace(finding, spdx=named[1], evidence=f"{finding.evidence}; text of {_quote(name)}: {named[1]}")


def _from_expression(expression: str) -> LicenceFinding:
    term = parse_expression(expression) if len(expression) <= _MAX_EXPRESSION else None
    evidence = f"License-Expression: {_quote(expression)}"
    if term is None:
        return LicenceFinding("unknown", None, "unknown", f"{evidence} (not an SPDX expression)")
    if term.unlisted:
        evidence += f" (not listed: {', '.join(term.unlisted)})"
    return LicenceFinding(
        term.class_path, term.spdx, "unknown" if term.class_path == "unknown" else "declared", evidence
    )


def _from_classifiers(classifiers: Sequence[str]) -> LicenceFinding | None:
    if not classifiers:
        return None
    unlisted: ClassedLicence = ("unknown", None)
    terms = [CLASSIFIERS.get(entry.rpartition(" :: ")[2], unlisted) for entry in classifiers]
    path = most_restrictive(*(term[0] for term in terms))
    evidence = "classifier: " + ", ".join(classifiers)
    spdx = terms[0][1] if len(terms) == 1 else None
    return LicenceFinding(path, spdx, "unknown" if path == "unknown" else "normalised", evidence)


def _from_text(text: str) -> LicenceFinding | None:
    text = text.strip()
    if not text:
        return None
    if len(text) <= _MAX_NAME and "\n" not in text:
        path, spdx = _short_name(text) or ("unknown", None)
        evidence = f"License: {_quote(text)}"
    else:
        own, works = split_bundled_works(text)
        path, spdx = _whole_text(own) or ("unknown", None)
        evidence = f"License: {f'a whole text, {spdx}' if spdx else _quote(text)}"
        path, spdx, told = _with_bundled(path, spdx, works)
        evidence += told
    return LicenceFinding(path, spdx, "unknown" if path == "unknown" else "normalised", evidence)


def _short_name(text: str) -> ClassedLicence | None:
    """Read an identifier, an expression or one of the common ways to write a name."""
    term = parse_expression(text)
    if term is not None and term.class_path != "unknown":
        return term.class_path, term.spdx
    plain = re.sub(r"[^a-z0-9.+]+", " ", text.lower())
    plain = re.sub(r"\b(?:the|licen[cs]ed?|under|version)\b|v\.?(?= ?\d)", " ", plain)
    plain = " ".join(plain.replace(". ", " ").split())
    gnu = re.fullmatch(GNU_NAME, plain)
    if gnu:
        return _gnu_licence(gnu["kind"], gnu["number"], later=gnu["later"] is not None)
    return next((named for pattern, named in NAMES if re.fullmatch(pattern, plain)), None)


def _gnu_licence(kind: str, number: str | None, *, later: bool) -> ClassedLicence:
    family = "LGPL" if kind[0] == "l" else "AGPL" if kind[0] == "a" else "GPL"
    term = parse_expression(
        f"{family}-{number or ''}{'' if '.' in (number or '') else '.0'}-{'or-later' if later else 'only'}"
    )
    if term is not None and not term.unlisted:
        return term.class_path, term.spdx
    return ("open/weak-copyleft" if family == "LGPL" else "open/copyleft"), None


def _whole_text(text: str) -> ClassedLicence | None:
    """Look for the tell-tale sentences of well-known licences.

    The strictest one found counts, since texts are often several licences in a row. So a whole LGPL or MPL
    text, which speaks of the GPL, counts as the GPL.
    """
    plain = " ".join(text.split())
    exact = exact_text(text)
    if exact is not None:
        return exact
    found = [named for pattern, named in SENTENCES if re.search(pattern, plain)]
    if not found:
        return None
    return most_restrictive(*(path for path, _ in found)), found[0][1] if len(found) == 1 else None


def _with_bundled(path: str, spdx: str | None, works: Sequence[BundledWork]) -> tuple[str, str | None, str]:
    """Add what bundled works ask for, but for compiled libraries; return class, identifier and what is to be told."""
    compiled = [work for work in works if work.is_compiled]
    source = [work for work in works if not work.is_compiled]
    told = ""
    for work in source:
        found = _short_name(work.licence) or _whole_text(work.text) or ("unknown", None)
        path, spdx = most_restrictive(path, found[0]), None
        told += f"; bundled source {_quote(work.name)}: {_quote(work.licence)}"
    if compiled:
        names = ", ".join(f"{_quote(work.name)} ({_quote(work.licence)})" for work in compiled)
        told += f"; compiled libraries that are bundled don't count: {names}"
    return path, spdx, told


def exact_text(text: str) -> ClassedLicence | None:
    """Return which one well-known licence a text is, word for word in what tells it; None for others and for several.

    Args:
        text: of a licence file.
    """
    plain = " ".join(text.split())
    found = [named for named, told, count in TEXTS if len(re.findall(count, plain)) == 1 and _is_told(told, plain)]
    num_families = sum(re.search(pattern, plain) is not None for pattern, _ in SENTENCES)
    return found[0] if len(found) == 1 and num_families == 1 else None


def _is_told(told: Mapping[str, bool], plain: str) -> bool:
    return all((re.search(pattern, plain) is not None) == is_there for pattern, is_there in told.items())


def _quote(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= _MAX_QUOTE else f"{plain[: _MAX_QUOTE - 3]}..."

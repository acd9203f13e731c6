"""The public summary of training content that Article 53(1)(d) of the EU AI Act asks for, as a page to file.

Its three parts and their points follow the Commission's template (C(2025) 8311): general information, data sources,
data processing. Figures come from the ledger; what only the provider knows comes from the provider's file, and what is
in neither is printed as missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from cosmati.audit.about import About

_STYLE = """
:root { color-scheme: light dark; --line: #c9c9c4; --dim: #5f5f5a; --missing: #9a3b00; --ground: #fff; --ink: #1c1c1a; }
@media (prefers-color-scheme: dark) {
  :root { --line: #45453f; --dim: #a9a9a1; --missing: #ffb27d; --ground: #181816; --ink: #ecece6; }
}
body { font: 16px/1.55 system-ui, sans-serif; margin: 0 auto; max-width: 54rem; padding: 2rem 1rem 4rem;
  background: var(--ground); color: var(--ink); overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; }
h2 { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; } h3 { margin-bottom: .4rem; }
dl { display: grid; grid-template-columns: minmax(9rem, 15rem) 1fr; gap: .35rem 1rem; }
dt { color: var(--dim); } dd { margin: 0; white-space: pre-wrap; }
.missing { color: var(--missing); font-style: italic; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { overflow-wrap: break-word; text-align: left; vertical-align: top; min-width: 5.5rem;
  padding: .35rem .6rem .35rem 0; border-bottom: 1px solid var(--line); }
th.number, td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; min-width: 0; }
.note { color: var(--dim); font-size: .92rem; }
@media (max-width: 34rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .6rem; } }
@media print { body { font-size: 11pt; padding: 0; max-width: none; } }
"""
_NUMBER = ' class="number"'
_MISSING = '<span class="missing">Not stated by the provider.</span>'
_KINDS = (
    ("public", "2.1", "Publicly available data sets"),
    ("licensed", "2.2.1", "Data licensed by rightsholders or on their behalf"),
    ("private", "2.2.2", "Other data sets obtained from third parties"),
    ("crawled", "2.3", "Data crawled and scraped from online sources"),
    ("user", "2.4", "User data"),
    ("synthetic", "2.5", "Synthetic data"),
    ("other", "2.6", "Other sources of data"),
)


def summary_page(found: Mapping[str, Any], about: About, made: str) -> str:
    """Return the summary as one page of HTML that needs nothing from outside.

    Args:
        found: the figures.
        about: the provider's words.
        made: when, ISO 8601.
    """
    name = about.model or found["run"]["id"]
    run = found["run"]
    origin = (
        f'<p class="note">For Article 53(1)(d) of Regulation (EU) 2024/1689. Made {escape(made)} from the training '
        f"ledger {escape(run['origin'])}, {run['tree_size']:,} entries, root {escape(run['root'])}. Figures are the "
        "ledger's; words are the provider's.</p>"
    )
    body = "\n".join(
        (
            f"<h1>Public summary of training content: {escape(name)}</h1>",
            origin,
            _general(found, about, name),
            _data(found, about),
            _processing(found, about),
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Training content: {escape(name)}</title><style>{_STYLE}</style></head>\n<body><main>\n{body}\n"
        "</main></body></html>\n"
    )


def _general(found: Mapping[str, Any], about: About, name: str) -> str:
    seen = sum(one["rows"] for one in found["classes"].values())
    held = sum(one["num_rows"] for one in found["sources"])
    unused = ", ".join(name for name, one in found["classes"].items() if not one["rows"]) or "none"
    size = sum(one["num_bytes"] for one in found["sources"])
    sources = f"{held:,} rows, {size:,} bytes in {len(found['sources'])} signed sources" if found["sources"] else ""
    return "\n".join(
        (
            "<h2>1. General information</h2>",
            "<h3>1.1 Provider</h3>",
            _list(
                {
                    "Provider": about.provider,
                    "Contact": about.contact,
                    "Representative in the Union": about.representative,
                }
            ),
            "<h3>1.2 Model</h3>",
            _list(
                {
                    "Model": name,
                    "Depends on": about.depends_on,
                    "Placed on the Union market": about.placed_on_market,
                }
            ),
            "<h3>1.3 Modalities and overall size of the training data</h3>",
            _list({"Modalities": ", ".join(about.modalities), "Size by modality": about.size}),
            _list(
                {
                    "Size of the signed sources": sources,
                    "Rows that the model was trained on": f"{seen:,}, each counted as often as it was used, in "
                    f"{found['run']['steps']:,} steps",
                    "Kinds of content": about.content,
                    "Latest acquisition": about.latest_acquired,
                    "Languages": about.languages,
                    "Other characteristics": about.characteristics,
                }
            ),
            "<h3>Rows by class</h3>",
            _table(
                ("Class", "Rows used", "Taught"),
                (
                    (name, one["rows"], _taught(one["regions"], found["regions"]))
                    for name, one in found["classes"].items()
                    if one["rows"]
                ),
            ),
            f'<p class="note">Classes from which no row was used: {escape(unused)}.</p>',
        )
    )


def _taught(regions: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> str:
    taught = [name for name in names if regions[name]["weight"] > 0]
    if len(taught) == len(names):
        return "the whole model"
    return ", ".join(taught) or "nothing"


def _data(found: Mapping[str, Any], about: About) -> str:
    parts = ["<h2>2. Data sources</h2>"]
    if not found["sources"]:
        parts.append('<p class="missing">No source is signed: what follows is the provider\'s word alone.</p>')
    for kind, number, title in _KINDS:
        own = [one for one in found["sources"] if about.kind_of(one["source"], one["facts"]["obtained"]) == kind]
        parts.append(f"<h3>{number} {escape(title)}</h3>")
        words = {"Description": getattr(about, kind)}
        if kind == "crawled":
            words["Most used domains"] = about.domains
        if own:
            parts.append(_sources(own))
            words = {name: text for name, text in words.items() if text or name != "Description"}
        elif not any(words.values()):
            parts.append("<p>The ledger names none, and the provider states none.</p>")
            continue
        parts.append(_list(words))
    return "\n".join(parts)


def _sources(own: Iterable[Mapping[str, Any]]) -> str:
    return _table(
        ("Source", "Class", "Rows", "Bytes", "Where from", "How obtained", "Licence"),
        (
            (
                f"{one['source']} {one['source_version']}",
                one["class"],
                one["num_rows"],
                one["num_bytes"],
                one["facts"]["origin"] or "not stated",
                one["facts"]["obtained"] or "not stated",
                _licence(one["facts"]),
            )
            for one in own
        ),
    )


def _licence(facts: Mapping[str, Any]) -> str:
    until = facts["licence_valid_until"]
    return (facts["licence"] or "not stated") + (f", until {until}" if until else "")


def _processing(found: Mapping[str, Any], about: About) -> str:
    reserved = [(one["source"], line) for one in found["sources"] for line in one["facts"]["reservations"]]
    bases = [(one["source"], one["facts"]["lawful_basis"]) for one in found["sources"] if one["facts"]["lawful_basis"]]
    withdrawn = [
        (one["target"], f"{one['reason']}: {one['because']}; {one['action']} from step {one['step']} on")
        for one in found["withdrawn"]
    ]
    deleted = [(_what(one), f"{one['method']}, from step {one['from_step']} on") for one in found["deletions"]]
    excluded = [
        (class_name, region) for class_name, region in found["exclusions"] if found["classes"][class_name]["rows"]
    ]
    parts = [
        "<h2>3. Data processing</h2>",
        "<h3>3.1 Reservations of rights</h3>",
        _list({"Measures": about.reservations}),
        _table(("Source", "Reservation as seen when it was fetched"), reserved)
        if reserved
        else "<p>The signed manifests name no reservation.</p>",
        "<h3>3.2 Illegal content</h3>",
        _list({"Measures": about.illegal_content}),
        "<h3>3.3 Other</h3>",
        _list({"Processing": about.processing}),
    ]
    for title, heads, rows in (
        ("Lawful basis for personal data", ("Source", "Basis"), bases),
        ("Withdrawn while training", ("Source", "Why, and what was done"), withdrawn),
        ("Deleted from the trained model", ("What", "How"), deleted),
        ("Parts of the model that a class never wrote to", ("Class", "Part"), excluded),
    ):
        if rows:
            parts += [f"<h4>{escape(title)}</h4>", _table(heads, rows)]
    parts.append(
        '<p class="note">That a class never wrote to a part is about direct writes, by a scan of the whole ledger. It '
        "doesn't say that the class had no influence there, nor that rows were classed rightly.</p>"
    )
    return "\n".join(parts)


def _what(deletion: Mapping[str, Any]) -> str:
    """Return what was deleted, in words: classes by name, rows by their number."""
    classes = ", ".join(map(str, deletion["classes"] or ())) or "no class that was trained on"
    return f"{deletion['num_rows']} rows of {classes}" if deletion["num_rows"] else classes


def _list(words: Mapping[str, str]) -> str:
    lines = (f"<dt>{escape(name)}</dt><dd>{escape(text) if text else _MISSING}</dd>" for name, text in words.items())
    return f"<dl>{''.join(lines)}</dl>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    found = [tuple(row) for row in rows]
    numbers = [isinstance(value, int) for value in (found[0] if found else ())] or [False] * len(heads)
    head = "".join(
        f'<th scope="col"{_NUMBER * is_number}>{escape(one)}</th>'
        for one, is_number in zip(heads, numbers, strict=True)
    )
    lines = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in found)
    return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _cell(value: object) -> str:
    return f'<td class="number">{value:,}</td>' if isinstance(value, int) else f"<td>{escape(str(value))}</td>"

"""Writes the method cards from the code's own facts, the notes and what was measured. Called by the docs' build."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import cosmati.methods
import cosmati.methods.functional
from cards.overview import overview
from cards.pictures import PICTURES
from cards.writing import cell, raw
from cosmati.core.clock import Budget, Time
from cosmati.core.method import Method

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
MEASURED = {"cost": RESULTS / "method_cost.json", "gain": RESULTS / "evidence.json", "pairs": HERE / "pairs.json"}
_WIDTH = 88
BUDGET = Budget(Time.parse("100ba"))
"""Of the run for which a card counts shapes."""
KINDS = {
    "vision": "digits, a small ResNet",
    "language": "Python source, a GPT of 0.2M parameters",
    "language-as-used": "the same task, the method as its authors use and measure it",
}
AXES = {"seconds": "training time", "step": "steps"}


@dataclass(frozen=True)
class Note:
    """What a person wrote about a method."""

    example: str
    when: str
    cost: str
    published: str
    try_first: str
    badly: dict[str, str]
    loop: str = ""


def read_notes() -> dict[str, Note]:
    """Return the notes by method, in the methods' order."""
    notes = yaml.safe_load((HERE / "notes.yaml").read_text())
    return {name: Note(**notes[name]) for name in sorted(notes, key=str.casefold)}


def read_measured(which: str) -> dict[str, Any]:
    """Return a measured file, empty where it isn't there yet."""
    path = MEASURED[which]
    return json.loads(path.read_text()) if path.exists() else {}


def instance(name: str, note: Note) -> Method:
    """Return the method that the note's example makes."""
    made = eval(note.example, {name: getattr(cosmati.methods, name)})  # noqa: S307  (our own file)
    assert isinstance(made, Method)
    return made


def options_of(kind: type[Method]) -> list[tuple[str, str, str, str]]:
    """Return name, type, default and meaning of each option."""
    meanings = arguments_of(inspect.getdoc(kind) or "")
    rows = []
    for field in dataclasses.fields(kind):
        default = "required" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        rows.append((field.name, str(field.type), default, meanings.get(field.name, "")))
    return rows


def arguments_of(doc: str) -> dict[str, str]:
    """Return the meanings in a docstring's Args section."""
    section = re.search(r"^Args:\n((?:[ ].*\n?|\n)*)", doc, re.MULTILINE)
    if section is None:
        return {}
    found: dict[str, str] = {}
    name = ""
    for line in section[1].splitlines():
        if item := re.match(r"    (\w+): (.*)", line):
            name = item[1]
            found[name] = item[2]
        elif line.strip():
            found[name] += " " + line.strip()
    return found


def functions_of(kind: type[Method]) -> list[str]:
    """Return the names of the functions of a method's file."""
    public = cosmati.methods.functional.__all__
    return [n for n in public if getattr(cosmati.methods.functional, n).__module__ == kind.__module__]


def signature_of(name: str) -> str:
    """Return a function's signature, a parameter a line where it's long."""
    signature = inspect.signature(getattr(cosmati.methods.functional, name))
    parts: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        # Annotations are strings here; those of defaults keep their quotes.
        parts.append(f"{parameter.name}: {parameter.annotation}{default}")
    end = f") -> {signature.return_annotation}"
    line = f"cf.{name}({', '.join(parts)}{end}"
    return line if len(line) <= _WIDTH else "\n".join([f"cf.{name}(", *(f"    {part}," for part in parts), end])


def linked(text: str) -> str:
    """Turn arXiv numbers, and `composer:NAME` in a link, into links."""
    text = text.replace("(composer:", "(https://docs.mosaicml.com/projects/composer/en/stable/method_cards/")
    text = re.sub(r"(method_cards/\w+)\)", r"\1.html)", text)
    return re.sub(r"(?:arXiv )?(?<![\w/])(\d{4}\.\d{4,5})\b", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def card(name: str, note: Note, measured: dict[str, dict[str, Any]]) -> str:
    """Return a method's page."""
    kind = getattr(cosmati.methods, name)
    made = instance(name, note)
    module = sys.modules[kind.__module__]
    what = (inspect.getdoc(kind) or "").split("\n\nArgs:")[0]
    couples, owns, reads = (", ".join(sorted(part)) or "nothing" for part in (made.couples, made.claims, kind.reads))
    lines = [
        f"# {name}",
        "",
        linked((module.__doc__ or "").strip()),
        "",
        what,
        "",
        *_picture_lines(name),
        "| | |",
        "|---|---|",
        f"| When | {note.when} |",
        f"| Settings to try first | {note.try_first} |",
        f"| Cost | {note.cost} |",
        f"| Published by others | {linked(note.published)} |",
        f"| Composes badly with | {_badly(note)} |",
        f"| Place in the loop | `{kind.stage.name}` |",
        f"| Couples | {couples} |",
        f"| Owns | {owns} |",
        f"| Reads | {reads if kind.reads else 'any input, or none'} |",
        f"| Input shapes | {_shapes(made)} |",
        "",
        "```python",
        f"from cosmati.methods import {name}",
        "",
        f"methods = [{note.example}]  # Trainer(..., methods=methods)",
        "```",
        "",
        *_option_lines(kind),
        "",
        *_function_lines(kind, note),
    ]
    return "\n".join([*lines, *_cost_lines(name, measured["cost"]), *_gain_lines(name, measured["gain"])]) + "\n"


def _picture_lines(name: str) -> list[str]:
    if name not in PICTURES:
        return []
    canvas, caption = PICTURES[name]()
    return [*raw(canvas.svg()), f"*{caption}*", ""]


def _badly(note: Note) -> str:
    return " ".join(f"[{other}]({other.lower()}.md): {why}" for other, why in note.badly.items()) or "nothing known"


def _shapes(method: Method) -> str:
    count = method.shapes(BUDGET)
    return "one" if count == 1 else f"at most {count} in a run of {BUDGET.num_steps} steps; each is compiled once"


def _option_lines(kind: type[Method]) -> list[str]:
    rows = [f"| `{n}` | `{cell(t)}` | {cell(d)} | {cell(meaning)} |" for n, t, d, meaning in options_of(kind)]
    return ["| option | type | default | meaning |", "|---|---|---|---|", *rows] if rows else ["It has no options."]


def _function_lines(kind: type[Method], note: Note) -> list[str]:
    functions = functions_of(kind)
    if not functions:
        return ["It needs the trainer: there is no function for a loop of your own.", ""]
    return [
        "In a loop of your own, `import cosmati.methods.functional as cf`:",
        "",
        "```python",
        note.loop.strip(),
        "```",
        "",
        "```python",
        *map(signature_of, functions),
        "```",
        "",
    ]


def _cost_lines(name: str, cost: dict[str, Any]) -> list[str]:
    lines = ["## Cost here", ""]
    rows = [row for row in cost.get("rows", []) if row["method"] == name]
    if not rows:
        return [*lines, "Not measured here.", ""]
    lines += ["A whole run's training time over that without it, in turns, median (quartiles):", ""]
    lines += [
        f"- {row['task']} ({KINDS[row['task']]}), over {row['off']}: {row['ratio']:.3f} "
        f"({row['low']:.3f} to {row['high']:.3f}), n = {row['n']}"
        for row in rows
    ]
    return [*lines, "", f"{cost['hardware']}; `{cost['command']}`.", ""]


def _gain_lines(name: str, gain: dict[str, Any]) -> list[str]:
    lines = []
    for task, part in gain.get("tasks", {}).items():
        for arm in dict.fromkeys(row["arm"] for row in part["rows"] if row["method"] == name):
            lines += _arm_lines(task, part, arm)
    if not lines:
        return ["## Gain here", "", "Not measured here.", ""]
    return ["## Gain here", "", *lines, "All of them: [findings](../findings.md).", ""]


def _arm_lines(task: str, part: dict[str, Any], arm: str) -> list[str]:
    rows = [row for row in part["rows"] if row["arm"] == arm]
    judged = next(one for one in part["speedup"] if one["arm"] == arm)
    better = "lower" if part["lower_is_better"] else "higher"
    return [
        f"**{task}** ({KINDS[task]}): {arm}; {part['metric']}, {better} is better.",
        f"Alone against the baseline, of which the learning rate was searched; paired seeds, n = {rows[0]['n']}.",
        "",
        "| steps | baseline | with it | difference (95 %, each by itself) |",
        "|---|---|---|---|",
        *(
            f"| {r['budget']} | {r['baseline']:.4f} | {r['value']:.4f} | {r['difference']:+.4f} "
            f"({_end(r['low'])} to {_end(r['high'])}) |"
            for r in rows
        ),
        "",
        *raw(gain_svg(rows, part["lower_is_better"])),
        *(
            f"- By {axis}, **{judged[key]['verdict']}**: {judged[key]['sentence']}"
            for key, axis in AXES.items()
            if key in judged
        ),
        "",
        f"{part['hardware']}; `{part['command']}`.",
        "",
    ]


def _end(value: float | None) -> str:
    return "open" if value is None else f"{value:+.4f}"


def gain_svg(rows: list[dict[str, Any]], lower_is_better: bool) -> str:
    """Draw the differences to the baseline with their intervals; the page's own colour, so it fits both themes."""
    width, left, right, step = 420, 70, 16, 26
    ends = [v for row in rows for v in (row["low"], row["high"], row["difference"], 0.0) if v is not None]
    low, high = min(ends), max(ends)
    span = (high - low) or 1.0

    def x(value: float) -> float:
        return left + (value - low) / span * (width - left - right)

    height = step * len(rows) + 34
    better = "left" if lower_is_better else "right"
    text = 'font-size="12" fill="currentColor"'
    look = f'width="100%" style="max-width:{width}px" role="img" aria-label="Differences to the baseline, 95 %"'
    zero = f'x1="{x(0):.1f}" y1="4" x2="{x(0):.1f}" y2="{height - 24}"'
    body = [
        f'<svg viewBox="0 0 {width} {height}" {look}>',
        f'<line {zero} stroke="currentColor" stroke-dasharray="3 3" opacity="0.6"/>',
    ]
    for place, row in enumerate(rows):
        y = 16 + place * step
        a, b = (row["low"] if row["low"] is not None else low), (row["high"] if row["high"] is not None else high)
        body += [
            f'<text x="0" y="{y + 4}" {text}>{row["budget"]} steps</text>',
            f'<line x1="{x(a):.1f}" y1="{y}" x2="{x(b):.1f}" y2="{y}" stroke="currentColor" stroke-width="2"/>',
            f'<circle cx="{x(row["difference"]):.1f}" cy="{y}" r="4.5" fill="currentColor"/>',
        ]
    # As near the line as its words leave room for.
    place = min(max(x(0), 150.0), width - 150.0)
    label = f'<text x="{place:.1f}" y="{height - 6}" {text} text-anchor="middle" opacity="0.8">'
    body.append(f"{label}{better} of the dashed line is better than the baseline</text>")
    return "".join([*body, "</svg>"])


def card_pages() -> dict[str, str]:
    """Return the overview and all cards by the name of their file."""
    notes = read_notes()
    measured = {which: read_measured(which) for which in MEASURED}
    pages = {f"{name.lower()}.md": card(name, note, measured) for name, note in notes.items()}
    whats = {name: (inspect.getdoc(getattr(cosmati.methods, name)) or "").split("\n\n")[0] for name in notes}
    return pages | {"index.md": overview(whats, measured)}


def write_cards(folder: Path) -> None:
    """Write the overview and all cards into a folder."""
    folder.mkdir(exist_ok=True)
    for name, text in card_pages().items():
        path = folder / name
        # An unchanged page isn't built again.
        if not path.exists() or path.read_text() != text:
            path.write_text(text)

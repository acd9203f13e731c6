"""The page that lists all methods by what they gained here, and shows which compose."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from cards.drawing import INK, MUTED, PAGE, Canvas, Frame
from cards.writing import cell, raw
from cosmati.explorer.matrix import matrix_svg

TASKS = {
    "vision": ("Images", "digits of 16 pixels a side, a small ResNet", "seconds"),
    "language": ("Text", "Python source, a GPT of 0.2M parameters", "seconds"),
    "language-as-used": ("Text, each as its authors use it", "the same task", "step"),
}
BY = {"seconds": "training time", "step": "steps"}
SHOWN = ("faster", "slower")


def overview(whats: Mapping[str, str], measured: Mapping[str, dict[str, Any]]) -> str:
    """Return the page.

    Args:
        whats: what each method does, by its name, in the order of the list.
        measured: as `cards.read_measured` reads it, by kind.
    """
    tasks = measured["gain"].get("tasks", {})
    lines = [
        "# The methods",
        "",
        "One page each: a picture of the effect, when to use it, settings to try first, what it costs and gained here,",
        "what others published, couplings, and what it composes badly with.",
        "",
        "## By what they gained here",
        "",
        "Each method alone over one baseline, by the speed-up at equal quality with its 95 % interval; 1 is no",
        "difference. These are screenings on small tasks: where a verdict says that no difference is shown, the order",
        "of two rows means nothing. [What the figures of a study mean](../statistics.md).",
        "",
    ]
    for task, part in tasks.items():
        lines += _table(task, part, whats)
    known = {row["method"] for part in tasks.values() for row in part["rows"]}
    rest = [name for name in whats if name not in known]
    lines += ["### Not measured here", "", "| method | what |", "|---|---|"]
    lines += [f"| {_link(name, name)} | {cell(whats[name])} |" for name in rest]
    lines += ["", "```{toctree}", ":hidden:", "", *(name.lower() for name in whats), "```", ""]
    return "\n".join(lines + _pairs(measured["pairs"])) + "\n"


def _link(name: str, shown: str) -> str:
    return f"[{shown}]({name.lower()}.md)"


def gains_svg(title: str, arms: Sequence[Mapping[str, Any]], axis: str) -> str:
    """Draw speed-ups with their intervals, on a scale of ratios; an end that isn't known goes to the edge."""
    canvas = Canvas(f"{title}: speed-ups with their 95 % intervals", 20 * len(arms) + 46)
    frame = Frame(canvas, (-3.0, 3.0), (0, 1), left=180, top=8, width=270, height=20 * len(arms))
    for power, name in ((-2, "¼×"), (-1, "½×"), (0, "1×"), (1, "2×"), (2, "4×")):
        (x, foot), (_, head) = frame.at(power, 0), frame.at(power, 1)
        canvas.line([(x, foot), (x, head)], INK if power == 0 else PAGE.rule, width=1)
        canvas.text(x, foot + 16, name, anchor="middle", colour=MUTED)
    canvas.text(frame.left + frame.width, frame.top + frame.height + 32, "faster →", anchor="end", colour=MUTED)
    for place, arm in enumerate(arms):
        found, y = arm[axis], frame.top + 20 * place + 10
        colour = {"faster": PAGE.good, "slower": PAGE.bad}.get(found["verdict"], MUTED)
        canvas.text(frame.left - 8, y + 4, arm["arm"], anchor="end")
        if found["ratio"] is not None:
            x, low, high = (
                frame.at(min(max(math.log2(value or end), -3.0), 3.0), 0)[0]
                for value, end in ((found["ratio"], 1.0), (found["low"], 0.125), (found["high"], 8.0))
            )
            canvas.line([(low, y), (high, y)], colour)
            canvas.dot(x, y, colour, radius=4)
    return canvas.svg()


def _table(task: str, part: Mapping[str, Any], whats: Mapping[str, str]) -> list[str]:
    """Return a task's methods, the largest speed-up first, with what they stand on."""
    title, what, axis = TASKS[task]
    arms = [arm for arm in part["speedup"] if arm["method"] in whats and axis in arm]
    arms.sort(key=lambda arm: (-(arm[axis]["ratio"] or 0.0), arm["arm"]))
    shown = {verdict: [arm["arm"] for arm in arms if arm[axis]["verdict"] == verdict] for verdict in SHOWN}
    told = "; ".join(f"shown to be {verdict}: {', '.join(names) or 'none'}" for verdict, names in shown.items())
    return [
        f"### {title}",
        "",
        f"{what[0].upper()}{what[1:]}; {part['metric']}, by {BY[axis]}. Of these, {told}. {' '.join(part['noise'])}",
        "",
        *raw(gains_svg(title, arms, axis)),
        f"| method | speed-up by {BY[axis]} (95 %) | verdict | what |",
        "|---|---|---|---|",
        *(
            f"| {_link(arm['method'], arm['arm'])} | {arm[axis]['text']} | {arm[axis]['verdict']} "
            f"| {cell(whats[arm['method']])} |"
            for arm in arms
        ),
        "",
        f"{part['hardware']}; `{part['command']}`.",
        "",
    ]


def _pairs(pairs: Mapping[str, Any]) -> list[str]:
    lines = ["## Which compose", ""]
    lines += [
        "Every pair was trained for three steps on a small vision model and a small language model, in float32, with",
        "settings that act on models this small (`python docs/cards/run_pairs.py`). That shows that a pair runs, not",
        "that it helps. A cell's tooltip says why a pair is refused, or what has nothing to change. The diagonal is a",
        "method alone.",
        "",
    ]
    for task, part in pairs.items():
        names = part["methods"]
        cells = {tuple(key.split("|")): (found["outcome"], found["reason"]) for key, found in part["cells"].items()}
        for theme in ("light", "dark"):
            svg = matrix_svg(names, cells, f"Pairs on the {task} model", theme)  # type: ignore[arg-type]
            lines += raw(f'<div class="only-{theme}" style="overflow-x:auto">{svg}</div>')
        lines += _refused(task, part)
    return lines


def _refused(task: str, part: Mapping[str, Any]) -> list[str]:
    names, cells = part["methods"], part["cells"]
    alone = {n: found["reason"] for n in names if (found := cells[f"{n}|{n}"])["outcome"] == "refused"}
    pairs = {
        key: found["reason"]
        for key, found in cells.items()
        if found["outcome"] == "refused" and not set(key.split("|")) & set(alone)
    }
    return [
        f"Refused on the {task} model by themselves, so in every pair:",
        "",
        *(f"- {name}: {escape(reason, quote=False)}" for name, reason in alone.items()),
        "",
        "Refused as pairs:",
        "",
        *([f"- {key.replace('|', ' with ')}: {escape(why, quote=False)}" for key, why in pairs.items()] or ["- none"]),
        "",
    ]

"""Write the headline's block in README and docs from its claims, and its picture: `python tools/write_headline.py`.

The block lies between two marks. With `--check` nothing is written, and a block or a picture that the claims and their
study don't bear out is an error, as is a copy of the evidence in the package that isn't the committed one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cosmati.explorer.drawing import Theme, tradeoff_svg
from cosmati.explorer.evidence import FOLDER, HEADLINE_FILE, claim_interval, family_text, made_at, shown_claims
from cosmati.explorer.wording import number
from cosmati.records.headline import HeadlineClaim, headline_from_json
from cosmati.records.study import StudyRecord

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "benchmarks" / "results" / HEADLINE_FILE
COPY = ROOT / "src" / "cosmati" / "explorer" / FOLDER / HEADLINE_FILE
PAGES = ("README.md", "docs/index.md", "docs/quickstart.md")
START = "<!-- headline: written by tools/write_headline.py -->"
END = "<!-- end of the headline -->"
PICTURES: dict[Path, Theme] = {
    Path("docs/images/headline-light.svg"): "light",
    Path("docs/images/headline-dark.svg"): "dark",
}
NO_BREAK = "\N{NO-BREAK SPACE}"
PICTURED = "text"
"""The task whose curves are drawn."""


def block(claims: tuple[HeadlineClaim, ...], parts: Mapping[str, Sequence[str]]) -> str:
    """Return the block as Markdown: a row for each claim by time, what they rest on, and each in full, folded."""
    by_time = tuple(claim for claim in claims if claim.axis == "seconds")
    shown = shown_claims(by_time)
    rows = [_row(claim, one.title, one.figure) for claim, one in zip(by_time, shown, strict=True)]
    adds = "; ".join(f"{task.capitalize()}: {', '.join(names)}" for task, names in parts.items())
    made = dict.fromkeys(f"`{claim.command}` at {made_at(claim)}, on {claim.hardware}" for claim in by_time)
    hardware = "; ".join(dict.fromkeys(claim.hardware for claim in by_time))
    return "\n".join(
        [
            START,
            "",
            "| Composition over | Speed | 95 % interval | At the quality |",
            "|---|---|---|---|",
            *rows,
            "",
            "Speed is the opponent's training time over the composition's, at the opponent's mean quality at its",
            f"largest budget; n is of paired seeds. On {hardware}.",
            "",
            f"What the composition adds to the opponent. {adds}.",
            "",
            "<details>",
            "<summary>Each claim in full, with its search, p-value, command, commit and hardware</summary>",
            "",
            *(f"- **{one.title}**: {one.sentence}" for one in shown),
            "",
            family_text(by_time),
            "",
            f"Made by {'; '.join(made)}.",
            "",
            "</details>",
            "",
            END,
        ]
    )


def _row(claim: HeadlineClaim, title: str, figure: str) -> str:
    """Return a claim as a row; a difference that isn't shown has no figure."""
    quality = f"{claim.metric} {number(claim.quality, 4)}"
    if claim.speed_up is None:
        return f"| {title} | it never gets there | | {quality} |"
    # A bound's sign stays with its figure.
    found = f"**{figure.replace(' ', NO_BREAK)}**" if figure else "no difference shown"
    return f"| {title} | {found} | {claim_interval(claim)} | {quality} |"


def picture(study: StudyRecord, theme: Theme) -> str:
    """Return the study's tradeoff curves, without the arm that only shows the noise."""
    names = {arm.name: "baseline" if arm.opponent == "tuned" else arm.name for arm in study.arms if arm.name != "aa"}
    drawn = replace(
        study,
        name="headline",
        baseline_arm=names[study.baseline_arm],
        arms=tuple(replace(arm, name=names[arm.name]) for arm in study.arms if arm.name in names),
        runs=tuple(replace(run, arm=names[run.arm]) for run in study.runs if run.arm in names),
        costs=tuple(replace(cost, arm=names[cost.arm]) for cost in study.costs if cost.arm in names),
        registration=None,
    )
    return tradeoff_svg(drawn, theme)


def with_block(page: str, text: str, where: str) -> str:
    """Return a page with its block replaced.

    Raises:
        ValueError: the page doesn't have the two marks once each, in order.
    """
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end or START in after or END in after:
        msg = f"{where} has to hold {START!r} and {END!r} once each, in that order. Put them where the block belongs."
        raise ValueError(msg)
    return before + text + after


def parts_of(task: str) -> tuple[str, ...]:
    """Return what the composition of a task adds to its opponent."""
    return next(arm.methods for arm in study_of(task).arms if arm.methods)


def study_of(task: str) -> StudyRecord:
    """Return the study that a task's claims are made from."""
    return StudyRecord.from_json(COPY.with_name(f"{task}.json").read_text(encoding="utf-8"))


def main(arguments: list[str]) -> int:
    """Write or check all pages; return the exit status."""
    is_check = arguments == ["--check"]
    source = SOURCE.read_text(encoding="utf-8")
    claims = headline_from_json(source)
    text, wrong = block(claims, {task: parts_of(task) for task in dict.fromkeys(one.task for one in claims)}), []
    if COPY.read_text(encoding="utf-8") != source:
        wrong.append(str(COPY.relative_to(ROOT)))
    texts = {Path(name): with_block((ROOT / name).read_text(encoding="utf-8"), text, name) for name in PAGES}
    texts |= {name: picture(study_of(PICTURED), theme) for name, theme in PICTURES.items()}
    for name, new in texts.items():
        if not (ROOT / name).exists() or (ROOT / name).read_text(encoding="utf-8") != new:
            wrong.append(str(name))
            if not is_check:
                (ROOT / name).write_text(new, encoding="utf-8")
    if is_check and wrong:
        print(f"{', '.join(wrong)} don't say what {SOURCE.name} says. Run: python tools/write_headline.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

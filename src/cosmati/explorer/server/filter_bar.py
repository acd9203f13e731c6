"""The row of filters that stands above tables and figures: what can be chosen, what is, and how to take it back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request

from cosmati.explorer.server.asked import MOST_COMMON, Asked, address, changed, without
from cosmati.explorer.server.site import Site
from cosmati.store.filters import NUMBERS

MAX_CHOICES, MAX_TEXT = 300, 60
MAIN = ("study", "task", "arm")
MORE = ("method", "model", "hardware", "budget", "seed", "status")
RANGES = (("quality", "Quality"), ("seconds", "Training time (s)"))
WORDS = {"path": "Folder", "quality_name": "Quality", "kind": "Kind", "text": "Search"}
LEAVES_OUT = ("page", "at", "by", "line")
"""Of an address: what a change of the filter starts anew."""


@dataclass(frozen=True)
class Field:
    """A select: its name, label and options (value, text, whether it's chosen).

    `others` are values that stay chosen beside the one of the select, where an address asks for several.
    """

    name: str
    label: str
    options: tuple[tuple[str, str, bool], ...]
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chip:
    """What is chosen, in words, and the address without it; what the page chose by itself has no name."""

    name: str
    text: str
    address: str


@dataclass(frozen=True)
class FilterBar:
    """All that the template of filters shows.

    Attributes:
        path: Of the page.
        text: That is searched for.
        main: Fields that are always seen.
        more: Those behind the disclosure.
        ranges: Of numbers: name, label, value.
        num_more: How many of what the disclosure holds are in use.
        hidden: What the address asks for besides, to be kept.
        chips: What is in use.
        clear: The address without any filter.
    """

    path: str
    text: str
    main: tuple[Field, ...]
    more: tuple[Field, ...]
    ranges: tuple[tuple[str, str, str], ...]
    num_more: int
    hidden: tuple[tuple[str, str], ...]
    chips: tuple[Chip, ...]
    clear: str


def filter_bar(
    site: Site, request: Request, what: Asked, *, own: Collection[str] = (), is_one_task: bool = False
) -> FilterBar:
    """Return the filters of a page.

    Args:
        site: whose runs are filtered.
        request: that asks.
        what: it asks for.
        own: names of the page's other controls in the same form.
        is_one_task: whether the page takes the most common task where none is named.
    """
    query = request.query_params
    names = site.study_names()
    more = (*MORE, "path") if names else MORE
    fields = {name: _field(site, what, name) for name in (*MAIN, *more)}
    is_usual_task = is_one_task and query.get("task", MOST_COMMON) == MOST_COMMON
    if is_one_task:
        fields["task"] = _task_field(fields["task"], what, is_usual=is_usual_task)
    fields = {name: one for name, one in fields.items() if len(one.options) > 1 or name in what.filter.exact}
    ranges = tuple(
        (f"{end}_{name}", f"{label} {word}", query.get(f"{end}_{name}", ""))
        for name, label in RANGES
        for end, word in (("min", "from"), ("max", "to"))
    )
    shown = {"text", *fields, *(name for name, _, _ in ranges), *own, *LEAVES_OUT}
    limits = [(end + name) for end in ("min_", "max_") for name in NUMBERS]
    used = [*what.filter.exact, *(name for name in limits if query.get(name))]
    filters = {"text", *what.filter.exact, *limits, *LEAVES_OUT, "task", *fields}
    rest = [one for one in query.multi_items() if one[0] not in filters]
    return FilterBar(
        path=request.url.path,
        text=what.filter.text,
        main=tuple(fields[name] for name in MAIN if name in fields),
        more=tuple(fields[name] for name in more if name in fields),
        ranges=ranges,
        num_more=sum(name not in MAIN and name not in own for name in used),
        hidden=tuple((name, value) for name, value in query.multi_items() if name not in shown and value),
        chips=_chips(request, what, own, limits, usual_task=_usual_task(site, what) if is_usual_task else ""),
        clear=address(request.url.path, rest),
    )


def warm_choices(site: Site) -> None:
    """Work out what all runs can be chosen by: each page with filters asks for it."""
    for name in (*MAIN, *MORE, "path", "quality_name"):
        site.index.choices(name)
    site.study_names()


def _field(site: Site, what: Asked, name: str) -> Field:
    chosen = what.filter.exact.get(name, ())
    found = [(_text(value), num) for value, num in site.index.choices(name) if value not in (None, "")]
    if name == "study":
        found = _told_apart(site, found, chosen)
    numeric = name in NUMBERS
    if numeric:
        chosen = tuple(_as_number(one) for one in chosen)
        found.sort(key=lambda one: float(one[0]))
    shown = found[:MAX_CHOICES]
    shown += [one for one in found[MAX_CHOICES:] if one[0] in chosen]
    shown += [(one, 0) for one in chosen if one not in {value for value, _ in shown}]
    first = ("", f"{len(chosen)} chosen; add" if len(chosen) > 1 else "any", False)
    is_chosen = chosen if len(chosen) == 1 else ()
    words = {value: f"{float(value):g}" for value, _ in shown} if name == "budget" else {}
    options = [(value, f"{words.get(value, _short(value))} ({num:,})", value in is_chosen) for value, num in shown]
    return Field(name, WORDS.get(name, name.capitalize()), (first, *options), chosen if len(chosen) > 1 else ())


def _told_apart(site: Site, found: list[tuple[str, int]], chosen: Collection[str]) -> list[tuple[str, int]]:
    """Return the choices of studies, those of one name by their folders."""
    names = site.study_names()
    shared = {text.removesuffix(f" ({path})") for path, text in names.items()} - set(chosen)
    nums = dict(site.index.choices("path")) if names else {}
    return [one for one in found if one[0] not in shared] + [(text, nums[path]) for path, text in names.items()]


def _task_field(field: Field, what: Asked, *, is_usual: bool) -> Field:
    """Let a page that draws one task's points say whether that is the most common one, a certain one, or none."""
    _, *options = field.options
    tasks = what.filter.exact.get("task", ())
    own = [(value, text, is_chosen and not is_usual) for value, text, is_chosen in options]
    most = f"with most runs: {_short(tasks[0])}" if tasks and is_usual else "with most runs"
    first = (MOST_COMMON, most, is_usual), ("", "all tasks", not is_usual and not tasks)
    return Field(field.name, field.label, (*first, *own), field.others)


def _chips(
    request: Request, what: Asked, own: Collection[str], limits: Sequence[str], *, usual_task: str
) -> tuple[Chip, ...]:
    query, chips = request.query_params, list[Chip]()
    if what.filter.text:
        chips.append(Chip("text", f"“{_short(what.filter.text)}”", changed(request, text=None)))
    for name, values in what.filter.exact.items():
        if name in own:
            continue
        label = WORDS.get(name, name).lower()
        if name == "task" and usual_task:
            chips.append(Chip("", usual_task, changed(request, task="")))
            continue
        for value in values:
            back = changed(request, task="") if name == "task" and len(values) == 1 else without(request, name, value)
            chips.append(Chip(name, f"{label}: {_short(value)}", back))
    for name in limits:
        if query.get(name):
            sign = "at least" if name.startswith("min_") else "at most"
            chips.append(Chip(name, f"{name[4:]} {sign} {_short(query[name])}", changed(request, **{name: None})))
    return tuple(chips)


def _usual_task(site: Site, what: Asked) -> str:
    """Return which task the page took by itself, and of how many runs: it may be few, where each has its own."""
    tasks = what.filter.exact.get("task", ())
    if not tasks:
        return ""
    without = {name: values for name, values in what.filter.exact.items() if name != "task"}
    num, total = (site.index.count(one) for one in (what.filter, replace(what.filter, exact=without)))
    return f"task with most runs: {_short(tasks[0])} ({num:,} of {total:,} runs)"


def _text(value: Any) -> str:  # noqa: ANN401  (what the index holds)
    """Return a value as an address has it: with all digits, for it's compared."""
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _as_number(text: str) -> str:
    try:
        return _text(float(text)) if not text.lstrip("-").isdecimal() else str(int(text))
    except ValueError:
        return text


def _short(text: str) -> str:
    """Return the beginning and the end of a long text: names can differ in either."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}…{text[1 - MAX_TEXT // 2 :]}"

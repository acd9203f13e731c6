"""Each line of the threat model names tests, and they're there."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "threat-model.md").read_text()


def named_tests() -> list[tuple[str, str]]:
    """Return file and name of each test that the page names; a name alone is of the file before it."""
    file, found = "", []
    for path, name in re.findall(r"`(tests/[\w/]+\.py)?::(\w+)`", PAGE):
        file = path or file
        found.append((file, name))
    return found


def functions_of(file: str) -> dict[str, ast.FunctionDef]:
    return {one.name: one for one in ast.parse((ROOT / file).read_text()).body if isinstance(one, ast.FunctionDef)}


def test_every_test_that_the_page_names_exists_and_asserts_something() -> None:
    named = named_tests()
    for file, name in named:
        functions = functions_of(file)
        assert name in functions, f"{file} has no {name}: the page names it"
        marks = " ".join(map(ast.unparse, functions[name].decorator_list))
        assert not re.search(r"\.(skip|xfail)\b", marks), f"{file}::{name} isn't run"
        assert shows_something(functions, name), f"{file}::{name} asserts nothing"
    assert len(named) > 80


def shows_something(functions: dict[str, ast.FunctionDef], name: str, depth: int = 2) -> bool:
    """Say whether a test asserts, or awaits an error; or one of its file's functions that it calls does."""
    inside = list(ast.walk(functions[name]))
    calls = {one.func.id for one in inside if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)}
    is_shown = any(isinstance(one, ast.Assert) or "raises" in ast.dump(one) for one in inside)
    return is_shown or (depth > 0 and any(shows_something(functions, one, depth - 1) for one in calls & {*functions}))


def test_nothing_that_looks_like_a_test_is_passed_over() -> None:
    """A name that's written otherwise would be looked for by nobody."""
    found = re.findall(r"`(?:tests/[^`]*|::[^`]*)`", PAGE)
    assert [one for one in found if not re.fullmatch(r"`(tests/[\w/]+\.py)?::\w+`", one)] == []


def test_the_attack_list_is_whole() -> None:
    """What governance was asked to be tried with, one by one."""
    section = PAGE.partition("## The attack list")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ") and "`tests/" in line]
    for attack in (
        "row ids are guessed",
        "forked on resume",
        "policy is swapped",
        "stale writer",
        "zip-slip",
        "weights are",
    ):
        assert sum(attack in row for row in rows) == 1, attack


def test_every_line_of_a_table_names_a_test_or_says_that_there_is_none() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]
    headers = [row for row in rows if row.endswith("| test |")]
    assert len(headers) == 13
    for row in rows:
        last = row.strip("| ").split("|")[-1]
        assert row in headers or "`tests/" in last or last.strip().startswith("none"), row


def test_the_page_is_linked() -> None:
    assert "\nthreat-model\n" in (ROOT / "docs" / "index.md").read_text()
    assert "](threat-model.md)" in (ROOT / "docs" / "governance.md").read_text()

"""The messages that the page on troubleshooting quotes are those that the source raises."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTES = [text.strip() for text in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)]
VARIES = "..."


@cache
def messages() -> tuple[str, ...]:
    """Return all strings of the source, parts in one string joined, and `...` for what an f-string fills in."""
    found = set()
    for file in (ROOT / "src" / "cosmati").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(str(v.value) if isinstance(v, ast.Constant) else VARIES for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return tuple(found)


def stands_in(quote: str, message: str) -> bool:
    """Say whether a quote's parts, without what varies, stand in a message in their order."""
    place = 0
    for part in quote.split(VARIES):
        found = message.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return True


def test_there_are_twenty_and_none_twice() -> None:
    assert len(QUOTES) == len(set(QUOTES)) >= 20


@pytest.mark.parametrize("quote", QUOTES)
def test_the_message_still_stands_in_the_source(quote: str) -> None:
    assert len(quote.replace(VARIES, "")) > 15, "a quote by which nobody finds anything"
    assert any(stands_in(quote, message) for message in messages())


def test_a_message_that_nobody_raises_is_noticed() -> None:
    assert not any(stands_in("The loss has shape ..., and a loss is a cube.", message) for message in messages())


def test_the_settings_and_names_that_it_gives_are_there() -> None:
    source = "\n".join(file.read_text() for file in (ROOT / "src" / "cosmati").rglob("*.py"))
    for name in re.findall(r"--set config\.(\w+)=", PAGE):
        assert re.search(rf"^    {name}: ", source, re.MULTILINE), name
    for name in re.findall(r"`([A-Z][a-z]+[A-Z]\w+)`", PAGE):
        if name not in ("DataLoader", "DistributedSampler"):
            assert re.search(rf"^class {name}\b", source, re.MULTILINE), name
    extras = re.search(r"names its own: (.*)\.", PAGE)
    assert extras is not None
    for name in re.findall(r"`(\w+)`", extras[1]):
        assert re.search(rf"^{name} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE), name

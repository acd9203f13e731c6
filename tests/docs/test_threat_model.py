"""Each line of the threat model names tests, and they're there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "threat-model.md").read_text()


def test_every_test_that_the_page_names_exists() -> None:
    file, found = "", []
    for path, name in re.findall(r"`(tests/[\w/]+\.py)?::(\w+)`", PAGE):
        file = path or file
        functions = {
            node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, f"{file} has no {name}"
        found.append(name)
    assert len(found) > 25


def test_every_line_of_a_table_names_a_test_or_says_that_there_is_none() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]
    headers = [row for row in rows if row.endswith("| test |")]
    assert len(headers) == 10
    for row in rows:
        last = row.strip("| ").split("|")[-1]
        assert row in headers or "`tests/" in last or last.strip().startswith("none"), row


def test_the_page_is_linked() -> None:
    assert "\nthreat-model\n" in (ROOT / "docs" / "index.md").read_text()
    assert "](threat-model.md)" in (ROOT / "docs" / "governance.md").read_text()

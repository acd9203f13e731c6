"""Each tutorial, and the task recipes, walked through in an empty folder as its reader would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.walked_page import walk

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
PAGES = (TUTORIALS.parent / "how-to.md", *sorted(TUTORIALS.glob("my-*.md")), TUTORIALS / "two-processes.md")


@pytest.mark.slow
@pytest.mark.timeout(1200)  # against hanging: each takes a minute or less on a machine of its own
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tutorial_works(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("scipy")
    monkeypatch.chdir(tmp_path)
    walk(page, tmp_path)

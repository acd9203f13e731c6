"""The README's code runs, its picture files exist, and its commands and folders are real."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

from tools.check_links import broken

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_code_runs_and_the_plan_says_what_it_promises() -> None:
    torch.set_num_threads(1)
    scope: dict[str, object] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
            exec(compile(block, "README.md", "exec"), scope)
    assert "holds   elastic" in printed.getvalue()
    shown = README.split("```text\n", 1)[1].split("```", 1)[0]
    *plan, told = printed.getvalue().splitlines()
    assert shown.splitlines()[:-1] == plan
    # The last bits of an accuracy depend on the machine.
    said, found = (re.fullmatch(r"(completed, accuracy )(0\.\d\d)", one) for one in (shown.splitlines()[-1], told))
    assert said is not None
    assert found is not None
    assert float(found[2]) == pytest.approx(float(said[2]), abs=0.02)
    assert scope["result"].outcome == "completed"
    assert scope["report"].clock.step == 40


def test_code_on_the_landing_page_fits_its_column() -> None:
    landing = README.split("landing page of the docs holds what follows -->", 1)[1].split("<!-- end of what", 1)[0]
    for block in re.findall(r"```\w+\n(.*?)```", landing, re.DOTALL):
        assert max(map(len, block.splitlines())) <= 90


def test_pictures_and_pages_that_it_links_exist() -> None:
    assert list(broken({ROOT / "README.md": README})) == []


def test_the_tree_names_real_files() -> None:
    tree = README.split("src/cosmati/\n", 1)[1].split("```", 1)[0]
    for name in re.findall(r"(\w+/|\w+\.py)(?=\s)", tree):
        assert list((ROOT / "src" / "cosmati").rglob(name.rstrip("/"))), name

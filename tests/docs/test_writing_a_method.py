"""The tutorial's code, run from top to bottom."""

import contextlib
import io
import re
import sys
import types
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "writing-a-method.md").read_text()


@pytest.mark.long
def test_the_tutorial_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    printed = io.StringIO()
    module = types.ModuleType("tutorial")
    monkeypatch.setitem(sys.modules, "tutorial", module)  # dataclasses look their module up
    scope = module.__dict__
    with contextlib.redirect_stdout(printed):
        exec(compile("\n".join(blocks), "writing-a-method.md", "exec"), scope)
    assert len(blocks) == 8
    plan = printed.getvalue().split("V = 4")[1]
    assert plan.index("InputDropout") < plan.index("LabelSmoothing") < plan.index("EMA")
    # The asserts of the page ran: what they compare is there.
    assert set(scope) >= {"plain", "off", "dropped", "order"}

"""The tutorial's code, run from top to bottom."""

import contextlib
import io
import re
from pathlib import Path

import torch

PAGE = (Path(__file__).parents[2] / "docs" / "writing-a-method.md").read_text()


def test_the_tutorial_runs() -> None:
    torch.set_num_threads(1)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    printed = io.StringIO()
    scope: dict[str, object] = {"__name__": "tutorial"}
    with contextlib.redirect_stdout(printed):
        exec(compile("\n".join(blocks), "writing-a-method.md", "exec"), scope)
    assert len(blocks) == 5
    plan = printed.getvalue().split("V = 4")[1]
    assert plan.index("InputNoise") < plan.index("LabelSmoothing") < plan.index("EMA")
    # The asserts of the page ran: what they compare is there.
    assert set(scope) >= {"plain", "off", "noisy", "order"}

"""Methods of the user's own that lack something: said in words, or done without."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cosmati.core.method import Method
from cosmati.errors import PlanError
from cosmati.methods import GradientClipping, LabelSmoothing
from tests.train.test_other_run_more import run


class Bare(GradientClipping):
    pass


class Blank(GradientClipping):
    """ """


@dataclass(frozen=True, kw_only=True)
class Stageless(Method):
    """Acts nowhere."""


@dataclass(frozen=True, kw_only=True)
class Misplaced(Method):
    """Acts at a stage by another name."""

    stage = "gradient"  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Bare, Blank])
def test_a_method_without_a_docstring_is_recorded(tmp_path: Path, kind: type[GradientClipping]) -> None:
    run(tmp_path / "run", methods=[kind(clipping_type="norm", clipping_threshold=1.0)])
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    (line,) = record["plan"]
    assert line["method"].startswith(kind.__name__)
    assert line["does"] == ""


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Stageless(), r"Stageless has no stage.*stage: ClassVar\[Stage\] = Stage\.GRADIENT"),
        (Misplaced(), r"Misplaced has the stage 'gradient'.*Stage\.GRADIENT"),
        (LabelSmoothing, "is not a method. Give instances"),
        ("LabelSmoothing", "is not a method. Give instances"),
    ],
)
def test_what_is_no_whole_method_is_refused(method: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        run(None, methods=[method])

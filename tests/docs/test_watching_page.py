"""The page on watching: its code runs, and its tables name what there is."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import pytest

from cosmati.integrations import TRACKERS
from cosmati.integrations.tracker import Tracker
from cosmati.train.observers import Observer, monitors

PAGE = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()


@pytest.mark.long
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "page", "open": _open}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "watching.md", "exec"), scope)
    # The state that the page promises: a run that was stopped on the way has the same mean.
    parts = [scope["SlowMean"](), scope["SlowMean"]()]
    stopper = scope["Threshold"]("slow_mean", above=0.0)
    assert scope["trainer"](parts[0], stopper, folder="parts").fit().clock.step == 20
    scope["trainer"](parts[1], scope["Threshold"]("slow_mean", above=1e9), folder="parts").fit()
    assert parts[1].mean.equal(scope["whole"].mean)
    assert float(parts[1].mean) > 0


def _open(path: str) -> Any:
    """Read at once: the page's own `open` leaves closing to Python."""
    return io.StringIO(Path(path).read_text())


def test_the_table_of_trackers_has_their_settings() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", PAGE, re.MULTILINE))
    assert rows.keys() == TRACKERS.keys()
    for name, told in rows.items():
        fields = [field.name for field in dataclasses.fields(TRACKERS[name]) if field.init]  # type: ignore[arg-type]
        assert list(re.findall(r"`(\w+)=", told)) == fields, name


def test_the_tables_name_every_monitor_and_every_call() -> None:
    for name in set(monitors.__all__) - {"Monitor", "Monitors"}:
        assert f"`{name}" in PAGE, name
    calls = [name for name in vars(Observer) if name.startswith("on_") or name.endswith("state_dict")]
    assert len(calls) == 10
    for name in calls:
        assert f"`{name}(" in PAGE, name
    for name in ("open", "log", "summary", "artifact", "supersede", "close"):
        assert hasattr(Tracker, name)
        assert f"`{name}`" in PAGE

"""The page on data: its commands and its code, run from top to bottom."""

import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.data.loader import StreamingLoader
from cosmati.data.order.plan import Tail
from cosmati.data.shards.encodings import encoding
from cosmati.data.streaming import StreamingDataset

pytestmark = pytest.mark.long

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
POLICY = """
version: 1
taxonomy: t
measures: {evidence: {grades: [report, trial]}, trust: {grades: [low, high], thresholds: [0.5]}}
rules: [{class: "**", weight: 1}]
"""


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    for number in range(40):
        (tmp_path / "notes" / f"{number}.txt").write_text(f"Note {number}: " + "marble of known origin, " * 12)
    (tmp_path / "papers.jsonl").write_text(
        '{"text": "a", "level": "trial", "score": 0.6, "topics": ["mail"], "reviewer": "ada"}'
    )
    (tmp_path / "policy.yaml").write_text(POLICY)
    commands = re.findall(r"^cosmati (data .*?)(?: +#.*)?$", PAGE.replace("\\\n", ""), re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        here = command.replace("s3://bucket", f"local://{tmp_path}/bucket")  # by fsspec too, without a server
        result = CliRunner().invoke(app, shlex.split(here))
        assert result.exit_code == 0, result.output
    scope: dict[str, object] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "data.md", "exec"), scope)
    (source,) = StreamingDataset("papers").sources
    assert (source.class_path, source.grades) == ("mail&medical/papers", {"evidence": "trial", "trust": "high"})
    assert [one.num_rows for one in StreamingDataset("graded").sources] == [1, 1]
    assert scope["tokens"].shape[1] == 128  # type: ignore[attr-defined]
    assert scope["state"]["position"] == len(scope["rows"])  # type: ignore[index, arg-type]


def test_who_comes_from_mosaicml_streaming_can_follow_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = PAGE.split("## Coming from mosaicml-streaming")[1].split("\n## ")[0]
    scope: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(compile(block, "data.md", "exec"), scope)
    assert (scope["images"].shape, scope["classes"].shape) == ((16, 3, 32, 32), (16,))
    # Each picture comes once an epoch on every road, and is the one that was written.
    pictures = scope["pictures"]
    drawn = [np.random.default_rng(n).integers(0, 256, (32, 32, 3), np.uint8) for n in range(48)]
    found = []
    for batch in StreamingLoader(pictures, 16):
        for image, label, row_id in zip(*batch.data, batch.lineage.row_ids.tolist(), strict=True):
            assert np.array_equal((image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy(), drawn[row_id])
            assert label == row_id % 10
            found.append(row_id)
    assert sorted(found) == list(range(48))
    # The mixture is exact, and the resume loses and repeats nothing.
    kinds = Counter(text.split()[0] for text in scope["seen"])
    assert kinds == {"web": 60, "books": 20}
    assert len(set(scope["seen"])) == 80
    options = set(re.findall(r"\b([a-z_]+)=", " ".join(re.findall(r"^\| `.*", section, re.MULTILINE))))
    theirs = {"out", "remote", "local", "repeat", "proportion", "choose", "epoch_size", "cache_limit"}
    ours = {"columns", "class_path", "source", "shuffle", "cache", "repeats", "curriculum", "max_bytes"}
    assert options == theirs | ours


def test_names_on_the_page_are_real() -> None:
    for name in ("carry", "pad", "drop"):
        assert name in str(Tail)
        assert f"`{name}`" in PAGE
    table = PAGE.split("| encoding | value |")[1].split("\n\n")[0]
    for name in re.findall(r"`([a-z_0-9:]+)`", table):
        if name not in ("pkl", "allow_pickle"):
            assert encoding(name).name == name

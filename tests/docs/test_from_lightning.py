"""The page for who comes from Lightning: the port runs, resumes, and steps as Lightning's loop would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from cosmati import RunConfig, Trainer
from cosmati.optim import AdamW
from tests.docs.migration_pages import STOPS, blocks_of, names_are_real, run_blocks, table_of

pytestmark = pytest.mark.long

PAGE = (Path(__file__).parents[2] / "docs" / "from-lightning.md").read_text()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("page")
    return folder, run_blocks(blocks_of(PAGE), folder)


def test_the_port_learns_measures_and_keeps(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, scope = ran
    assert scope["result"].metrics["val_acc"] > 0.9
    lines = [json.loads(line) for line in (folder / "runs/spirals/evaluations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [8 * (epoch + 1) for epoch in range(len(lines))]
    assert len(list((folder / "runs/spirals/checkpoints").glob("step-*"))) == 2
    assert scope["trainer"].evaluation.num_batches == 4


def test_the_best_is_kept(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, scope = ran
    model = scope["make_model"]()
    model.load_state_dict(load_file(folder / "best.safetensors"))
    points, labels = scope["rows"](seed=1).tensors
    assert float((model(points).argmax(1) == labels).float().mean()) == scope["longer"].observers[0].best > 0.5


@pytest.mark.slow
def test_the_same_command_goes_on(ran: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    block = blocks_of(PAGE)[0]
    given = "observers=[EarlyStopping("
    assert block.count(given) == 1
    part = run_blocks([STOPS, block.replace(given, "observers=[Stops(21), EarlyStopping(")], tmp_path)
    assert part["trainer"].clock.step == 21
    whole, again = ran[1]["trainer"], run_blocks([block], tmp_path)["trainer"]
    assert again.clock.step == whole.clock.step > 21
    ours = again.model.state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in whole.model.state_dict().items())


def test_accumulation_is_lightnings(ran: tuple[Path, dict[str, Any]]) -> None:
    """Its loop, by hand: each batch's mean over 4, four backward passes, one clipped step."""
    scope = ran[1]
    points, labels = scope["rows"](seed=0, num_rows=256).tensors
    model = scope["make_model"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(16):
        rows = slice(16 * index, 16 * index + 16)
        (F.cross_entropy(model(points[rows]), labels[rows]) / 4).backward()
        if index % 4 == 3:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    ported = scope["make_model"]()
    steps = [(points[64 * step : 64 * step + 64], labels[64 * step : 64 * step + 64]) for step in range(4)]
    Trainer(
        ported, scope["Classification"](2), steps, optimizers=AdamW(lr=1e-2), methods=scope["trainer"].plan.methods,
        config=RunConfig(budget="4ba", num_microbatches=4),
    ).fit()  # fmt: skip
    for ours, theirs in zip(ported.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_names_on_the_page_are_real() -> None:
    names_are_real(PAGE, least={"AdamW", "EarlyStopping", "Evaluation", "RunConfig", "SWA", "EMA", "Tracking"})
    assert len(table_of(PAGE)) > 25

"""What a run tells the launcher that has begun it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cosmati import LanguageModel, RunConfig, Trainer
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.records.launched import NOTE_VARIABLE, LaunchedRun


def test_a_run_tells_of_its_microbatches_and_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTE_VARIABLE, str(tmp_path / "note"))
    model = GPT(GPTConfig(sequence_length=8, width=16, num_blocks=1, num_heads=4))
    config = RunConfig(
        budget="1ba", num_microbatches=2, virtual_shards=4, tensor_parallel=2, run_folder=tmp_path / "run"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Trainer(model, LanguageModel(), optimizers=[optimizer], data=[torch.randint(0, 9, (4, 9))], config=config).fit()
    assert LaunchedRun.from_json((tmp_path / "note").read_text()) == LaunchedRun(
        folder=str(tmp_path / "run"), attempt=0, num_microbatches=2, num_steps=1, tensor_parallel=2
    )

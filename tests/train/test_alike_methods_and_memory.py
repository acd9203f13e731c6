"""Two of a kind are told apart: methods with tensors among their options, buffers that lie in one memory, places."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.loss import Classification
from cosmati.core.method import Method, Position, Stage
from cosmati.core.pieces import Pieces
from cosmati.optim import SGD
from cosmati.train.artifacts import artifact
from cosmati.train.config import RunConfig
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.trainer import Trainer

ROWS = torch.ones(8, 6), torch.arange(8) % 3


@dataclass(frozen=True, kw_only=True)
class Scale(Method):
    """Multiplies all gradients."""

    stage: ClassVar[Stage] = Stage.GRADIENT
    by: Tensor

    def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
        return gradients.map(lambda one: one * self.by.prod())


class Views(nn.Linear):
    """Two buffers in one memory, and one in a part of it."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        whole = torch.arange(6.0)
        for name, value in (("whole", whole), ("turned", whole.view(3, 2)), ("part", whole[2:4])):
            self.register_buffer(name, value)


def trained(model: nn.Module, *methods: Method, config: RunConfig) -> nn.Module:
    data = [ROWS] * 3
    Trainer(model, Classification(3), data, optimizers=[SGD(lr=0.1)], methods=methods, config=config).fit()
    return model


def test_two_methods_of_one_class_with_tensors_act_both() -> None:
    config = RunConfig(budget="1ba", num_threads=1)
    once, twice = (nn.Linear(6, 3), nn.Linear(6, 3))
    twice.load_state_dict(once.state_dict())
    before = once.weight.detach().clone()
    trained(once, config=config)
    trained(twice, Scale(by=torch.tensor([2.0, 2.0])), Scale(by=torch.tensor([0.5, 4.0])), config=config)
    assert torch.allclose(twice.weight - before, 8 * (once.weight - before), atol=1e-6)


@pytest.mark.parametrize("checkpoint_async", [False, True])
def test_buffers_in_one_memory_are_saved_each(tmp_path: Path, *, checkpoint_async: bool) -> None:
    config = RunConfig(budget="1ba", num_threads=1, run_folder=tmp_path, checkpoint_async=checkpoint_async)
    trained(Views(), config=config)
    kept = read_checkpoint(list_checkpoints(tmp_path / "checkpoints")[0]).model
    assert kept["whole"].tolist() == kept["turned"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert kept["turned"].shape == (3, 2)
    assert kept["part"].tolist() == [2, 3]


def test_copies_of_a_run_lie_where_they_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run" / "src").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run" / "src")
    config = RunConfig(budget="1ba", num_threads=1, run_folder=Path(".."), checkpoint_to=str(tmp_path / "copies"))
    trained(nn.Linear(6, 3), config=config)
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["run"]
    assert list_checkpoints(tmp_path / "run" / "checkpoints")


def test_a_link_on_the_way_to_weights_is_followed_before_what_is_above(tmp_path: Path) -> None:
    (tmp_path / "far" / "inner").mkdir(parents=True)
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "link").symlink_to(tmp_path / "far" / "inner")
    config = RunConfig(run_folder=tmp_path / "near" / "link", load_weights=tmp_path / "near" / "link" / ".." / "it")
    anchored = config.anchored()
    assert anchored.run_folder == tmp_path / "near" / "link"
    assert anchored.load_weights == (tmp_path / "far" / "it").resolve()


def test_an_artifact_at_home_is_found_and_named_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tokenizer").write_text("words")
    made = artifact("tokenizer", "~/tokenizer")
    assert made.digest == artifact("tokenizer", tmp_path / "tokenizer").digest
    assert made.origin == "~/tokenizer"

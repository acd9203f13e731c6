"""Evaluations on a StreamingLoader: its first epoch each time, wherever it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cosmati import Evaluation, Loss, StreamingDataset, StreamingLoader, Trainer
from cosmati.data.shards.writer import ShardWriter
from cosmati.errors import DataError
from cosmati.optim import SGD
from cosmati.train.evaluation import evaluate
from cosmati.train.ranks import Ranks

NUM_ROWS = 10


@pytest.fixture
def rows(tmp_path: Path) -> StreamingDataset:
    with ShardWriter(tmp_path / "rows", {"x": "ndarray:float32:1"}, class_path="open/permissive", source="rows") as out:
        for number in range(NUM_ROWS):
            out.write({"x": torch.tensor([float(number)]).numpy()})
    return StreamingDataset(tmp_path / "rows", columns=("x",))


def measured(evaluation: Evaluation) -> dict[str, float]:
    plain = torch.autocast("cpu", torch.bfloat16, enabled=False)
    return evaluate(nn.Identity(), evaluation, Ranks.alone(), torch.device("cpu"), plain)


def mean(model: nn.Module, data: Tensor) -> Loss:
    return Loss(model(data).sum(), float(len(data)))


def test_a_loader_of_which_a_batch_was_taken_is_evaluated_whole(rows: StreamingDataset) -> None:
    loader = StreamingLoader(rows, 4)
    next(iter(loader))
    assert measured(Evaluation(loader, {"mean": mean})) == {"mean": sum(range(NUM_ROWS)) / NUM_ROWS}


def test_where_the_loader_stands_is_left_alone(rows: StreamingDataset) -> None:
    loader = StreamingLoader(rows, 4)
    begun = iter(loader)
    taken = [next(begun)]
    before = loader.state_dict()
    measured(Evaluation(loader, {"mean": mean}))
    assert loader.state_dict() == before
    taken += begun
    assert sorted(torch.cat([one.data for one in taken]).flatten().tolist()) == list(range(NUM_ROWS))
    assert loader.state_dict()["position"] == NUM_ROWS


def test_who_reads_by_workers_that_persist_is_told_that_they_were_taken(rows: StreamingDataset) -> None:
    loader = StreamingLoader(rows, 4, num_workers=1, persistent_workers=True)
    begun = iter(loader)
    next(begun)
    before = loader.state_dict()
    assert measured(Evaluation(loader, {"mean": mean})) == {"mean": sum(range(NUM_ROWS)) / NUM_ROWS}
    assert loader.state_dict() == before
    with pytest.raises(DataError, match="taken its persistent workers over"):
        next(begun)


def test_what_is_chosen_is_the_same_each_time(rows: StreamingDataset) -> None:
    some = rows.choose({"open/permissive": 3})
    loader = StreamingLoader(some, 2)
    epochs = [torch.cat([one.data for one in loader]).mean().item() for _ in range(2)]
    assert epochs[0] != epochs[1], "a second epoch has the next rows"
    evaluation = Evaluation(StreamingLoader(some, 2), {"mean": mean})
    assert [measured(evaluation)["mean"] for _ in range(2)] == [pytest.approx(epochs[0])] * 2


def test_an_export_measures_all_rows(rows: StreamingDataset, tmp_path: Path) -> None:
    trainer = Trainer(
        nn.Linear(1, 1),
        lambda model, data: model(data).square().mean(),
        [torch.ones(2, 1)],
        optimizers=[SGD(lr=0.1)],
        evaluation=Evaluation(StreamingLoader(rows, 4), {"mean": mean}),
    )
    trainer.fit()
    trainer.export(tmp_path / "out", to="safetensors")


def test_a_rank_s_share_is_refused_with_ours(rows: StreamingDataset) -> None:
    with pytest.raises(DataError, match=r"StreamingLoader\(dataset, batch_size, rank=0, world=1\)"):
        Evaluation(StreamingLoader(rows, 4, rank=1, world=2), {"mean": mean})
    Evaluation(StreamingLoader(rows, 4, rank=0, world=1), {"mean": mean})

"""Loaders that restore their own state, and sequences of the user's own: what they give at a resume is compared."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from cosmati.core.plan import Promise
from cosmati.errors import DataError
from tests.train.test_other_run_more import LABELS, ROWS, assert_goes_on, loss, run

Rows = tuple[Tensor, Tensor]


def batch(index: int, scale: float = 1.0) -> Rows:
    return ROWS[2 * index : 2 * index + 2] * scale, LABELS[2 * index : 2 * index + 2]


class Counting:
    """Knows its place in a pass of 24 batches, the order of which follows from the pass."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale, self.epoch, self.place = scale, 0, 0

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[Rows]:
        order = torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.place < 24:
            self.place += 1
            yield batch(order[self.place - 1], self.scale)
        self.epoch, self.place = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


class EpochOnly(Counting):
    """Restores the pass, and not the place in it, as many loaders do."""

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class Live(Counting):
    """Gives its live state away, which goes on changing."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        self.held |= super().state_dict()
        return self.held


class Drawn(Counting):
    """Draws noise while a batch is made, with the default generators."""

    def __iter__(self) -> Iterator[Rows]:
        for x, y in super().__iter__():
            yield x + torch.randn_like(x) * random.random(), y


class Overfitting(Counting):
    """One batch, again and again."""

    def __iter__(self) -> Iterator[Rows]:
        for _ in super().__iter__():
            yield batch(0)


STOPS = (1, 2, 3, 9, 10, 11, 17, 23, 24, 25, 26, 35)


@pytest.mark.parametrize("stop_at", STOPS)
def test_a_loader_that_knows_its_place_goes_on(tmp_path: Path, stop_at: int) -> None:
    first: dict[str, Any] = {"data": Counting, "budget": "40ba"}
    run(tmp_path / "run", stop_at=stop_at, **first)
    assert_goes_on(tmp_path / "run", first)


@pytest.mark.parametrize("kind", [Live, Drawn, Overfitting])
@pytest.mark.parametrize("stop_at", [2, 12])
def test_ordinary_states_of_other_kinds(tmp_path: Path, kind: Any, stop_at: int) -> None:
    first: dict[str, Any] = {"data": kind, "budget": "14ba"}
    run(tmp_path / "run", stop_at=stop_at, **first)
    assert_goes_on(tmp_path / "run", first)


@pytest.mark.parametrize("stop_at", [1, 2, 3, 10, 12, 26])
def test_a_state_without_the_place_is_refused(tmp_path: Path, stop_at: int) -> None:
    stopped = run(tmp_path / "run", stop_at=stop_at, data=EpochOnly, budget="40ba")
    if stop_at > 2:
        for promise in (Promise.RESUME, Promise.ELASTIC, Promise.REPLAYABLE):
            assert not stopped.plan.holds(promise)
        assert "state_dict() of EpochOnly is the same after 2 batches as after 1" in str(stopped.plan)
    with pytest.raises(DataError, match=r"EpochOnly can't go on where the run stopped.*load_state_dict\(\)"):
        run(tmp_path / "run", data=EpochOnly, budget="40ba")


@pytest.mark.parametrize("stop_at", [2, 3, 12, 24, 26])
def test_other_rows_of_a_loader_with_a_state_are_refused(tmp_path: Path, stop_at: int) -> None:
    run(tmp_path / "run", stop_at=stop_at, data=Counting, budget="40ba")
    with pytest.raises(DataError, match="is another one now"):
        run(tmp_path / "run", data=lambda: Counting(3.0), budget="40ba")


def test_workers_that_draw_afresh_break_the_promise_and_not_the_run(tmp_path: Path) -> None:
    """What a loader's workers draw is in no state of its: the rows can't be told from other ones."""

    class Working(Counting):
        num_workers = 2

        def __iter__(self) -> Iterator[Rows]:
            own = torch.Generator().manual_seed(7)  # As a worker's, which begins anew in another process.
            for x, y in super().__iter__():
                yield x + torch.randn(x.shape, generator=own), y

    run(tmp_path / "run", stop_at=6, data=Working, budget="12ba")
    with pytest.warns(UserWarning, match="another one now"):
        found = run(tmp_path / "run", data=Working, budget="12ba")
    assert not found.plan.holds(Promise.RESUME)
    assert "batch 5 of this pass" in str(found.plan)


# ------------------------------------------------------------------------------------------ sequences of the user's own


class Read(Sequence[Rows]):
    """Batches that are read when they're asked for."""

    def __init__(self, scale: float = 1.0, other_from: int = 6) -> None:
        self.scale, self.other_from = scale, other_from

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Rows:  # type: ignore[override]
        x, y = ROWS[8 * index : 8 * index + 8], LABELS[8 * index : 8 * index + 8]
        return x * self.scale, (y + 1) % 3 if index >= self.other_from else y


@pytest.mark.parametrize("other", [Read(3.0), Read(other_from=2)])
@pytest.mark.parametrize("stop_at", [3, 6, 9])
def test_other_rows_of_a_sequence_are_refused(tmp_path: Path, other: Read, stop_at: int) -> None:
    run(tmp_path / "run", stop_at=stop_at, data=Read, budget="12ba")
    with pytest.raises(DataError, match=r"The Read can't go on.*batch \d of the data is another one now"):
        run(tmp_path / "run", data=lambda: other, budget="12ba")
    assert_goes_on(tmp_path / "run", {"data": Read, "budget": "12ba"})


@pytest.mark.long
def test_a_memory_map_and_draws_and_changes_in_place_go_on(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", ROWS.numpy())

    class Mapped(Read):
        def __init__(self) -> None:
            self.rows = np.load(tmp_path / "rows.npy", mmap_mode="c")

        def __getitem__(self, index: int) -> Rows:  # type: ignore[override]
            rows = torch.from_numpy(self.rows[8 * index : 8 * index + 8])
            return rows + torch.randn(8, 6) * 0.1, LABELS[8 * index : 8 * index + 8]

    class Copies(Read):
        def __getitem__(self, index: int) -> Rows:  # type: ignore[override]
            x, y = super().__getitem__(index)
            return x.clone(), y

    def changing(model: nn.Module, data: Any) -> Tensor:
        data[0].mul_(0.5)
        return loss(model, data)

    for name, kind, used in (("mapped", Mapped, loss), ("copies", Copies, changing)):
        first: dict[str, Any] = {"data": kind, "budget": "12ba", "loss": used}
        for stop_at in (2, 7):
            run(tmp_path / name, stop_at=stop_at, **first)
        assert_goes_on(tmp_path / name, first)


def test_another_number_of_generators_is_refused(tmp_path: Path) -> None:
    def loader(num: int) -> DataLoader[Any]:
        own = [torch.Generator().manual_seed(seed) for seed in range(num)]
        rows = TensorDataset(ROWS, LABELS)
        sampler = RandomSampler(rows, generator=own[0])
        return DataLoader(rows, 4, sampler=sampler, generator=own[1] if num > 1 else None)

    for was, now in ((1, 2), (2, 1)):
        folder = tmp_path / f"{was}{now}"
        run(folder, stop_at=3, data=lambda n=was: loader(n), budget="8ba")
        with pytest.raises(DataError, match=f"it had {was} generators of its own, and has {now}"):
            run(folder, data=lambda n=now: loader(n), budget="8ba")

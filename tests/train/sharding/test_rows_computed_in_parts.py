"""A look at rows in parts finds loss, draws, statistics, gradients and buffers, and leaves everything as it was."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch, Lineage
from cosmati.core.pieces import Pieces
from cosmati.core.state import tensor_root
from cosmati.core.virtual_shards import VirtualShards
from cosmati.errors import PlanError
from cosmati.train import parts_compared
from cosmati.train.layout.in_replicas import InReplicas
from cosmati.train.parts_compared import (
    _alone,
    _computed,
    _differing,
    _found,
    _Seen,
    _seen,
    _unequal,
    _unlike_among,
    refuse_unlike_parts,
)

ROWS = torch.arange(12.0).reshape(4, 3)


class Statistics:
    """BatchNorm's, of a run that has some or none."""

    def __init__(self, *layers: object) -> None:
        self.layers, self.asked = layers, list[object]()

    def clear(self) -> str:
        self.asked.append("cleared")
        return "mark"

    def read(self, mark: object) -> Tensor:
        self.asked.append(mark)
        return torch.tensor([7.0])


class Scaled(nn.Module):
    """A loss of every kind: parameters that learn, don't, or aren't read, a buffer that moves, and a draw."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.frozen = nn.Parameter(torch.tensor([4.0, 0.0, 1.0]), requires_grad=False)
        self.unread = nn.Parameter(torch.ones(2))
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        self.count += 1
        rows.mul_(2)
        return (rows * self.w * self.frozen).sum() + 0 * torch.rand(())


def made(*layers: object) -> tuple[Any, Scaled, Callable[[Batch], Tensor], Batch]:
    model = Scaled()
    named = [SimpleNamespace(name=name, tensor=tensor) for name, tensor in model.named_parameters()]
    a = SimpleNamespace(statistics=Statistics(*layers), layout=SimpleNamespace(parameters=named), model=model)
    batch = Batch((ROWS.clone(),), Lineage.of_rows(5, 4), 3, 2)

    def objective(given: Batch) -> Tensor:
        assert (given.class_id, given.band) == (3, 2)
        assert given.lineage is batch.lineage
        return model(given.data[0])  # type: ignore[no-any-return]

    return a, model, objective, batch


def test_what_is_computed_is_told_by_name() -> None:
    a, model, objective, batch = made("a layer")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        found = _computed(a, objective, batch)
        after = torch.get_rng_state()
    assert found.keys() == {"the loss", "draws", "statistics", "the gradient of w", "the buffer count"}
    rows = 2 * ROWS.sum(0)
    assert torch.equal(found["the gradient of w"], rows * model.frozen)
    assert found["the loss"].item() == float((rows * model.w * model.frozen).sum().detach())
    assert not found["the loss"].requires_grad
    assert torch.equal(found["draws"], after)
    assert a.statistics.asked == ["cleared", "mark"]
    assert torch.equal(batch.data[0], ROWS), "the loss has had a copy"
    model.count += 1
    assert found["the buffer count"].item() == 1, "and so has who asks"


def test_nothing_is_said_of_what_is_not_there() -> None:
    a, model, objective, batch = made()
    assert "statistics" not in _computed(a, objective, batch)
    assert a.statistics.asked == ["cleared"]
    model.w.requires_grad_(False)
    assert _computed(a, objective, batch).keys() == {"the loss", "draws", "the buffer count"}
    learns = _computed(a, lambda _: torch.tensor(2.0), batch)
    assert learns.keys() == {"the loss", "draws", "the buffer count"}
    a.layout.parameters = []
    model.w.requires_grad_(True)
    assert _computed(a, objective, batch).keys() == {"the loss", "draws", "the buffer count"}


@pytest.mark.parametrize("alone", [None, "alone"])
@pytest.mark.parametrize(
    ("scale", "tells"), [(1.0, True), (0.0, False), (torch.nan, False), (torch.inf, False), (-1.0, True)]
)
def test_a_look_puts_everything_back(alone: str | None, scale: float, tells: bool) -> None:
    a, model, objective, batch = made()
    computed: list[object] = []
    parts: Any = SimpleNamespace(alone=alone, shards="usual", compute=computed.append)
    seen = _seen(a, parts, {"": model}, lambda given: objective(given) * scale, batch, "asked")  # type: ignore[arg-type]
    assert computed == ["asked", "usual"]
    assert (model.count.item(), seen.tells) == (0, tells)
    names = {"the loss", "draws", "the gradient of w", "the buffer count"}
    assert seen.digests.keys() == names
    assert seen.tensors.keys() == (set() if alone else names)
    assert seen.digests["the buffer count"] == tensor_root("the buffer count", torch.ones(()))

    def fails(given: Batch) -> Tensor:
        objective(given)
        raise KeyError

    with pytest.raises(KeyError):
        _seen(a, parts, {"": model}, fails, batch, None)
    assert computed[2:] == [None, "usual"]
    assert model.count.item() == 0


def test_one_gradient_that_tells_is_enough_and_the_loss_does_not() -> None:
    a, model, _, batch = made()
    parts: Any = SimpleNamespace(alone=None, shards=None, compute=lambda _: None)
    told = _seen(a, parts, {"": model}, lambda _: model.w.sum() + 0 * model.unread.sum(), batch, None)
    assert told.tells
    assert not _seen(a, parts, {"": model}, lambda _: 5 + 0 * model.unread.sum(), batch, None).tells
    assert not _seen(a, parts, {"": model}, lambda _: torch.tensor(5.0), batch, None).tells


def test_unequal_is_what_one_has_otherwise_or_alone() -> None:
    one = _Seen({"a": b"1", "b": b"2", "c": b"3"}, {}, tells=True)
    other = _Seen({"a": b"1", "b": b"9", "d": b"4"}, {}, tells=True)
    assert _unequal(one, other) == _unequal(other, one) == {"b", "c", "d"}
    assert _unequal(one, one) == set()


@pytest.mark.parametrize("is_all", [False, True])
def test_alone_a_rank_sees_something_or_has_no_room_or_is_mute(is_all: bool) -> None:
    shards: list[object] = []

    def said(answer: _Seen | Exception) -> object:
        def look(_batch: Batch, given: object) -> _Seen:
            shards.append(given)
            if isinstance(answer, Exception):
                raise answer
            return answer

        parts: Any = SimpleNamespace(alone="alone")
        few: Any = None
        return _alone(look, parts, few, is_all=is_all)

    tells, mute = _Seen({}, {}, tells=True), _Seen({}, {}, tells=False)
    assert said(tells) is tells
    assert said(mute) == (mute if is_all else "mute")
    assert said(MemoryError()) == "short"
    if is_all:
        with pytest.raises(ValueError, match="too few"):
            said(ValueError("too few"))
    else:
        assert said(ValueError("too few")) == "mute"
    assert {*shards} == {"alone"}


class Everyone:
    """Two ranks that are asked in turn: this one, and what the other one says."""

    def __init__(self, *said: dict[str, Any]) -> None:
        self.degree, self._said = 2, list(said)

    def told_by_all(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        return [own, self._said.pop(0)]


TELLS, MUTE = _Seen({}, {}, tells=True), _Seen({}, {}, tells=False)


@pytest.mark.parametrize(
    ("own", "said", "found"),
    [
        (TELLS, [{"alone": "seen"}, {"differ": []}], []),
        (TELLS, [{"alone": "short"}], []),
        (MUTE, [{"alone": "short"}], []),
        (TELLS, [{"alone": "mute"}, {"alone": "short"}], []),
        (TELLS, [{"alone": "mute"}, {"alone": "seen"}, {"differ": ["z"]}], ["own", "z"]),
        (
            TELLS,
            [{"alone": "seen"}, {"differ": ["the gradient of a", "z"]}, {"alone": "seen"}, {"differ": []}],
            ["own"],
        ),
        (
            TELLS,
            [{"alone": "seen"}, {"differ": []}, {"alone": "seen"}, {"differ": ["the gradient of a", "z", "draws"]}],
            ["draws", "own", "z", "the gradient of a"],
        ),
    ],
)
def test_all_ranks_find_what_any_finds(
    monkeypatch: pytest.MonkeyPatch, own: _Seen, said: list[dict[str, Any]], found: list[str]
) -> None:
    ranks, batch = Everyone(*said), Batch(ROWS, Lineage.of_rows(0, 4), None)
    differ = {"own"} if len(said) != 2 or said[1] == {"differ": ["z"]} else set[str]()
    a: Any = SimpleNamespace(ranks=ranks)
    parts: Any = SimpleNamespace(alone=None)

    def differing(*given: Any) -> set[str]:
        assert given[:3] == (a, parts, look)
        assert given[3].num_rows in (2, 4)
        assert given[4] is own
        return differ

    def look(*_: object) -> _Seen:
        return own

    monkeypatch.setattr(parts_compared, "_differing", differing)
    assert _found(a, parts, look, batch) == found
    assert not ranks._said, "every rank asks as often"


@pytest.mark.parametrize(("together", "found"), [(1000.9, set[str]()), (1001.0005, {"the loss"}), (999.5, set[str]())])
def test_the_tolerance_is_a_share_of_what_one_process_computes(together: float, found: set[str]) -> None:
    looks: list[tuple[object, object]] = []
    told: list[dict[str, str]] = []

    def seen(value: float) -> _Seen:
        tensor = torch.tensor(value, dtype=torch.float64)
        return _Seen({"the loss": tensor_root("the loss", tensor)}, {"the loss": tensor}, tells=True)

    def look(few: Batch, given: object) -> _Seen:
        looks.append((few, given))
        return seen(1000.0 if given is None else together)

    def told_by_all(own: dict[str, str]) -> list[dict[str, str]]:
        told.append(own)
        return [own, dict.fromkeys(own, "f")]

    @contextmanager
    def replaced(_: object) -> Any:
        yield

    shards = VirtualShards(2)
    weights = Pieces({"w": torch.ones(3)})
    a: Any = SimpleNamespace(
        ranks=SimpleNamespace(degree=1, replica=0, told_by_all=told_by_all),
        layout=SimpleNamespace(weights=lambda: weights, replaced=replaced),
    )
    parts: Any = SimpleNamespace(alone=None, shards=shards)
    batch = Batch(ROWS, Lineage.of_rows(0, 4), None)
    assert _differing(a, parts, look, batch, seen(1000.0)) == found
    assert looks == [(batch, shards), (batch, None), (batch, None)][: 3 if found else 1]
    a.ranks.degree = 2
    assert _unlike_among(a, seen(together)) == {"the loss"}
    assert [len(one.get("the loss", "")) for one in told[-2:]] == [0, 16]


@pytest.mark.parametrize("alone", [None, "alone"])
@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["a"], "process: a. "),
        (["a", "b", "c"], "process: a, b, c. "),
        (["a", "b", "c", "d", "e"], "process: a, b, c and 2 more. "),
    ],
)
def test_the_first_three_names_are_told_with_the_mend(
    monkeypatch: pytest.MonkeyPatch, alone: str | None, names: list[str], told: str
) -> None:
    within: list[str] = []

    @contextmanager
    def restored() -> Any:
        within.append("in")
        yield
        within.append("out")

    def found(*given: Any) -> list[str]:
        assert within == ["in"]
        assert given[0] is a
        assert given[1] is parts
        assert given[3] is batch
        assert given[2].func is _seen
        assert given[2].args == (a, parts, roots, objective)
        return names

    def objective(_: Batch) -> Tensor:
        return torch.zeros(())

    roots: dict[str, object] = {}

    batch: Any = object()
    monkeypatch.setattr(parts_compared, "_found", found)
    layout = InReplicas.__new__(InReplicas)
    parts = SimpleNamespace(alone=alone)
    monkeypatch.setattr(layout, "parts", parts, raising=False)
    generators, ranks = SimpleNamespace(restored=restored), SimpleNamespace(degree=4)
    a: Any = SimpleNamespace(layout=layout, generators=generators, ranks=ranks, model=nn.Identity())
    with pytest.raises(PlanError, match="With tensor_parallel=4, Identity computes") as caught:
        refuse_unlike_parts(a, roots, objective, batch)
    message = str(caught.value)
    assert told in message
    assert ("computes other bits than" in message) == ("Mend compute_in_parts" in message) == bool(alone)
    assert ("computes something else than" in message) == ("Mend parallel_styles" in message) == (not alone)
    within.clear()
    names = []
    refuse_unlike_parts(a, roots, objective, batch)
    assert within == ["in", "out"]

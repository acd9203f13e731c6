"""What is told to differ between ranks together and one alone: not what moves by itself, nor what sums explain."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cosmati.errors import PlanError
from cosmati.train import parts_compared
from cosmati.train.parts_compared import _differing, _is_of_an_exchange, _Seen, _together, _unlike_among

BATCH: Any = None


def seen(**values: Any) -> _Seen:
    return _Seen({name: bytes([value]) for name, value in values.items()}, {}, tells=True)


class Ranks:
    """This rank, and what those of all replicas say."""

    def __init__(self, degree: int, replica: int, everyone: list[dict[str, str]]) -> None:
        self.degree, self.replica, self._everyone = degree, replica, everyone

    def told_by_all(self, own: dict[str, str]) -> list[dict[str, Any]]:
        if own.keys() == {"root"}:
            return [{"root": hashlib.sha256(repr(sorted(one.items())).encode()).hexdigest()} for one in self._everyone]
        return self._everyone


def ranks_of(replica: int, *digests: dict[str, int]) -> Any:
    told = [{name: bytes([value]).hex()[:16] for name, value in one.items()} for one in digests]
    return SimpleNamespace(ranks=Ranks(2, replica, told))


SAME, OTHER = {"a": 1, "b": 2}, {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("replica", "everyone", "unlike"),
    [
        (0, [SAME, SAME, OTHER, OTHER], set()),  # replicas have other rows
        (0, [SAME, OTHER, SAME, SAME], {"b"}),
        (1, [SAME, OTHER, SAME, SAME], set()),
        (1, [SAME, SAME, SAME, OTHER], {"b"}),
        (0, [SAME, {"a": 1}, SAME, SAME], {"b"}),
        (0, [SAME, {**SAME, "c": 5}, SAME, SAME], {"c"}),
    ],
)
def test_ranks_of_one_replica_come_to_the_same_bits(
    replica: int, everyone: list[dict[str, int]], unlike: set[str]
) -> None:
    own = everyone[2 * replica]
    assert _unlike_among(ranks_of(replica, *everyone), seen(**own)) == unlike


def differing(
    together: dict[str, int], alone: dict[str, int], again: dict[str, int], among: set[str], monkeypatch: Any
) -> tuple[set[str], int]:
    looks: list[object] = []

    def look(_batch: object, shards: object) -> _Seen:
        looks.append(shards)
        return seen(**again)

    parts: Any = SimpleNamespace(alone="alone", shards=SimpleNamespace(kinds=()))
    monkeypatch.setattr(parts_compared, "_together", lambda *_: seen(**together))
    monkeypatch.setattr(parts_compared, "_unlike_among", lambda *_: among)
    found = _differing(BATCH, parts, look, BATCH, seen(**alone))
    assert set(looks) <= {"alone"}
    return found, len(looks)


def test_what_moves_by_itself_is_no_slip(monkeypatch: pytest.MonkeyPatch) -> None:
    assert differing({"a": 1, "b": 2}, {"a": 1, "b": 2}, {}, set(), monkeypatch) == (set(), 0)
    assert differing({"a": 1, "b": 3}, {"a": 1, "b": 2}, {"a": 1, "b": 2}, set(), monkeypatch) == ({"b"}, 1)
    assert differing({"a": 1, "b": 3}, {"a": 1, "b": 2}, {"a": 1, "b": 9}, set(), monkeypatch) == (set(), 1)
    assert differing({"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 5, "b": 2}, {"a", "b"}, monkeypatch) == ({"b"}, 1)
    assert differing({"a": 3, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 2}, {"b"}, monkeypatch) == ({"a", "b"}, 1)


@pytest.mark.parametrize(("moved", "found"), [(2.0, {"the loss"}), (50.0, set())])
def test_beyond_the_order_of_sums_is_what_moved_weights_do_not_explain(
    moved: float, found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Styles have no way to compute the same alone: weights are moved a little, to see what that does."""

    def value(number: float) -> _Seen:
        tensor = torch.tensor(number)
        return _Seen({"the loss": str(number).encode()}, {"the loss": tensor}, tells=True)

    replaced: list[dict[str, Tensor]] = []

    class Layout:
        def weights(self) -> Any:
            return SimpleNamespace(map=lambda change: SimpleNamespace(tensors={"w": change(torch.ones(3))}))

        @contextmanager
        def replaced(self, tensors: dict[str, Tensor]) -> Any:
            replaced.append(tensors)
            yield

    a: Any = SimpleNamespace(layout=Layout())
    parts: Any = SimpleNamespace(alone=None, shards=SimpleNamespace(kinds=()))
    monkeypatch.setattr(parts_compared, "_together", lambda *_: value(10.0))
    monkeypatch.setattr(parts_compared, "_unlike_among", lambda *_: set())
    answers = iter([value(1.0), value(moved)])  # the same once more, and with other weights
    assert _differing(a, parts, lambda *_: next(answers), BATCH, value(1.0)) == found
    (tensors,) = replaced
    assert 0 < float((tensors["w"] - 1).abs().max()) < 1e-3


class Ends(dist.DistError):
    pass


def test_what_a_model_of_styles_fails_at_is_told_with_the_mend() -> None:
    def look(error: Exception) -> Any:
        def fails(_batch: object, _shards: object) -> _Seen:
            raise error

        return fails

    a: Any = SimpleNamespace(ranks=SimpleNamespace(degree=2), model=torch.nn.Linear(1, 1))
    styles: Any = SimpleNamespace(alone=None, shards=None)
    own: Any = SimpleNamespace(alone="alone", shards=None)
    for error, said in (
        (ValueError("no view"), r"fails: no view\. A colwise"),
        (IndexError("dot."), r"fails: dot\. A col"),
    ):
        with pytest.raises(PlanError, match=said):
            _together(a, styles, look(error), BATCH)
        with pytest.raises(type(error)):
            _together(a, own, look(error), BATCH)
    for other in (KeyError("x"), torch.OutOfMemoryError("out of memory"), Ends("gone")):
        with pytest.raises(type(other)):
            _together(a, styles, look(other), BATCH)


def test_an_error_of_a_collective_is_known_by_where_it_was_raised() -> None:
    space: dict[str, Any] = {"__name__": "torch.distributed.somewhere"}
    exec("def fails(): raise RuntimeError('peer')", space)
    for error, is_one in ((space["fails"], True), (lambda: torch.ones(2).view(3), False)):
        with pytest.raises(RuntimeError) as caught:
            error()
        assert _is_of_an_exchange(caught.value) == is_one
    assert _is_of_an_exchange(Ends("gone"))
    assert not _is_of_an_exchange(RuntimeError("never raised"))

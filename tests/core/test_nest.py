"""Batches as people's loaders give them: what holds rows is counted, cut, cleared and moved; the rest is refused."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from cosmati.core.batch import Batch, Lineage, bury, count_rows, count_rows_and_tokens, first_tensor, kind_of_input
from cosmati.core.containers import shallow_copy
from cosmati.core.nest import moved, select_rows
from cosmati.errors import BatchError

X = torch.arange(16.0).view(8, 2)
WORDS = [f"word {i}" for i in range(8)]
META = torch.device("meta")


class Encoding(UserDict[str, Any]):
    """As `transformers.BatchEncoding`: a mapping whose entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


class Pair(NamedTuple):
    text: list[str]
    x: Tensor


@dataclass
class Computed:
    x: Tensor
    text: list[str]
    total: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.total = self.x.sum()


@dataclass
class Scaled:
    x: Tensor
    kind: str = field(init=False, default="scaled")

    def __post_init__(self) -> None:
        self.x = self.x / 2


class Wrapped(MutableMapping[str, Any]):
    """Keeps its items in a dictionary of its own, or in an object's of its own."""

    def __init__(self, *, within: bool = False, **items: Any) -> None:
        self.held: Any = Wrapped(**items) if within else items

    def __getitem__(self, name: str) -> Any:
        return self.held[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.held[name] = value

    def __delitem__(self, name: str) -> None:
        del self.held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class Attributes(dict[str, Any]):
    """Its names are attributes, too."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Graphs:
    """As a batch of PyTorch Geometric: it knows how many graphs it holds, and moves itself in place."""

    def __init__(self, x: Tensor, num_graphs: int) -> None:
        self.x, self.num_graphs = x, num_graphs

    def to(self, device: torch.device) -> Self:
        self.x = self.x.to(device)
        return self


class Opaque:
    def __init__(self, **own: Any) -> None:
        self.__dict__.update(own)


def _batch(data: Any, num_rows: int = 8) -> Batch:
    return Batch(data, Lineage.of_rows(0, num_rows))


def test_collated_strings_are_cut_with_their_rows() -> None:
    """PyTorch's own collation gives strings as a tuple within a list, or a list within a dictionary."""
    pairs = default_collate([(X[i], WORDS[i]) for i in range(8)])
    named = default_collate([{"text": WORDS[i], "x": X[i]} for i in range(8)])
    for data in (pairs, named):
        assert count_rows(data) == 8
        assert count_rows_and_tokens(data) == (8, 8)
    part = _batch(pairs).select(slice(2, 4)).data
    assert (part[0].tolist(), part[1]) == (X[2:4].tolist(), ("word 2", "word 3"))
    part = _batch(named).select(torch.tensor([5, 1])).data
    assert (part["x"].tolist(), part["text"]) == (X[[5, 1]].tolist(), ["word 5", "word 1"])
    mask = torch.arange(8) == 6
    assert _batch(named).select(mask).data["text"] == ["word 6"]


def test_everything_that_holds_rows_is_cut_and_nothing_else() -> None:
    data = {
        "name": "train",
        "epoch": 3,
        "words": np.array(WORDS),
        "numbers": np.arange(8),
        "ragged": [[1] * i for i in range(8)],
        "temperature": torch.tensor(2.0),
        "scale": np.float32(0.5),
        "classes": ["cat", "dog", "bird"],
        "kind": dict,
        "x": X,
        "rows": [{"id": i} for i in range(8)],
        "empty": [],
    }
    assert (count_rows(data), count_rows_and_tokens(data), kind_of_input(data)) == (8, (8, 8), "features")
    part = _batch(data).select(slice(6, 8)).data
    assert part["words"].tolist() == WORDS[6:]
    assert part["numbers"].tolist() == [6, 7]
    assert part["ragged"] == [[1] * 6, [1] * 7]
    assert part["rows"] == [{"id": 6}, {"id": 7}]
    assert part["x"].tolist() == X[6:].tolist()
    for name in ("name", "epoch", "temperature", "scale", "classes", "kind", "empty"):
        assert part[name] == data[name], name
    chosen = _batch(data).select(torch.arange(8) > 5).data
    assert (chosen["words"].tolist(), chosen["numbers"].tolist()) == (WORDS[6:], [6, 7])


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        ({"text": WORDS, "label": list(range(8))}, 8),
        (WORDS, 8),
        ((WORDS, list(range(8))), 8),
        ([tuple(WORDS), tuple(range(8))], 8),
        ([Opaque(), Opaque(), Opaque()], 3),
        (np.zeros((5, 2)), 5),
        (Graphs(torch.zeros(20, 3), 4), 4),
        ({"name": "a", "graph": Graphs(torch.zeros(20, 3), 4)}, 4),
        (Opaque(batch_size=torch.Size([6])), 6),
        (Opaque(y="a", x=X), 8),
        (Pair(WORDS, X), 8),
        (Computed(X, WORDS), 8),
    ],
)
def test_rows_are_counted_without_a_tensor_at_the_front(data: Any, rows: int) -> None:
    assert count_rows(data) == rows
    assert count_rows_and_tokens(data)[0] == rows


def test_columns_of_text_are_cut_by_row() -> None:
    """Two columns of two rows: PyTorch's collation means columns."""
    texts = (["a", "b"], ["c", "d"])
    assert select_rows(texts, slice(1, 2), 2) == (["b"], ["d"])
    assert select_rows(["a", "b", "c", "d"], slice(1, 3), 4) == ["b", "c"]


@pytest.mark.parametrize("data", [{}, {"name": "a"}, "text", Opaque(), 3, {"x": torch.tensor(1.0)}])
def test_what_cannot_be_counted_is_refused_with_the_mend(data: Any) -> None:
    with pytest.raises(BatchError, match=r"found lengths \[\] in a .*Batch\(data, Lineage\.of_rows\(0, num_rows\)\)"):
        count_rows(data)
    assert first_tensor(data) is None
    assert kind_of_input(data) is None


@pytest.mark.parametrize("data", [(X, torch.zeros(7)), {"x": X, "y": np.zeros(7)}])
def test_arrays_of_different_lengths_are_refused(data: Any) -> None:
    with pytest.raises(BatchError, match=r"found lengths \[7, 8\]"):
        count_rows(data)


@pytest.mark.parametrize("leaf", [Graphs(X, 8), memoryview(bytes(8)), range(8)])
def test_what_may_hold_rows_and_cannot_be_cut_is_refused_by_name(leaf: Any) -> None:
    for data in (leaf, (leaf, X), {"x": X, "leaf": leaf}):
        with pytest.raises(BatchError, match=rf"{type(leaf).__name__} in the batch can't be cut into rows: .*V = 1"):
            _batch(data).select(slice(0, 4))


def test_mappings_keep_their_type() -> None:
    encoded = Encoding(text=WORDS, x=X)
    part = _batch(encoded).select(slice(0, 4)).data
    assert (type(part), part.x.tolist(), part.text) == (Encoding, X[:4].tolist(), WORDS[:4])
    assert encoded.x is X, "the user's own batch stays whole"
    changed = _batch(encoded).replace(input=-X).data
    assert (type(changed), changed.x.tolist(), encoded.x is X) == (Encoding, (-X).tolist(), True)
    assert type(_batch(OrderedDict(x=X)).select(slice(0, 4)).data) is OrderedDict
    assert type(_batch(MappingProxyType({"x": X})).select(slice(0, 4)).data) is dict


@pytest.mark.parametrize("within", [False, True])
def test_what_is_done_to_a_mapping_of_ones_own_is_done_to_a_copy(within: bool) -> None:
    data = Wrapped(within=within, x=X, text=WORDS)
    parts = [_batch(data).select(rows).data for rows in (slice(0, 4), slice(4, 8))]
    assert [part["x"].tolist() for part in parts] == [X[:4].tolist(), X[4:].tolist()]
    assert {type(part) for part in parts} == {dict if within else Wrapped}
    others = [_batch(data).replace(input=-X).data, moved(data, META), shallow_copy(data)]
    others[2]["x"] = None
    assert (others[0]["x"].tolist(), others[1]["x"].device) == ((-X).tolist(), META)
    assert (data["x"] is X, data["text"] is WORDS) == (True, True)


class Refusing(Wrapped):
    """Takes nothing once it's made."""

    def __setitem__(self, name: str, value: Any) -> None:
        raise TypeError(name)


def test_a_mapping_without_arrays_or_that_takes_none_keeps_its_type() -> None:
    words = Wrapped(text="a", more={"b": 1})
    copied = shallow_copy(words)
    copied["text"] = "c"
    assert (type(copied), words["text"], copied["more"]) == (Wrapped, "a", {"b": 1})
    refusing = Refusing(x=X)
    assert type(shallow_copy(refusing)) is Refusing
    assert refusing["x"] is X


def test_a_copy_of_names_that_are_attributes_has_them_too() -> None:
    data = Attributes(x=X)
    part = _batch(data).select(slice(0, 4)).data
    assert (part.x.tolist(), part["x"].tolist(), data.x is X) == (X[:4].tolist(), X[:4].tolist(), True)


@pytest.mark.long
def test_a_dataclass_is_not_made_anew() -> None:
    """What it does when it's made was done to the whole."""
    whole = Scaled(X)
    for part in (_batch(whole).select(slice(3, 5)).data, _batch(whole).replace(input=X[3:5] / 2).data):
        assert (part.x.tolist(), part.kind) == ((X[3:5] / 2).tolist(), "scaled")
    assert moved(whole, META).x.shape == X.shape
    assert whole.x.tolist() == (X / 2).tolist()


def test_named_tuples_and_dataclasses_keep_theirs() -> None:
    pair = _batch(Pair(WORDS, X)).select(slice(3, 5)).data
    assert (type(pair), pair.text, pair.x.tolist()) == (Pair, WORDS[3:5], X[3:5].tolist())
    made = _batch(Computed(X, WORDS)).select(slice(3, 5)).data
    assert (made.text, float(made.total)) == (WORDS[3:5], float(X[3:5].sum())), "computed from what was kept"


def test_moving_takes_along_what_moves_itself() -> None:
    graphs = Graphs(X, 8)
    data = moved({"graph": graphs, "x": X, "text": WORDS, "t": torch.tensor(1.0), "n": np.ones(8)}, META)
    assert (data["graph"].x.device, data["x"].device, data["t"].device) == (META, META, META)
    assert (data["text"], graphs.x.device.type) == (WORDS, "cpu")
    packed = moved(pack_sequence([X[0], X[1][:1]]), META)
    assert (packed.data.device, packed.batch_sizes.device.type) == (META, "cpu")
    assert moved(Encoding(x=X), META).x.device == META


def test_a_buried_row_is_empty_in_every_kind_of_leaf() -> None:
    data = {
        "text": WORDS, "x": X, "n": np.arange(1, 9), "w": np.array(WORDS), "t": torch.tensor(2.0), "name": "train",
        "ids": [[i] for i in range(8)], "any": tuple(Opaque() for _ in range(8)), "classes": ["cat", "dog"],
    }  # fmt: skip
    gone = torch.arange(8) == 3
    buried = bury(_batch(data), gone).data
    assert [word == "" for word in buried["text"]] == gone.tolist()
    assert [word == "" for word in buried["w"].tolist()] == gone.tolist()
    assert [number == 0 for number in buried["n"].tolist()] == gone.tolist()
    assert [ids == [] for ids in buried["ids"]] == gone.tolist()
    assert [one is None for one in buried["any"]] == gone.tolist()
    assert (float(buried["t"]), buried["name"], buried["classes"]) == (2.0, "train", ["cat", "dog"])
    assert buried["x"][3].tolist() == [0, 0]
    assert (data["text"][3], data["n"][3]) == ("word 3", 4), "the batch itself is a value"

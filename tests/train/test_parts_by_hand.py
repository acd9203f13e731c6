"""A part of a checkpoint byte by byte: where each run lies, what its rank tells, who waits for it, how it's read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from cosmati.core.state import chunk_hashes, parameter_root, tensor_root
from cosmati.errors import CheckpointError
from cosmati.train.layout.shares import ElementRun, RunContent, SharedTensor, SharePlan
from cosmati.train.layout.span import HeldSpan
from cosmati.train.run import parts
from cosmati.train.run.parts import (
    HeldState,
    Share,
    StoredTensors,
    finish_parts,
    part_name,
    parts_written,
    read_parts,
    write_part,
)
from tests.train.hand_made import Ticks

TENSORS: dict[str, Tensor] = {
    "model/a": torch.arange(5, dtype=torch.int8),
    "model/b/c": torch.arange(6.0, dtype=torch.float64).view(2, 3),
    "state/s": torch.tensor(7, dtype=torch.int16),
    "state/z": torch.zeros(0, 2),
}
RUNS = {
    "model/a": [(1, 0, 2), (0, 2, 3), (1, 3, 5)],
    "model/b/c": [(0, 0, 4), (1, 4, 6)],
    "state/s": [(1, 0, 1)],
    "state/z": [],
}
PLAN: SharePlan = {
    key: SharedTensor(one.dtype, tuple(one.shape), [ElementRun(*run) for run in RUNS[key]], [])
    for key, one in TENSORS.items()
}


def content(rank: int) -> list[RunContent]:
    return [
        RunContent(key, run, HeldSpan.of(TENSORS[key]).content(run.start, run.stop))
        for key, one in PLAN.items()
        for run in one.runs
        if run.writer == rank
    ]


def filled(rank: int, share: Share | None = None) -> Share:
    share = share or Share()
    share.fill(PLAN, rank, content(rank))
    return share


def bytes_of(key: str, start: int, stop: int) -> bytes:
    return bytes(TENSORS[key].reshape(-1)[start:stop].numpy().tobytes())


def written(folder: Path) -> list[dict[str, Any]]:
    for rank in range(2):
        write_part(folder, rank, 2, PLAN, filled(rank))
    return [json.loads((folder / f"part-0000{rank}-of-00002.json").read_text()) for rank in range(2)]


def test_a_state_has_its_tensors_by_kind_and_by_name() -> None:
    weight, moment = HeldSpan.of(torch.ones(2)), HeldSpan(torch.zeros(3), (9,), 3)
    state = HeldState(1, {"w": weight}, {"m/w": moment}, {})
    assert state.spans == {"model/w": weight, "state/m/w": moment}
    assert list(state.tensors) == ["w", "m/w"]
    assert (state.tensors["w"], state.tensors["m/w"]) == (weight.tensor, moment.tensor)


# ------------------------------------------------------------------------------------------------------------- a share


def test_the_widest_come_first_and_then_by_name_and_place() -> None:
    share = filled(1)
    assert [(one.key, one.run.start, one.start, one.stop) for one in share.placed] == [
        ("model/b/c", 4, 0, 16),
        ("state/s", 0, 16, 18),
        ("model/a", 0, 18, 20),
        ("model/a", 3, 20, 22),
    ]
    assert share.num_bytes == 22
    placed = [bytes_of(one.key, one.run.start, one.run.stop) for one in share.placed]
    assert [bytes(share.content(one).numpy().tobytes()) for one in share.placed] == placed
    assert b"".join(map(bytes, share.pieces())) == b"".join(placed)


def test_leaves_are_hashed_in_the_order_of_names_and_not_of_bytes() -> None:
    expected = [(key, run.start, run.stop) for key in sorted(PLAN) for run in PLAN[key].runs if run.writer == 1]
    assert [key for key, *_ in expected] == ["model/a", "model/a", "model/b/c", "state/s"]
    leaves = [leaf for key, *ends in expected for leaf in chunk_hashes(HeldSpan.of(TENSORS[key]).content(*ends))]
    assert filled(1).hashes() == b"".join(leaves)


def test_a_share_of_nothing_has_no_bytes() -> None:
    share = filled(2)
    assert (share.placed, share.num_bytes, share.hashes(), list(share.pieces())) == ([], 0, b"", [])


def test_memory_grows_where_it_must_and_what_was_there_before_is_not_told() -> None:
    share = filled(1)
    memory = share._memory
    assert len(memory) == 22
    filled(0, share)
    assert len(memory) > share.num_bytes == 33 or share._memory is not memory
    larger = share._memory
    assert [one.stop - one.start for one in share.placed] == [32, 1]
    filled(1, share)
    assert share._memory is larger
    assert (share.num_bytes, len(b"".join(map(bytes, share.pieces())))) == (22, 22)
    filled(0, share)
    assert share._memory is larger, "as long as before"


@pytest.mark.parametrize(("size", "lengths"), [(10, [10, 10, 2]), (11, [11, 11]), (22, [22]), (23, [22])])
def test_a_part_is_written_in_pieces(monkeypatch: pytest.MonkeyPatch, size: int, lengths: list[int]) -> None:
    share = filled(1)
    whole = b"".join(map(bytes, share.pieces()))
    monkeypatch.setattr(parts, "_WRITTEN_BYTES", size)
    pieces = [bytes(piece) for piece in share.pieces()]
    assert [len(piece) for piece in pieces] == lengths
    assert b"".join(pieces) == whole


# -------------------------------------------------------------------------------------------------------------- a part


def test_a_part_is_a_safetensors_file_with_what_its_rank_tells_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "draft"
    write_part(folder, 1, 2, PLAN, filled(1))
    path = folder / "part-00001-of-00002.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    assert json.loads(raw[8 : 8 + length]) == {
        "model/b/c@4": {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]},
        "state/s@0": {"dtype": "I16", "shape": [1], "data_offsets": [16, 18]},
        "model/a@0": {"dtype": "I8", "shape": [2], "data_offsets": [18, 20]},
        "model/a@3": {"dtype": "I8", "shape": [2], "data_offsets": [20, 22]},
    }
    assert len(raw[8 : 8 + length].rstrip(b" ")) > length - 8, "no longer than it has to be"
    assert raw[8 + length :] == b"".join(map(bytes, filled(1).pieces()))
    with safe_open(path, framework="pt") as file:
        assert file.get_tensor("model/b/c@4").tolist() == [4, 5]
    assert json.loads(path.with_suffix(".json").read_text()) == {
        "sha256": hashlib.sha256(raw).hexdigest(),
        "bytes": len(raw),
        "chunks": filled(1).hashes().hex(),
    }


def test_a_part_is_durable_before_anything_is_told_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    monkeypatch.setattr(parts, "sync", lambda path: did.append(path.name))
    monkeypatch.setattr(parts, "replace_file", lambda path, _: did.append(path.name))
    write_part(tmp_path, 1, 2, PLAN, filled(1))
    assert did == ["part-00001-of-00002.safetensors", "part-00001-of-00002.json"]


def test_a_name_says_which_of_how_many() -> None:
    assert part_name(3, 12) == "part-00003-of-00012.safetensors"


class Patience:
    """Waits of so many moments, which pass without any; what comes meanwhile is called."""

    def __init__(self, clock: Ticks, comes: Any = None) -> None:
        self.clock, self.comes, self.waited = clock, comes, list[float]()

    def is_set(self) -> bool:
        return False

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.clock.pass_by(1.0)
        if self.comes is not None and len(self.waited) == 2:
            self.comes()


def test_what_is_late_is_waited_for_until_patience_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticks()
    monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=clock))
    write_part(tmp_path, 0, 2, PLAN, filled(0))
    late: Any = Patience(clock)
    with pytest.raises(CheckpointError, match=rf"^Rank 1's part of the checkpoint isn't in {tmp_path}, and was waited"):
        parts_written(tmp_path, 2, 3.0, late)
    assert late.waited == [parts._PAUSE_SECONDS] * 4, "at 0, 1, 2 and 3 s"
    comes: Any = Patience(clock, lambda: write_part(tmp_path, 1, 2, PLAN, filled(1)))
    found = parts_written(tmp_path, 2, 3.0, comes)
    assert len(comes.waited) == 2
    assert [one["bytes"] for one in found] == [(tmp_path / part_name(rank, 2)).stat().st_size for rank in range(2)]
    assert [one["chunks"] for one in found] == [filled(rank).hashes().hex() for rank in range(2)]


def test_a_part_of_another_length_is_no_part(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / part_name(1, 2)
    path.write_bytes(path.read_bytes() + b"1")
    with pytest.raises(CheckpointError, match=rf"^{path} has another length here than rank 1 has written"):
        parts_written(tmp_path, 2, 0.0, Patience(Ticks()))  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------- the index


def test_the_index_says_where_each_element_is(tmp_path: Path) -> None:
    told = written(tmp_path)
    roots, digests = finish_parts(tmp_path, PLAN, told)
    index = json.loads((tmp_path / "index.json").read_text())
    assert len(index.pop("parameter_root")) == 64
    assert index == {
        "version": 1,
        "world": 2,
        "tensors": {
            key: {
                "dtype": str(one.dtype).removeprefix("torch."),
                "shape": list(one.shape),
                "runs": [list(run) for run in RUNS[key]],
            }
            for key, one in TENSORS.items()
        },
    }
    names = [part_name(rank, 2) for rank in range(2)]
    assert digests == {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in names}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", *names]
    assert list(roots) == list(TENSORS)


def test_roots_are_those_of_whole_tensors(tmp_path: Path) -> None:
    plan = {
        key: SharedTensor(one.dtype, tuple(one.shape), [ElementRun(number % 2, 0, one.numel())], [])
        for number, (key, one) in enumerate(TENSORS.items())
    }
    for rank in range(2):
        share, own = Share(), [(key, run) for key, one in plan.items() for run in one.runs if run.writer == rank]
        share.fill(plan, rank, [RunContent(k, run, HeldSpan.of(TENSORS[k]).content(0, run.stop)) for k, run in own])
        write_part(tmp_path, rank, 2, plan, share)
    roots, _ = finish_parts(tmp_path, plan, parts_written(tmp_path, 2, 0.0, Event()))
    named = {key: (key.partition("/")[2], one) for key, one in TENSORS.items()}
    assert roots == {key: tensor_root(*one) for key, one in named.items()}
    weights = dict(one for key, one in named.items() if key.startswith("model/"))
    assert json.loads((tmp_path / "index.json").read_text())["parameter_root"] == parameter_root(weights).hex()


def test_tensors_are_put_together_of_all_parts(tmp_path: Path) -> None:
    finish_parts(tmp_path, PLAN, written(tmp_path))
    model, state = read_parts(tmp_path)
    assert (list(model), list(state), len(model), len(state)) == (["a", "b/c"], ["s", "z"], 2, 2)
    for kind, found in (("model", model), ("state", state)):
        for name, one in found.items():
            assert torch.equal(one, TENSORS[f"{kind}/{name}"]), name
            assert one.dtype == TENSORS[f"{kind}/{name}"].dtype, name


@pytest.mark.parametrize(
    ("key", "told", "why"),
    [
        ("model/a", {"runs": [[1, 0, 2], [0, 2, 3]]}, "where each element of model/a is"),
        ("model/a", {"runs": [[0, 2, 3], [1, 3, 5]]}, "where each element of model/a is"),
        ("model/a", {"runs": [[1, 0, 2], [1, 3, 5]]}, "where each element of model/a is"),
        ("model/a", {"shape": [6]}, "where each element of model/a is"),
        ("model/a", {"dtype": "uint8"}, "model/a isn't in part 1 as"),
        ("model/a", {"dtype": "float7"}, "model/a isn't in part 1 as"),
        ("state/s", {"runs": [[0, 0, 1]]}, "state/s@0"),
        ("model/b/c", {"runs": [[0, 0, 3], [1, 3, 6]]}, "model/b/c isn't in part 0 as"),
    ],
)
def test_an_index_that_leaves_elements_out_is_refused(tmp_path: Path, key: str, told: dict[str, Any], why: str) -> None:
    finish_parts(tmp_path, PLAN, written(tmp_path))
    index = json.loads((tmp_path / "index.json").read_text())
    index["tensors"][key] |= told
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(Exception, match=why):
        read_parts(tmp_path)


def test_another_version_is_another_release_s(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(json.dumps({"version": 2}))
    with pytest.raises(ValueError, match="its parts are of version 2, and this release knows 1"):
        read_parts(tmp_path)


def test_a_kind_has_its_own_tensors_only() -> None:
    tensors = {"model/w": {"runs": [], "shape": [0], "dtype": "float32"}, "models/w": {}, "state/w": {}}
    found = StoredTensors("model", tensors, [])
    assert list(found) == ["w"]
    assert found["w"].shape == (0,)

"""Checkpoints in parts, on disk and off: who writes what, what is read again, and who else reads them."""

from __future__ import annotations

import itertools
import json
import math
import os
import weakref
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

from cosmati.audit.weights import check_weights, named_weights
from cosmati.cli.main import app
from cosmati.core import state as core_state
from cosmati.core.loss import Classification
from cosmati.core.state import chunk_hashes, parameter_root
from cosmati.data.in_memory import InMemory
from cosmati.errors import CheckpointError
from cosmati.explorer.compared_run import _weights
from cosmati.integrations.replay import _checkpoints
from cosmati.ledger.query import VerifiedLedger
from cosmati.methods import EMA
from cosmati.optim import AdamW
from cosmati.train.config import RunConfig
from cosmati.train.layout import shares
from cosmati.train.layout.shares import Held, RunContent, SharePlan, roots_of, share_out
from cosmati.train.layout.span import HeldSpan, parameter_in
from cosmati.train.run import checkpoints
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.run.parts import DTYPES, Share, part_name, parts_written
from cosmati.train.trainer import Trainer
from cosmati.train.warm_start import load_weights
from tests.train.in_parts import planned, put_into_parts, write_in_parts
from tests.train.test_checkpoint_files import _checkpoint

CHUNK = 16


@st.composite
def held_states(draw: st.DrawFn) -> tuple[int, dict[str, Tensor], dict[str, list[Held]]]:
    """Tensors that ranks hold whole, in pieces that are cut anywhere, or alone."""
    world = draw(st.integers(1, 4))
    tensors: dict[str, Tensor] = {}
    holders: dict[str, list[Held]] = {}
    for index in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.uint8]))
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=2)))
        key, size = f"model/{index}", math.prod(shape)
        tensors[key] = torch.randn(shape, dtype=torch.float64).mul(9).to(dtype)
        kind = draw(st.sampled_from(["all", "cut", "one"]))
        if kind == "all":
            holders[key] = [Held(rank, 0, size) for rank in range(world)]
        elif kind == "one":
            holders[key] = [Held(draw(st.integers(0, world - 1)), 0, size)]
        else:
            cuts = sorted(draw(st.integers(0, size)) for _ in range(world - 1))
            holders[key] = [Held(rank, *ends) for rank, ends in enumerate(itertools.pairwise([0, *cuts, size]))]
    return world, tensors, holders


def travelled(plan: SharePlan, tensors: dict[str, Tensor], holders: dict[str, list[Held]], rank: int) -> bytes:
    """Return the hashes of a rank's chunks, made of nothing but what it holds and is sent."""
    found = b""
    for key, one in plan.items():
        known = torch.zeros(tensors[key].numel(), dtype=torch.int64)
        for held in holders[key]:
            if held.rank == rank:
                known[held.start : held.stop] += 1
        for move in one.moves:
            source = next(held for held in holders[key] if held.rank == move.source)
            assert source.start <= move.start < move.stop <= source.stop, "sent by who has it"
            if move.writer == rank:
                known[move.start : move.stop] += 1
        for run in one.runs:
            if run.writer == rank:
                assert known[run.start : run.stop].eq(1).all(), "each element is there once"
                found += b"".join(chunk_hashes(HeldSpan.of(tensors[key]).content(run.start, run.stop)))
    return found


@given(held_states())
def test_whole_chunks_go_to_who_holds_them(given: tuple[int, dict[str, Tensor], dict[str, list[Held]]]) -> None:
    world, tensors, holders = given
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_state, "CHUNK_BYTES", CHUNK)
        patch.setattr(shares, "CHUNK_BYTES", CHUNK)
        plan = share_out({key: (one.dtype, tuple(one.shape), holders[key]) for key, one in tensors.items()}, world)
        for key, one in plan.items():
            length = CHUNK // one.dtype.itemsize
            assert [run.start for run in one.runs] == [0, *(run.stop for run in one.runs[:-1])]
            assert one.runs[-1].stop == tensors[key].numel()
            assert all(run.start % length == 0 for run in one.runs)
            for run in one.runs:
                own = [held for held in holders[key] if held.rank == run.writer]
                assert own, "only who holds some of a chunk writes it"
            if all((held.start, held.stop) == (0, tensors[key].numel()) for held in holders[key]):
                assert one.moves == [], "what all hold isn't sent"
        roots = roots_of(plan, [travelled(plan, tensors, holders, rank) for rank in range(world)])
        named = {key.removeprefix("model/"): one for key, one in tensors.items()}
        assert shares.root_over(roots, roots) == parameter_root(named)


def test_what_all_ranks_hold_is_dealt_out_evenly_in_long_runs() -> None:
    size = (40 << 20) // 4
    plan = share_out({"model/w": (torch.float32, (size,), [Held(rank, 0, size) for rank in range(4)])}, 4)
    assert [(run.writer, run.stop - run.start) for run in plan["model/w"].runs] == [(r, size // 4) for r in range(4)]


def test_who_holds_more_by_itself_is_given_less_of_the_rest() -> None:
    own, rest = (12 << 20), (12 << 20)
    plan = share_out(
        {
            "model/a": (torch.uint8, (rest,), [Held(rank, 0, rest) for rank in range(3)]),
            "state/b": (torch.uint8, (own,), [Held(1, 0, own)]),
        },
        3,
    )
    loads = [sum(r.stop - r.start for one in plan.values() for r in one.runs if r.writer == rank) for rank in range(3)]
    assert loads[1] == own
    assert abs(loads[0] - loads[2]) <= 1 << 20


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
def test_what_a_rank_holds_alone_counts_by_its_bytes_wherever_it_stands_in_its_tensor(dtype: torch.dtype) -> None:
    own, rest = ((num << 20) // dtype.itemsize for num in (4, 12))
    held = {"model/a": [Held(rank, 0, rest) for rank in range(2)], "state/b": [Held(0, 0, own)]}
    plan = share_out({key: (dtype, (spans[0].stop,), spans) for key, spans in held.items()}, 2)
    written = [(r.writer, one.num_bytes(r.stop - r.start)) for one in plan.values() for r in one.runs]
    assert [sum(size for writer, size in written if writer == rank) for rank in range(2)] == [8 << 20, 8 << 20]


@given(st.lists(st.integers(0, 40), max_size=12))
def test_what_travels_at_once_is_bounded(sizes: list[int]) -> None:
    """Each batch is as long as it can be: what comes next wouldn't fit, or is larger than all that may travel."""
    moves = {f"model/{n:02}": [shares.Move(0, 1, 0, size)] if size else [] for n, size in enumerate(sizes)}
    plan = {key: shares.SharedTensor(torch.uint8, (40,), [], own) for key, own in moves.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "_BATCH_BYTES", 50)
        batches = list(shares._batches(plan))
    assert [key for batch in batches for key in batch] == list(plan)
    found = [[sum(move.stop for move in moves[key]) for key in batch] for batch in batches]
    assert all(batches)
    assert all(sum(batch) <= 50 for batch in found)
    assert all(sum(batch) + after[0] > 50 for batch, after in itertools.pairwise(found))


def test_the_longest_name_in_a_key_is_meant() -> None:
    assert parameter_in("average/a/b", {"a", "a/b", "b"}) == "a/b"
    assert parameter_in("num_updates", {"a"}) is None


# ------------------------------------------------------------------------------------------------------------- on disk


@pytest.mark.parametrize("world", [1, 3])
def test_what_is_read_is_what_ranks_have_written(tmp_path: Path, world: int) -> None:
    written = _checkpoint()
    assert write_in_parts(tmp_path, written, world) == written.roots
    folder = tmp_path / "step-00000003"
    read = read_checkpoint(folder)
    assert (read.step, read.facts, read.roots) == (3, written.facts, written.roots)
    for name in ("model", "state"):
        before, after = getattr(written, name), getattr(read, name)
        assert set(before) == set(after)
        assert all(torch.equal(one, after[key]) and one.dtype == after[key].dtype for key, one in before.items())
    names = [part_name(rank, world) for rank in range(world)]
    assert sorted(path.name for path in folder.iterdir()) == ["digests.json", "index.json", *names, "state.json"]
    for name in names:
        length = int.from_bytes((folder / name).read_bytes()[:8], "little")
        header = json.loads((folder / name).read_bytes()[8 : 8 + length])
        assert length % 8 == 0
        assert all(told["data_offsets"][0] % DTYPES[told["dtype"]].itemsize == 0 for told in header.values()), "aligned"
    # Any reader of safetensors gets at the elements.
    flat = {key: value for name in names for key, value in load_file(folder / name).items()}
    assert torch.equal(flat["model/turned@0"], written.model["turned"].flatten())


def test_what_observers_keep_is_in_the_file_and_no_part_of_the_digest(tmp_path: Path) -> None:
    plain = _checkpoint()
    watched = replace(plain, state={**plain.state, "observer/seen": torch.ones(2)})
    assert write_in_parts(tmp_path, watched, 2) == watched.roots == plain.roots
    assert read_checkpoint(tmp_path / "step-00000003").state["observer/seen"].tolist() == [1, 1]


def test_memory_of_a_share_is_used_again() -> None:
    tensors = {"model/w": torch.arange(6.0), "model/b": torch.ones(2, dtype=torch.int8)}
    plan, share = planned(tensors, 1), Share()
    memory = []
    for _ in range(2):
        parts = [
            RunContent(key, run, HeldSpan.of(tensors[key]).content(run.start, run.stop))
            for key, one in plan.items()
            for run in one.runs
        ]
        share.fill(plan, 0, parts)
        assert b"".join(map(bytes, share.pieces())) == tensors["model/w"].numpy().tobytes() + b"\1\1"
        memory.append(share._memory)
        tensors["model/w"] = tensors["model/w"] + 1
    assert memory[0] is memory[1]


def test_a_part_is_on_disk_before_its_rank_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink().name) or fsync(fd))
    write_in_parts(tmp_path, _checkpoint(), 2)
    for rank in range(2):
        name = part_name(rank, 2)
        assert synced.index(name) < synced.index(name.replace("safetensors", "json.tmp"))
    assert {"index.json", "state.json", "digests.json"} <= set(synced)
    assert synced[-2:] == [".draft-00000003", tmp_path.name]


def test_tensors_are_read_one_by_one_and_none_is_kept(tmp_path: Path) -> None:
    """So a rank that takes its part of each never holds all."""
    write_in_parts(tmp_path, _checkpoint(), 2)
    read = read_checkpoint(tmp_path / "step-00000003")
    (tmp_path / "step-00000003").rename(tmp_path / "gone")
    told = [weakref.ref(one) for one in (*read.model.values(), *read.state.values())]
    assert len(told) == len(read.model) + len(read.state) > 20
    assert [one for one in told[:-1] if one() is not None] == []
    with pytest.raises(KeyError):
        read.model["nothing"]


def _index(folder: Path, change: Any) -> None:
    told = json.loads((folder / "index.json").read_text())
    change(told)
    (folder / "index.json").write_text(json.dumps(told))
    (folder / "digests.json").write_text(json.dumps(checkpoints._digests(folder)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda told: told["tensors"]["model/turned"]["runs"].clear(), "where each element of model/turned is"),
        (lambda told: told["tensors"]["model/turned"]["runs"][0].__setitem__(1, 1), "where each element"),
        (lambda told: told["tensors"]["model/turned"].update(shape=[7]), "where each element"),
        (lambda told: told["tensors"]["model/turned"].update(dtype="float64"), "isn't in part"),
        (lambda told: told["tensors"]["model/turned"].update(dtype="complex128"), "isn't in part"),
        (lambda told: told["tensors"]["model/turned"].update(dtype="nonsense"), "isn't in part"),
        (lambda told: told["tensors"]["model/turned"].update(runs=[[7, 0, 6]]), "can't be read"),
        (lambda told: told["tensors"]["model/turned"].update(runs=3), "can't be read"),
        (lambda told: told.update(version=2), "of version 2"),
        (lambda told: told.update(world=3), "can't be read"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, change: Any, why: str) -> None:
    write_in_parts(tmp_path, _checkpoint(), 2)
    folder = tmp_path / "step-00000003"
    _index(folder, lambda told: None)
    read_checkpoint(folder)
    _index(folder, change)
    with pytest.raises(CheckpointError, match=why):
        read_checkpoint(folder)


@pytest.mark.parametrize("name", ["part-00001-of-00002.safetensors", "index.json", "state.json"])
def test_a_damaged_or_missing_part_is_found(tmp_path: Path, name: str) -> None:
    write_in_parts(tmp_path, _checkpoint(), 2)
    path = tmp_path / "step-00000003" / name
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"damaged: {name}"):
        read_checkpoint(path.parent)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"damaged: {name}"):
        read_checkpoint(path.parent)


def test_a_rank_whose_part_is_not_seen_is_named(tmp_path: Path) -> None:
    (tmp_path / "part-00000-of-00002.safetensors").write_bytes(b"12345")
    (tmp_path / "part-00000-of-00002.json").write_text(json.dumps({"bytes": 5}))
    with pytest.raises(CheckpointError, match=r"Rank 1's part .* All ranks have to see one run folder"):
        parts_written(tmp_path, 2, 0.05, Event())
    abandoned = Event()
    abandoned.set()
    with pytest.raises(CheckpointError, match="Rank 1's part"):
        parts_written(tmp_path, 2, 600.0, abandoned)
    (tmp_path / "part-00000-of-00002.json").write_text(json.dumps({"bytes": 6}))
    with pytest.raises(CheckpointError, match="another length here than rank 0 has written"):
        parts_written(tmp_path, 2, 0.05, Event())


# ------------------------------------------------------------------------------------------------------ other readers


def make_trainer(folder: Path, budget: str = "3ba", **settings: Any) -> Trainer:
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(32, 3, generator=generator), torch.randint(2, (32,), generator=generator)
    torch.manual_seed(0)
    return Trainer(
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)),
        Classification(2),
        InMemory(data, 8),
        optimizers=AdamW(lr=1e-2),
        methods=[EMA(half_life="3ba")],
        config=RunConfig(**{"budget": budget, "num_threads": 1, "run_folder": folder, "ledger": True, **settings}),
    )


@pytest.mark.long
def test_a_run_goes_on_from_parts_and_others_read_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_trainer(run).fit()
    before = read_checkpoint(list_checkpoints(run / "checkpoints")[0])
    newest = put_into_parts(list_checkpoints(run / "checkpoints")[0])
    root = parameter_root(before.model)

    assert named_weights(run, run / "ledger") == newest == named_weights(newest, run / "ledger")
    found = check_weights(VerifiedLedger(run / "ledger"), newest)
    assert (found.step, found.root) == (3, root)

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert load_weights(model, run) == {"run": "run", "step": 3, "root": root.hex()} == load_weights(model, newest)
    assert parameter_root(dict(model.state_dict())) == root

    told = CliRunner().invoke(app, ["export", str(run), "--to", "safetensors", "--out", str(tmp_path / "out")])
    assert told.exit_code == 0, told.output
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == before.model.keys()

    assert _weights(run)[0]["roots of checkpoints in parts"] == {3: root.hex()}
    assert dict(_checkpoints(run))[newest] == f"merkle:{root.hex()}"

    make_trainer(run, "5ba", change=("budget",)).fit()
    make_trainer(tmp_path / "whole", "5ba").fit()
    last, whole = (read_checkpoint(list_checkpoints(one / "checkpoints")[0]) for one in (run, tmp_path / "whole"))
    assert last.step == 5
    assert last.state_digest == whole.state_digest


def test_weights_in_parts_of_another_step_are_not_taken_for_these(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_trainer(run, checkpoint_every="2ba").fit()
    newest = put_into_parts(list_checkpoints(run / "checkpoints")[0])
    other = newest.rename(newest.with_name("step-00000002-other")).rename(newest.with_name("step-00000009"))
    with pytest.raises(Exception, match="its folder's name says another number"):
        check_weights(VerifiedLedger(run / "ledger"), other)

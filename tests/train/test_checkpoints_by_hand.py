"""What a checkpoint signs, which tensors and names it takes, and which one is gone on from, each worked out by hand."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from cosmati.core.state import parameter_root, tensor_root
from cosmati.errors import CheckpointError
from cosmati.train.layout.span import HeldSpan
from cosmati.train.run import checkpoints
from cosmati.train.run.checkpoints import (
    Checkpoint,
    choose_checkpoint,
    draft_folder,
    finish_checkpoint,
    is_step_name,
    list_checkpoints,
    not_written,
    publish_checkpoint,
    read_checkpoint,
    roots_over,
    signed_digest_of,
    step_of,
    unsavable,
    weights_in,
    whole,
    write_checkpoint,
)
from cosmati.train.run.parts import HeldState
from tests.train.in_parts import write_in_parts


def simple(step: int, model: dict[str, Tensor] | None = None, state: dict[str, Tensor] | None = None) -> Checkpoint:
    return Checkpoint(step, model or {"w": torch.full((2,), float(step))}, state or {}, {"about": step})


def saved(folder: Path, step: int) -> Path:
    return publish_checkpoint(write_checkpoint(folder, simple(step)), keep=9)


def damaged(folder: Path, step: int) -> Path:
    path = saved(folder, step)
    (path / "state.json").write_text("{}")
    return path


# ------------------------------------------------------------------------------------------------------------ digests


def signed_by_hand(root: bytes, told: dict[str, Any]) -> bytes:
    return hashlib.sha256(root + json.dumps(told, sort_keys=True).encode()).digest()


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({}, {"clock": []}),
        ({"clock": [1, 2, 3, 4, 5, 6.5]}, {"clock": [1, 2, 3, 4, 5]}),
        ({"feed": None, "seconds": 3}, {"feed": None, "clock": []}),
        ({"phases": [1], "identity": {"b": 1, "a": 2}}, {"identity": {"a": 2, "b": 1}, "phases": [1], "clock": []}),
        ({"budget_use_is_told": True}, {"clock": []}),
        ({"budget_use_is_told": False}, {"budget_use_is_told": False, "clock": []}),
    ],
)
def test_the_signed_digest_is_of_the_root_and_of_these_facts(facts: dict[str, Any], told: dict[str, Any]) -> None:
    assert signed_digest_of(b"root", facts) == signed_by_hand(b"root", told)


def test_roots_are_of_weights_and_of_all_but_what_observers_keep() -> None:
    model, state = {"a": torch.ones(2), "b": torch.zeros(3)}, {"m": torch.ones(1), "observer/n": torch.ones(4)}
    made = Checkpoint(1, model, state, {"clock": [1]})
    everything = parameter_root({**model, "m": state["m"]})
    assert made.roots == (signed_by_hand(everything, {"clock": [1]}), everything, parameter_root(model))
    assert (made.signed_digest, made.state_digest) == made.roots[:2]
    keys = {f"model/{name}": tensor_root(name, one) for name, one in model.items()}
    keys |= {f"state/{name}": tensor_root(name, one) for name, one in state.items()}
    assert roots_over(keys, {"clock": [1]}) == made.roots


def test_who_holds_all_has_a_whole_checkpoint() -> None:
    weight, moment = torch.ones(2), torch.zeros(3)
    held = HeldState(4, {"w": HeldSpan.of(weight)}, {"m": HeldSpan.of(moment)}, {"about": "it"})
    made = whole(held)
    for one in (held, made):
        with pytest.raises(dataclasses.FrozenInstanceError):
            one.step = 5  # type: ignore[misc]
    assert (made.step, made.facts) == (4, {"about": "it"})
    assert (made.model["w"], made.state["m"]) == (weight, moment)
    assert (list(made.model), list(made.state)) == (["w"], ["m"])


# ------------------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.ones(2, dtype=torch.complex128), "torch.complex128"),
        (torch.ones(2, 2).to_sparse(), "torch.sparse_coo"),
    ],
)
def test_what_no_file_holds_is_named(tmp_path: Path, tensor: Tensor, kind: str) -> None:
    for given in ({"model": {"odd": tensor}}, {"state": {"odd": tensor}}):
        with pytest.raises(CheckpointError, match=r"^The checkpoint of step 3 can't be written. odd \(") as caught:
            write_checkpoint(tmp_path, simple(3, **given))
        assert f"odd ({kind}): safetensors has no such type." in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_five_are_named_in_the_order_of_their_names() -> None:
    odd, fine = torch.ones(1, dtype=torch.complex128), torch.ones(1)
    assert unsavable({}) == unsavable({"a": fine, "b": fine.to(torch.complex64)}) == ""
    told = unsavable({**dict.fromkeys("gfedcb", odd), "a": fine})
    assert told.startswith(", ".join(f"{name} (torch.complex128)" for name in "bcdef") + ": safetensors")


def test_tensors_are_written_without_what_they_are_a_view_of() -> None:
    large = torch.arange(6.0).view(2, 3)
    lazy = torch.tensor([1 + 2j])
    given = {
        "own": large,
        "row": large[1],
        "turned": large.t(),
        "repeated": torch.ones(1).expand(3),
        "conjugate": lazy.conj(),
        "negative": lazy.conj().imag,
        "learns": torch.ones(1, requires_grad=True),
    }
    found = checkpoints._in_own_memory(given)
    assert list(found) == list(given)
    for name, one in found.items():
        assert torch.equal(one, given[name]), name
        assert one.is_contiguous(), name
        assert one.untyped_storage().nbytes() == one.nbytes, name
        assert (one.requires_grad, one.is_conj(), one.is_neg()) == (False, False, False), name
    assert found["own"].data_ptr() == large.data_ptr(), "what has its own memory isn't copied"


def test_only_what_no_rank_has_synced_is_hashed_and_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(checkpoints, "sync", synced.append)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_text("x")
    (tmp_path / "part").write_text("y")
    checkpoints._seal(tmp_path, 7, {"about": "it"}, {"part": "told"})
    assert json.loads((tmp_path / "state.json").read_text()) == {"step": 7, "about": "it"}
    listed = json.loads((tmp_path / "digests.json").read_text())
    assert listed.pop("part") == "told"
    assert listed == {
        name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("below/file", "state.json")
    }
    own = {tmp_path / name for name in ("below", "below/file", "state.json", "digests.json")}
    assert set(synced) == own | {tmp_path}
    assert synced[-1] == tmp_path, "the folder comes last"


def test_torch_s_own_refusal_is_told_like_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise CheckpointException("no space", {})

    monkeypatch.setattr(state_dict_saver, "save", refuses)
    with pytest.raises(
        CheckpointError, match=r"checkpoint of step 3 couldn't be written to .*CheckpointException"
    ) as caught:
        write_checkpoint(tmp_path, simple(3, state={"m": torch.ones(1)}))
    assert isinstance(caught.value.__cause__, OSError)
    assert list(tmp_path.iterdir()) == []


def test_who_writes_and_reads_asks_no_other_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    save, load = state_dict_saver.save, state_dict_loader.load
    monkeypatch.setattr(state_dict_saver, "save", lambda *a, **more: given.append(more["no_dist"]) or save(*a, **more))
    monkeypatch.setattr(state_dict_loader, "load", lambda *a, **more: given.append(more["no_dist"]) or load(*a, **more))
    made = simple(3, state={"m": torch.ones(1)})
    assert read_checkpoint(publish_checkpoint(write_checkpoint(tmp_path, made), keep=1)).state["m"].tolist() == [1]
    assert given == [True, True]


def test_parts_make_one_checkpoint_with_its_facts_and_digests(tmp_path: Path) -> None:
    made = Checkpoint(3, {"w": torch.ones(2)}, {"m": torch.ones(3)}, {"clock": [3], "feed": "it"})
    assert write_in_parts(tmp_path, made, 2) == made.roots
    found = read_checkpoint(tmp_path / "step-00000003")
    assert (found.step, found.facts, found.roots) == (3, made.facts, made.roots)


def test_a_refusal_says_where_and_what_to_do(tmp_path: Path) -> None:
    text = str(not_written(3, tmp_path, OSError("full")))
    assert text.startswith(f"The checkpoint of step 3 couldn't be written to {tmp_path}: full. Free space")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=rf"of step 9 couldn't be written to {tmp_path / 'file'}: ") as caught:
        finish_checkpoint(tmp_path / "file" / ".draft", 9, {}, {}, 0, 0.0, Event())
    assert isinstance(caught.value.__cause__, OSError)


def test_a_draft_has_the_step_and_its_writer_s_number() -> None:
    assert draft_folder(Path("a"), 12, None) == Path("a/.draft-00000012")
    assert draft_folder(Path("a"), 123456789, 0) == Path("a/.draft-123456789-0")


def test_a_draft_of_a_writer_is_published_under_its_step(tmp_path: Path) -> None:
    draft = write_checkpoint(tmp_path, simple(12), epoch=3)
    assert draft == tmp_path / ".draft-00000012-3"
    assert publish_checkpoint(draft, keep=1).name == "step-00000012"
    assert not (tmp_path / "step-00000012" / "state").is_file()


# --------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "is_one", "step"),
    [
        ("step-00000012", True, 12),
        ("step-123456789", True, 123456789),
        ("step-0000012", False, 0),
        ("step-00000012.bak", False, 12),
        ("damaged-1-step-00000012", False, 12),
        (".draft-00000012-3", False, 12),
        ("notes", False, 0),
    ],
)
def test_a_name_says_the_step(name: str, *, is_one: bool, step: int) -> None:
    assert is_step_name(name) is is_one
    assert step_of(Path("00000099") / name) == step


def test_weights_are_in_a_file_or_in_parts(tmp_path: Path) -> None:
    assert weights_in(tmp_path) == tmp_path / "model.safetensors"
    (tmp_path / "index.json").touch()
    assert weights_in(tmp_path) == tmp_path


# -------------------------------------------------------------------------------------------------- which one is chosen


def test_without_a_checkpoint_the_run_begins(tmp_path: Path) -> None:
    for which in ("newest", "whole"):
        assert choose_checkpoint(tmp_path / "none", which, may_move=True) is None


def test_the_newest_is_chosen_and_older_damage_is_nobody_s_concern(tmp_path: Path) -> None:
    damaged(tmp_path, 1)
    saved(tmp_path, 2)
    for which in ("newest", "whole"):
        found = choose_checkpoint(tmp_path, which, may_move=True)
        assert found is not None
        assert found.step == 2
    assert len(list_checkpoints(tmp_path)) == 2


def test_a_damaged_newest_is_told_with_the_newest_that_is_whole(tmp_path: Path) -> None:
    for step in (1, 2):
        saved(tmp_path, step)
    for step in (3, 4):
        damaged(tmp_path, step)
    with pytest.raises(CheckpointError) as caught:
        choose_checkpoint(tmp_path, "newest", may_move=True)
    text = str(caught.value)
    assert text.startswith(f"Checkpoint {tmp_path / 'step-00000004'} is damaged: state.json don't match digests.json.")
    assert text.endswith(" Step 2 is whole: RunConfig(resume_from='whole') goes on from it.")
    assert len(list_checkpoints(tmp_path)) == 4


def test_where_none_is_whole_the_run_can_not_go_on(tmp_path: Path) -> None:
    for step in (3, 4):
        damaged(tmp_path, step)
    for which in ("newest", "whole"):
        with pytest.raises(CheckpointError, match=r"step-00000004 is damaged.* No checkpoint before it is whole"):
            choose_checkpoint(tmp_path, which, may_move=True)
    assert len(list_checkpoints(tmp_path)) == 2


def test_damaged_ones_are_set_aside_by_who_may_each_under_a_name_of_its_own(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    for attempt in (1, 2):
        for step in (2, 3):
            damaged(tmp_path, step)
        found = choose_checkpoint(tmp_path, "whole", may_move=False)
        assert found is not None
        assert found.step == 1
        assert len(list_checkpoints(tmp_path)) == 3
        choose_checkpoint(tmp_path, "whole", may_move=True)
        aside = {path.name for path in tmp_path.iterdir()} - {"step-00000001"}
        assert aside == {f"damaged-{n}-step-0000000{step}" for n in range(1, attempt + 1) for step in (2, 3)}


def test_each_file_that_is_not_as_it_was_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    (path / "state.json").write_text("{}")
    (path / "a new one").touch()
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"damaged: a new one, model\.safetensors, state\.json don't match"):
        read_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"Checkpoint .*none can't be read: .*No such file") as caught:
        read_checkpoint(tmp_path / "none")
    assert isinstance(caught.value.__cause__, OSError)

"""Faults that `test_faults.py` doesn't cover: damaged files, full disks, NaN in a governed run, unknown classes."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cosmati.core.batch import Data
from cosmati.core.loss import Classification, Loss
from cosmati.data.in_memory import InMemory
from cosmati.errors import (
    CheckpointError,
    CosmatiError,
    DataError,
    DivergenceError,
    LedgerError,
    PlanError,
    PolicyError,
    RunError,
)
from cosmati.ledger.verify import verify_ledger
from cosmati.models.mlp import MLP
from cosmati.optim import AdamW
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import load_policy
from cosmati.train.config import RunConfig
from cosmati.train.ranks import Ranks
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.trainer import Trainer

pytestmark = pytest.mark.long

LOSS = Classification(3)
STEPS = 10
TAXONOMY = Taxonomy("t", "1", (("open", "free to learn from"), ("doubtful", "only near the output")))
POLICY = """
version: 1
taxonomy: t
regions:
  near_input: {params: ["layers.0.*"]}
  near_output: {params: "*", exclude: ["layers.0.*"]}
rules:
  - {class: open, weight: 1}
  - {class: doubtful, region: near_input, weight: 0}
  - {class: doubtful, region: near_output, weight: 1}
"""


def _rows(num: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(num, 4, generator=generator), torch.randint(3, (num,), generator=generator)


def _source(names: tuple[str, ...] = ("open", "doubtful"), rows_per_step: int = 16) -> InMemory:
    return InMemory(_rows(), rows_per_step, class_ids=torch.arange(64) % 2, class_names=names)


def _governed(folder: Path | None = None, loss: Any = LOSS, *, policy: str = POLICY, **given: Any) -> Trainer:
    """Return a governed run with a ledger and a checkpoint every third step."""
    torch.manual_seed(0)
    config = RunConfig(
        budget=f"{STEPS}ba", num_microbatches=4, num_threads=1, run_folder=folder, checkpoint_every="3ba"
    )
    ingredients = {"data": _source(), "policy": load_policy(policy), "taxonomy": TAXONOMY} | given
    return Trainer(MLP((4, 8, 3)), loss, optimizers=[AdamW(lr=0.01)], config=config, **ingredients)


def _plain(folder: Path | None, width: int = 8, **options: Any) -> Trainer:
    torch.manual_seed(0)
    config = RunConfig(
        **{"budget": f"{STEPS}ba", "num_threads": 1, "run_folder": folder, "checkpoint_every": "3ba"} | options
    )
    return Trainer(MLP((4, width, 3)), LOSS, InMemory(_rows(), 16), optimizers=[AdamW(lr=0.01)], config=config)


def _weights(model: nn.Module) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[float]]:
    """What the governed run ends with when nothing goes wrong."""
    trainer = _governed()
    trainer.fit()
    return _weights(trainer.model)


# ------------------------------------------------------------------------------------------------ damaged checkpoints


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a governed run."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    _governed(folder).fit()
    return folder


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_checkpoint_holds_these_files(finished: Path) -> None:
    """What the next tests damage is all there is."""
    names = [name for name in _files(list_checkpoints(finished / "checkpoints")[0]) if not name.startswith("state/")]
    assert names == ["digests.json", "model.safetensors", "state.json"]
    assert any(name.startswith("state/") for name in _files(list_checkpoints(finished / "checkpoints")[0]))


@given(place=st.integers(0, 1 << 30), flip=st.integers(1, 255), which=st.integers(0, 1 << 10))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_byte_of_any_file_changed_is_found(
    finished: Path, tmp_path: Path, place: int, flip: int, which: int
) -> None:
    whole = list_checkpoints(finished / "checkpoints")[0]
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(whole, copy)
    names = _files(copy)
    file = copy / names[which % len(names)]
    content = bytearray(file.read_bytes())
    content[place % len(content)] ^= flip
    file.write_bytes(content)
    try:
        found = read_checkpoint(copy)
    except CheckpointError as error:
        assert str(copy) in str(error)  # noqa: PT017
    else:
        # White space between the names of digests.json means nothing.
        assert file.name == "digests.json"
        assert found.state_digest == read_checkpoint(whole).state_digest


@pytest.mark.parametrize("damage", ["missing", "empty", "foreign"])
@pytest.mark.parametrize("name", ["digests.json", "model.safetensors", "state.json", "state/"])
def test_files_missing_empty_or_foreign_are_found(finished: Path, tmp_path: Path, name: str, damage: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(list_checkpoints(finished / "checkpoints")[0], copy)
    file = copy / next(found for found in _files(copy) if found.startswith(name))
    if damage == "missing":
        file.unlink()
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        file.with_name("another" + file.suffix).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match=r"is damaged|can't be read"):
        read_checkpoint(copy)


def test_without_the_damaged_one_the_run_goes_on_from_the_one_before(
    tmp_path: Path, finished: Path, expected: dict[str, list[float]]
) -> None:
    folder = tmp_path / finished.name
    shutil.copytree(finished, folder)
    last = list_checkpoints(folder / "checkpoints")[0]
    file = next((last / "state").iterdir())
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match=rf"state/{file.name} don't match"):
        _governed(folder).fit()
    shutil.rmtree(last)
    again = _governed(folder)
    assert again.fit().outcome == "completed"
    assert _weights(again.model) == expected
    report = verify_ledger(folder / "ledger")
    assert (report.num_steps, report.diverged_steps, report.has_ended) == (STEPS, (), True)


def test_another_model_is_not_filled_from_the_checkpoint(tmp_path: Path) -> None:
    _plain(tmp_path).fit()
    with pytest.raises(CheckpointError, match="of another run: model modules"):
        _plain(tmp_path, width=9).fit()


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_another_salt_of_the_rows_is_refused(tmp_path: Path, finished: Path, damage: str) -> None:
    """Entry 0 commits to the salt: rows of later steps couldn't be opened with another one."""
    folder = tmp_path / finished.name
    shutil.copytree(finished, folder)
    shutil.rmtree(list_checkpoints(folder / "checkpoints")[0])
    salt = folder / "private" / "rows.salt"
    if damage == "changed":
        salt.write_bytes(bytes(32))
    else:
        salt.unlink()
    with pytest.raises(LedgerError, match="salt"):
        _governed(folder).fit()


# -------------------------------------------------------------------------------------------------------- a full disk


@contextmanager
def full_beyond(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond so many bytes."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def _fails_and_goes_on(folder: Path, limit: int, error: type[CosmatiError], match: str, **options: Any) -> None:
    """Let a run fail on a full disk, then end it with room, and compare with a run that always had room."""
    with full_beyond(limit), pytest.raises(error, match=match):
        _plain(folder, **options).fit()
    again, whole = _plain(folder, **options), _plain(None, **options)
    assert again.fit().outcome == whole.fit().outcome == "completed"
    assert _weights(again.model) == _weights(whole.model)


def test_weights_that_the_disk_has_no_room_for(tmp_path: Path) -> None:
    _fails_and_goes_on(tmp_path / "run", 20_000, CheckpointError, "Free space", width=1000)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.startswith(".")] == []


def test_optimizer_state_that_the_disk_has_no_room_for(tmp_path: Path) -> None:
    """AdamW's two averages are twice the weights."""
    _fails_and_goes_on(tmp_path / "run", 45_000, CheckpointError, "Free space", width=1000)


@pytest.mark.parametrize("limit", [500, 4500])
def test_a_record_or_a_log_that_the_disk_has_no_room_for(tmp_path: Path, limit: int) -> None:
    """run.json has about 2 kB; steps.jsonl outgrows 4,500 bytes, and the small checkpoints don't."""
    _fails_and_goes_on(tmp_path / "run", limit, RunError, "space", budget="900ba", checkpoint_every=None, width=2)


# ------------------------------------------------------------------------------------------------------ unknown names


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("class: open", "class: opne", "no class 'opne'"),
        ("region: near_input", "region: near_inptu", "no region 'near_inptu'"),
        ('"layers.0.*"]', '"layer.0.*"]', r"region 'near_input' \(line 5\) is empty"),
        ("taxonomy: t", "taxonomy: u", "for taxonomy 'u', and this is 't'"),
    ],
)
def test_a_policy_that_names_what_is_not_there(old: str, new: str, match: str) -> None:
    with pytest.raises(PolicyError, match=match):
        _governed(policy=POLICY.replace(old, new))


def test_a_policy_without_a_taxonomy() -> None:
    with pytest.raises(PlanError, match=r"give the taxonomy too"):
        _governed(taxonomy=None)


def test_a_source_whose_class_the_taxonomy_lacks() -> None:
    with pytest.raises(PlanError, match=r"lacks: unheard/of\. It has doubtful, open"):
        _governed(data=_source(("open", "unheard/of")))


def test_a_policy_over_rows_without_classes() -> None:
    with pytest.raises(PlanError, match="needs rows with classes, and list has none"):
        _governed(data=[_rows(16)])


# --------------------------------------------------------------------------------------------------------- divergence


class FailsAt:
    """A loss that isn't finite from one call on."""

    def __init__(self, call: int, value: float) -> None:
        self._left, self._value = call, value

    def __call__(self, model: nn.Module, data: Data) -> Loss:
        # Without gradients it's a checkpoint's fixed microbatch.
        self._left -= torch.is_grad_enabled()
        loss = LOSS(model, data)
        return loss if self._left >= 0 else Loss(loss.sum * self._value, loss.weight, loss.per_row)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_loss_that_is_not_finite_leaves_no_entry(
    tmp_path: Path, expected: dict[str, list[float]], value: float
) -> None:
    """One of the four microbatches is enough; the ledger ends with the step before, and a mended run goes on."""
    with pytest.raises(DivergenceError, match=f"{value} at step 7 and isn't committed"):
        _governed(tmp_path, FailsAt(7 * 4 + 2, value)).fit()
    assert json.loads((tmp_path / "run.json").read_text())["outcome"] == "diverged"
    report = verify_ledger(tmp_path / "ledger")
    assert (report.num_steps, report.has_ended) == (7, False)
    assert read_checkpoint(list_checkpoints(tmp_path / "checkpoints")[0]).step == 6
    again = _governed(tmp_path, FailsAt(10**9, value))
    assert again.fit().outcome == "completed"
    assert _weights(again.model) == expected
    report = verify_ledger(tmp_path / "ledger")
    assert (report.num_steps, report.num_superseded, report.diverged_steps) == (STEPS, 1, ())
    assert report.has_ended


@pytest.mark.parametrize(
    "num_microbatches",
    [
        pytest.param(
            1,
        ),
        2,
    ],
)
def test_a_loss_that_is_not_finite_leaves_buffers_alone(num_microbatches: int) -> None:
    """`step` says that nothing of that step is kept, and somebody may catch the error and go on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    config = RunConfig(num_microbatches=num_microbatches, num_threads=1)
    rows, targets = _rows(16)
    with Trainer(model, LOSS, optimizers=[AdamW(lr=0.01)], config=config) as trainer:
        trainer.step((rows, targets))
        before = _weights(model)
        with pytest.raises(DivergenceError):
            trainer.step((rows.masked_fill(rows > 1, torch.nan), targets))
        assert _weights(model) == before


# -------------------------------------------------------------------------------------------------- V and the batches


def test_fit_names_the_batch_that_v_does_not_divide() -> None:
    """A loader's last batch is smaller than the others: the steps before it are taken, and it is refused by name."""
    loader = DataLoader(TensorDataset(*_rows(18)), batch_size=8)
    config = RunConfig(budget="3ba", num_microbatches=4, num_threads=1)
    trainer = Trainer(MLP((4, 3)), LOSS, loader, optimizers=[AdamW(lr=0.01)], config=config)
    with pytest.raises(PlanError, match=r"2 rows can't be split into V = 4 .*drop_last=True"):
        trainer.fit()
    assert trainer.clock.step == 2


def test_a_source_that_v_does_not_divide() -> None:
    with pytest.raises(DataError, match=r"18 rows a step can't be split into V = 4 .*Use a multiple of 4 \(16 or 20 r"):
        _governed(data=_source(rows_per_step=18))
    with pytest.raises(DataError, match=r"or RunConfig\(num_microbatches=2\)"):
        _governed(data=_source(rows_per_step=18))
    with pytest.raises(DataError, match=r"Use a multiple of 4 \(4 rows a step\)\.$"):
        _governed(data=_source(rows_per_step=3))


@pytest.mark.parametrize("number", [0, 3, 12, -4])
def test_v_is_a_power_of_two(number: int) -> None:
    with pytest.raises(PlanError, match=f"V = {number} microbatches is not a power of two"):
        RunConfig(num_microbatches=number)


def test_ranks_that_v_does_not_divide() -> None:
    ranks = Ranks()
    ranks.world = 3
    with pytest.raises(PlanError, match="3 ranks can't share V = 4 microbatches"):
        ranks.mine(4)

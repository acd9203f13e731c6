"""torchrun as it is: a script that says nothing of ranks trains on several, to the bits of one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from cosmati.ledger.verify import verify_ledger
from cosmati.records.run import RunRecord
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from tests.processes import PythonProcess, launch_ranks, run_python

pytestmark = pytest.mark.long

# Every rank inherits it.
STRICT = {**os.environ, "PYTHONWARNINGS": "error"}
# The launcher is a fork with PyTorch loaded. Its workers are processes of their own.
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
RECIPE = """
import torch
from cosmati import Classification, InMemory, RunConfig
from cosmati.models.mlp import MLP
from cosmati.optim import SGD
from cosmati.recipes.recipe import Recipe


def model():
    return MLP((6, 8, 3))


def data():
    generator = torch.Generator().manual_seed(1)
    return InMemory((torch.randn(64, 6, generator=generator), torch.randint(3, (64,), generator=generator)), 16)


def recipe():
    config = RunConfig(budget="12ba", num_microbatches=4, num_threads=1)
    optimizers = (SGD(lr=0.1),)
    return Recipe(name="small", model=model, loss=Classification(3), data=data, optimizers=optimizers, config=config)
"""


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(read_checkpoint(list_checkpoints(folder / "checkpoints")[0]).model)


@pytest.mark.timeout(300)
def test_torchrun_gives_the_bits_of_one_rank(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(RECIPE)
    alone, together = tmp_path / "alone", tmp_path / "together"
    train = ["-m", "cosmati", "train", str(tmp_path / "small.py"), "--run-folder"]
    first = run_python([*train, alone])
    assert first.returncode == 0, first.stderr
    done = run_python([*TORCHRUN, *train, together], env=STRICT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("small: completed after 12 steps") == 1
    one, two = _weights(alone), _weights(together)
    assert one.keys() == two.keys()
    assert all(torch.equal(value, two[name]) for name, value in one.items())


PER_RANK = """
import os, sys, torch
from pathlib import Path
from cosmati import Classification, InMemory, RunConfig, Trainer
from cosmati.methods.ema import EMA
from cosmati.models.mlp import MLP
from cosmati.optim import AdamW

generator = torch.Generator().manual_seed(1)
data = InMemory((torch.randn(64, 6, generator=generator), torch.randint(3, (64,), generator=generator)), 16)
torch.manual_seed(int(os.environ.get("RANK", 0)))  # as many scripts do
config = RunConfig(budget="4ba", num_microbatches=4, num_threads=1, run_folder=Path(sys.argv[1]), ledger=True)
methods = [EMA(half_life="2ba")]
trainer = Trainer(MLP((6, 8, 3)), Classification(3), data, optimizers=[AdamW(lr=0.01)], methods=methods, config=config)
assert trainer.fit().outcome == "completed"
assert trainer.plan.holds("elastic")
"""


@pytest.mark.timeout(300)
def test_weights_that_each_rank_has_drawn_for_itself_are_the_first_ones(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PER_RANK)
    alone = run_python([tmp_path / "script.py", tmp_path / "alone"])
    assert alone.returncode == 0, alone.stderr
    launch_ranks([tmp_path / "script.py", tmp_path / "together"], 2)
    digests = [
        read_checkpoint(list_checkpoints(tmp_path / name / "checkpoints")[0]).state_digest
        for name in ("alone", "together")
    ]
    assert digests[0] == digests[1]


@pytest.mark.timeout(300)
def test_ranks_that_are_given_different_runs_are_refused(tmp_path: Path) -> None:
    by_rank = PER_RANK.replace("AdamW(lr=0.01)", 'AdamW(lr=0.01 * (1 + int(os.environ["RANK"])))')
    (tmp_path / "script.py").write_text(by_rank)
    with pytest.raises(AssertionError, match="The ranks have been given different runs"):
        launch_ranks([tmp_path / "script.py", tmp_path / "run"], 2)


OWN_NUMBERS = PER_RANK.replace("Trainer(MLP((6, 8, 3)),", "Trainer(Noisy((6, 8, 3)),").replace(
    'assert trainer.plan.holds("elastic")', "print(trainer.plan)"
)
NOISY = """
class Noisy(MLP):
    def __init__(self, sizes):
        super().__init__(sizes)
        self._scale, self._rank = NUMBER, int(os.environ.get("RANK", 0))

    def forward(self, x):
        return super().forward(x) * self._scale

generator = """


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "is_withdrawn"), [("float(torch.rand(()))", True), ("0.5", False)])
def test_numbers_that_each_rank_has_drawn_for_itself_withdraw_what_is_promised_of_ranks(
    tmp_path: Path, number: str, is_withdrawn: bool
) -> None:
    script = OWN_NUMBERS.replace("generator = ", NOISY.replace("NUMBER", number), 1)
    (tmp_path / "script.py").write_text(script)
    said = launch_ranks([tmp_path / "script.py", tmp_path / "run"], 2)
    assert ("ranks began with unlike values of _scale" in said[0]) is is_withdrawn


SHORT = """
import os, sys, torch
from pathlib import Path
from cosmati import Classification, InMemory, RunConfig, Trainer
from cosmati.models.mlp import MLP
from cosmati.optim import AdamW

WORLD, RANK = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0)))


class Short(Classification):
    num_calls = 0

    def __call__(self, model, data):
        # The last rank alone has no room, from its second microbatch of step 3 on.
        if torch.is_grad_enabled() and RANK == WORLD - 1:
            type(self).num_calls += 1
            if type(self).num_calls > 3 * 4 // WORLD + 1 and len(data[0]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().__call__(model, data)


generator = torch.Generator().manual_seed(1)
data = InMemory((torch.randn(64, 6, generator=generator), torch.randint(3, (64,), generator=generator)), 16)
torch.manual_seed(0)
config = RunConfig(budget="6ba", num_microbatches=4, num_threads=1, run_folder=Path(sys.argv[1]), ledger=True)
trainer = Trainer(MLP((6, 8, 3)), Short(3), data, optimizers=[AdamW(lr=0.01)], config=config)
trainer.fit()
assert trainer.cuts.made == [(3, 2)], trainer.cuts.made
"""


@pytest.mark.timeout(300)
def test_memory_that_is_short_on_one_rank_cuts_on_all(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SHORT)
    alone, together = tmp_path / "alone", tmp_path / "together"
    done = run_python([tmp_path / "script.py", alone])
    assert done.returncode == 0, done.stderr
    launch_ranks([tmp_path / "script.py", together], 2, PYTHONWARNINGS="")  # each rank warns
    one, two = _weights(alone), _weights(together)
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    for folder in (alone, together):
        assert (verify_ledger(folder / "ledger").num_steps, (folder / "cuts.json").read_text()) == (6, "[[3, 2]]")


@pytest.mark.timeout(300)
def test_stopping_as_asked_restarts_nothing(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(RECIPE.replace("12ba", "100000ba"))
    folder = tmp_path / "run"
    train = ["--max-restarts", "3", "-m", "cosmati", "train", str(tmp_path / "small.py"), "--run-folder", str(folder)]
    process = PythonProcess([*TORCHRUN, *train])
    with process:
        until = time.monotonic() + 200
        while not (folder / "steps.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.1)
        # As a scheduler does it: to the workers, which the launcher watches.
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        workers = [int(child) for child in children if b"cosmati" in Path(f"/proc/{child}/cmdline").read_bytes()]
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGTERM)
        text, errors = process.communicate(timeout=200)
    assert process.returncode == 0, text + errors
    assert text.count("small: stopped after") == 1
    assert RunRecord.from_json((folder / "run.json").read_text()).outcome == "stopped"

"""Ray as it is: a cluster of nodes on this machine, one of which is killed, and one of which comes."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cosmati
from cosmati.errors import RunError
from cosmati.launch.ray import train_on_ray
from cosmati.ledger.verify import verify_ledger
from cosmati.records.attempts import read_attempts
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),  # Ray's own, of files that it leaves open
]
ROOT = Path(cosmati.__file__).parents[1]


def train_in(folder: Path, pause: float, num_steps: int = 60) -> None:
    import torch

    from cosmati import Classification, InMemory, RunConfig, Trainer
    from cosmati.models.mlp import MLP
    from cosmati.optim import AdamW

    class Slow(Classification):
        def __call__(self, model: Any, data: Any) -> Any:
            time.sleep(pause)
            return super().__call__(model, data)

    generator = torch.Generator().manual_seed(1)
    data = InMemory((torch.randn(64, 6, generator=generator), torch.randint(3, (64,), generator=generator)), 16)
    torch.manual_seed(0)
    config = RunConfig(
        budget=f"{num_steps}ba",
        num_microbatches=4,
        num_threads=1,
        run_folder=folder,
        ledger=True,
        checkpoint_every="5ba",
    )
    Trainer(MLP((6, 8, 3)), Slow(3), data, optimizers=[AdamW(lr=0.01)], config=config).fit()


def result_of(run: Path) -> tuple[bytes, int]:
    last = read_checkpoint(list_checkpoints(run / "checkpoints")[0])
    return last.state_digest, verify_ledger(run / "ledger").num_steps


@pytest.fixture
def cluster() -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    paths = os.pathsep.join([str(ROOT), str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        ray.init(address=cluster.address, runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}})
        yield cluster, nodes
    finally:
        ray.shutdown()
        cluster.shutdown()


def _step_of(run: Path) -> int:
    path = run / "steps.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def _wait(is_so: Callable[[], bool], seconds: float = 150.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.2)


def test_a_node_that_is_killed_and_one_that_comes_cost_no_bit(cluster: Any, tmp_path: Path) -> None:
    own, nodes = cluster
    run, alone = tmp_path / "run", tmp_path / "alone"
    train_in(alone, 0.0, 300)
    worlds = tmp_path / "worlds"

    def train() -> None:
        import torch.distributed as dist

        if dist.get_rank() == 0:
            with worlds.open("a") as file:
                file.write(f"{dist.get_world_size()}\n")
        train_in(run, 0.1, 300)

    training = threading.Thread(
        target=lambda: train_on_ray(train, run_folder=run, num_workers=2, look_seconds=5.0), daemon=True
    )
    training.start()
    _wait(lambda: _step_of(run) >= 20)
    own.remove_node(nodes[0], allow_graceful=False)
    killed = time.monotonic()
    _wait(lambda: len(worlds.read_text().split()) == 2)
    sys.stdout.write(f"begun again {time.monotonic() - killed:.0f} s after a node was killed\n")
    step = _step_of(run)
    _wait(lambda: _step_of(run) > step)
    own.add_node(num_cpus=1)  # from the main thread: Ray listens to signals
    training.join(200.0)
    assert not training.is_alive()
    assert worlds.read_text().split() == ["2", "1", "2"]
    assert result_of(run) == result_of(alone)
    assert len(read_attempts(run)) == 3


def test_workers_that_do_not_divide_the_most_idle(cluster: Any, tmp_path: Path) -> None:
    own, _ = cluster
    own.add_node(num_cpus=1)  # three, of four
    run, alone = tmp_path / "run", tmp_path / "alone"
    train_in(alone, 0.0)
    worlds = tmp_path / "worlds"

    def train() -> None:
        import torch.distributed as dist

        with worlds.open("a") as file:
            file.write(f"{dist.get_world_size()}\n")
        train_in(run, 0.0)

    train_on_ray(train, run_folder=run, num_workers=4)
    assert worlds.read_text().split() == ["2", "2"]
    assert result_of(run) == result_of(alone)


def test_an_error_of_the_function_is_raised(cluster: Any, tmp_path: Path) -> None:
    def train() -> None:
        raise ValueError("no such thing")

    with pytest.raises(RunError, match="no such thing"):
        train_on_ray(train, run_folder=tmp_path, num_workers=1, max_failures=0)


@pytest.mark.parametrize(("fewest", "most"), [(0, 2), (3, 2)])
def test_a_range_that_is_none_is_refused(tmp_path: Path, fewest: int, most: int) -> None:
    with pytest.raises(RunError, match="is no range"):
        train_on_ray(print, run_folder=tmp_path, num_workers=most, fewest_workers=fewest)


def test_a_run_folder_of_nowhere_in_particular_is_refused() -> None:
    with pytest.raises(RunError, match="isn't absolute"):
        train_on_ray(print, run_folder=Path("run"), num_workers=1)

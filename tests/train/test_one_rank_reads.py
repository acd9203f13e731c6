"""One rank writes and reads a checkpoint by itself, while the others do something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import launch_ranks

SCRIPT = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from cosmati.train.run.checkpoints import Checkpoint, publish_checkpoint, read_checkpoint, write_checkpoint

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    state = {"a/b": torch.arange(3), "c": torch.ones(2, 2)}
    draft = write_checkpoint(Path(sys.argv[1]), Checkpoint(3, {"w": torch.zeros(2)}, state, {"clock": [3]}))
    read = read_checkpoint(publish_checkpoint(draft, keep=1))
    print({name: tensor.tolist() for name, tensor in sorted(read.state.items())})
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_rank_that_reads_alone_waits_for_nobody(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    said = launch_ranks([tmp_path / "script.py", tmp_path / "checkpoints"], 2)
    assert said[0].strip() == "{'a/b': [0, 1, 2], 'c': [[1.0, 1.0], [1.0, 1.0]]}"

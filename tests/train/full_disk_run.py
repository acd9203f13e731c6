"""A governed run on a disk that fills up: `python full_disk_run.py FOLDER LIMIT_BYTES` (0: no limit)."""

import resource
import signal
import sys
from pathlib import Path

import torch

from cosmati import Classification, InMemory, RunConfig, Trainer, load_policy, software_licences
from cosmati.models.mlp import MLP
from cosmati.optim import SGD

POLICY = """
version: 1
taxonomy: software-licences
regions:
  body: {params: 'layers.0.*'}
  head: {params: '*', exclude: ['layers.0.*']}
rules:
  - {class: '**', weight: 1}
"""


def trainer(folder: Path) -> Trainer:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    names = ("open/permissive", "open/psf")
    rows = torch.randn(96, 6, generator=generator), torch.randint(3, (96,), generator=generator)
    data = InMemory(rows, 8, class_ids=torch.arange(96) % 2, class_names=names)
    config = RunConfig(
        budget="80ba", num_microbatches=4, num_threads=1, run_folder=folder, checkpoint_every="20ba", details_every=1
    )
    return Trainer(
        MLP((6, 8, 3)),
        Classification(3),
        data,
        optimizers=[SGD(lr=0.1, momentum=0.9)],
        policy=load_policy(POLICY),
        taxonomy=software_licences(),
        config=config,
    )


if __name__ == "__main__":
    folder, limit = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    run = trainer(folder)
    if limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    run.fit()

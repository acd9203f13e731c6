"""A governed run with every method that composes, for tests that kill it: `killed_run.py FOLDER`."""

import sys
from pathlib import Path

import torch

from cosmati import Classification, Evaluation, InMemory, RunConfig, Trainer, batches, load_policy, software_licences
from cosmati.methods import (
    EMA,
    SAM,
    BlurPool,
    ChannelsLast,
    CutOut,
    GradientClipping,
    LabelSmoothing,
    LayerFreezing,
    MixUp,
    ProgressiveResizing,
    ScaleSchedule,
    SelectiveBackprop,
)
from cosmati.models.resnet import ResNet, ResNetConfig
from cosmati.optim.optimizers import AdamW, Muon, matrices

STEPS = 24
POLICY = """
version: 1
taxonomy: software-licences
regions:
  near_input: {params: ["stem*", "blocks.0.*"]}
  near_output: {params: "*", exclude: ["stem*", "blocks.0.*"]}
rules:
  - {class: "**", weight: 1}
  - {class: open/psf, region: near_input, weight: 0}
"""


def make_trainer(folder: Path) -> Trainer:
    """Return the trainer; everything follows from fixed seeds."""
    generator = torch.Generator().manual_seed(0)
    rows, targets = torch.randn(70, 1, 8, 8, generator=generator), torch.randint(0, 4, (70,), generator=generator)
    taxonomy = software_licences()
    ids = [taxonomy.id_of("open/psf"), taxonomy.id_of("open/permissive")]
    classes = torch.tensor([ids[i % 2] for i in range(70)])
    torch.manual_seed(0)
    model = ResNet(ResNetConfig(num_classes=4, in_channels=1, widths=(8, 16), blocks_per_stage=1))
    methods = [
        ScaleSchedule(ratio=0.5),
        BlurPool(min_channels=8),
        ChannelsLast(),
        SelectiveBackprop(start=0.2, end=0.9),
        ProgressiveResizing(size_increment=1),
        CutOut(length=0.25),
        MixUp(),
        LabelSmoothing(),
        LayerFreezing(freeze_start=0.5),
        SAM(interval=2),
        GradientClipping(clipping_type="norm", clipping_threshold=1.0),
        EMA(half_life="5ba"),
    ]
    config = RunConfig(
        budget=f"{2 * STEPS}ba", num_microbatches=2, run_folder=folder, checkpoint_every="3ba", num_threads=1
    )
    return Trainer(
        model,
        Classification(4),
        InMemory((rows, targets), 16, classes, taxonomy.classes, tail="pad"),
        optimizers=[Muon(lr=0.02, parameters=matrices), AdamW(lr=1e-3)],
        methods=methods,
        policy=load_policy(POLICY),
        taxonomy=taxonomy,
        evaluation=Evaluation(batches((rows, targets), 35), {"loss": Classification(4)}),
        config=config,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer = make_trainer(Path(sys.argv[1]))
    trainer.trace = lambda event: print(event, flush=True)  # noqa: T201
    outcome = trainer.fit().outcome
    print(f"outcome {outcome}", flush=True)  # noqa: T201

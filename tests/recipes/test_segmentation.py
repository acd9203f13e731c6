"""Segmentation: the metric against its definition, methods on targets of pixels, and the study of pairs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.headline import segmentation
from cosmati import methods as m
from cosmati.core.loss import Classification, MixedTarget
from cosmati.corpora.placed_items import PlacedItemsPlan
from cosmati.errors import BatchError, PlanError
from cosmati.models.unet import UNetConfig
from cosmati.recipes.segmentation import MeanIoU, SegmentationEvaluation, SegmentationRows, segmentation_unet
from cosmati.train.evaluation import accuracy

pytestmark = pytest.mark.long

torch.set_num_threads(1)
SMALL = PlacedItemsPlan(num_train=16, num_held_out=8, size=24, max_items=2)
TINY = UNetConfig(widths=(4, 6))
REFUSED = {
    m.AugMix(): "AugMix turns and moves images",
    m.CropAndFlip(): "CropAndFlip moves and mirrors",
    m.CutMix(): "CutMix mixes targets by area",
    m.ProgressiveResizing(): r"ProgressiveResizing\(resize_targets=True\)",
    m.RandAugment(): "RandAugment turns and moves images",
    m.SelectiveBackprop(start=0.0, scale_factor=0.5, interrupt=0): "Give scale_factor=1",
}
TRAINED = (
    m.BlurPool(),
    m.ChannelsLast(),
    m.ColOut(p_row=0.25, p_col=0.25),
    m.CutOut(),
    m.EMA(half_life="1ba"),
    m.GhostBatchNorm(ghost_batch_size=4),
    m.LabelSmoothing(),
    m.MixUp(),
    m.MixUp(interpolate_loss=True),
    m.ProgressiveResizing(resize_targets=True),
    m.SAM(interval=1),
    m.SelectiveBackprop(start=0.0, end=1.0, interrupt=0),
    m.SqueezeExcite(latent_channels=2, min_channels=4),
    m.WeightStandardization(),
)


def run(*methods: m.Method, num_steps: int = 2) -> tuple[dict[str, float], list[str]]:
    """Return what a run reaches, and its weights to the bit."""
    trainer = segmentation_unet(
        items="digits", num_steps=num_steps, rows_per_step=8, model=TINY, plan=SMALL, methods=methods
    ).trainer()
    metrics = dict(trainer.fit().metrics)
    return metrics, [weight.detach().double().numpy().tobytes().hex() for weight in trainer.model.parameters()]


def test_the_metric_is_its_definition() -> None:
    rng = np.random.default_rng(0)
    metric = MeanIoU(5)
    logits = torch.from_numpy(rng.normal(size=(6, 5, 4, 3)))
    logits[:, 3] = -100.0  # class 3 is neither there nor taken for
    targets = torch.from_numpy(rng.choice([0, 1, 2, 4, -100], size=(6, 4, 3)))
    for rows in (slice(0, 2), slice(2, 6)):
        metric.update(logits[rows], targets[rows])
    taken, is_counted = logits.argmax(1).numpy(), targets.numpy() != -100
    ratios = []
    for kind in (0, 1, 2, 4):
        there, guessed = (targets.numpy() == kind) & is_counted, (taken == kind) & is_counted
        ratios.append((there & guessed).sum() / (there | guessed).sum())
    assert metric.compute() == pytest.approx(np.mean(ratios), abs=1e-15)
    metric.reset()
    metric.update(F.one_hot(targets[targets >= 0][None], 5).movedim(-1, 1).double(), targets[targets >= 0][None])
    assert metric.compute() == 1.0
    with pytest.raises(BatchError, match=r"\(2, 4, 3, 3\) and targets \(2, 3, 3\)"):
        metric.update(torch.zeros(2, 4, 3, 3), torch.zeros(2, 3, 3, dtype=torch.int64))
    with pytest.raises(BatchError, match="intersection over union of 5 classes"):
        metric.update(torch.zeros(2, 5, 3, 3), torch.zeros(2, 3, dtype=torch.int64))


def test_the_loss_is_each_pixels_and_its_mixtures_agree() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 3, 5, dtype=torch.float64)
    target, other = torch.randint(4, (2, 2, 3, 5))
    target[0, 0, 0] = -100
    loss = Classification(4)
    found = loss.compare(logits, target)
    logs = logits.float().log_softmax(1)
    values = [
        -logs[n, target[n, i, j], i, j] for n in range(2) for i in range(3) for j in range(5) if target[n, i, j] >= 0
    ]
    assert float(found.sum) == pytest.approx(float(sum(values)), rel=1e-6)
    assert float(found.weight) == 29
    assert found.per_row_weight is not None
    assert found.per_row_weight.tolist() == [14, 15]
    whole = target.clamp(min=0)
    mixed = loss.compare(logits, MixedTarget(whole, other, torch.tensor(0.3)))
    soft = 0.3 * F.one_hot(whole, 4) + 0.7 * F.one_hot(other, 4)
    assert float(mixed.mean()) == pytest.approx(
        float(loss.compare(logits, soft.movedim(-1, 1).float()).mean()), rel=1e-6
    )


def test_held_out_images_are_measured_as_they_are() -> None:
    class Right(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return F.one_hot(self.targets, 11).movedim(-1, 1).float()

        targets: Tensor

    for rows in ("selection", "reported"):
        evaluation = SegmentationEvaluation(items="digits", rows=rows, plan=SMALL)()  # type: ignore[arg-type]
        (batch,) = evaluation.data
        model = Right()
        model.targets = batch[1]
        assert float(accuracy(model, batch).sum) == 8 * 24 * 24
    source = SegmentationRows(items="digits", rows_per_step=4, plan=SMALL)()
    assert (source.num_rows, source.rows_per_step) == (16, 4)
    with pytest.raises(PlanError, match="'selection'"):
        SegmentationEvaluation(items="digits", rows="test")  # type: ignore[arg-type]


def test_it_learns() -> None:
    (before, _), (after, _) = run(num_steps=1), run(num_steps=60)
    assert after["mean_iou"] > before["mean_iou"]
    assert after["pixel_accuracy"] > 2 * before["pixel_accuracy"]


@pytest.mark.parametrize("method", TRAINED, ids=str)
def test_methods_that_keep_pixels_and_targets_together_train(method: m.Method) -> None:
    metrics, weights = run(method)
    plain_metrics, plain_weights = run()
    assert 0 < metrics["mean_iou"] <= 1
    if isinstance(method, m.ChannelsLast):
        assert metrics["mean_iou"] == pytest.approx(plain_metrics["mean_iou"], rel=0.1)
    else:
        assert (metrics, weights) != (plain_metrics, plain_weights), "it does something"


@pytest.mark.parametrize("method", REFUSED, ids=lambda method: type(method).__name__)
def test_methods_that_would_part_pixels_from_targets_are_refused(method: m.Method) -> None:
    with pytest.raises(PlanError, match=REFUSED[method]):
        run(method)


@pytest.mark.slow
def test_the_study_of_pairs_runs_and_prints_interactions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = segmentation.segmentation_study("digits", SMALL)
    num_parts = len(segmentation.PARTS)
    assert len(study.arms) == 2 + num_parts + num_parts * (num_parts - 1) // 2
    assert (len(study.seeds), len(study.budgets)) == (5, 2)
    texts = [arm.recipe_text for name, arm in study.arms.items() if name != "aa"]
    assert len({text.partition('"model"')[2] for text in texts}) == len(texts)
    monkeypatch.setattr(segmentation, "FULL_STEPS", 4)
    names = ("baseline", "ema", "muon", "ema + muon")
    small = replace(
        segmentation.segmentation_study("digits", SMALL),
        arms={name: study.arms[name] for name in names},
        seeds=study.seeds[:2],
        cost_turns=2,
    )
    record = segmentation.run_segmentation(1, study=small, folder=tmp_path)
    assert len(record.runs) == 4 * 2 * 2
    printed = capsys.readouterr().out
    assert printed.count("ema + muon: ") == 2
    assert "by step, together: over the product of what each gives alone" in printed

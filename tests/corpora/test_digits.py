"""The digits: real pixels, a stratified split, and digests that don't depend on the size."""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import pytest
import torch

from cosmati.corpora.digits import PIXEL_MEAN, PIXEL_STD, load_digits_images
from cosmati.errors import DataError, MissingExtraError

datasets = pytest.importorskip("sklearn.datasets")


def test_native_images_are_the_normalised_grey_levels() -> None:
    digits = load_digits_images(8)
    source = datasets.load_digits()
    for rows in (digits.train, digits.validation):
        index = rows.row_ids.numpy()
        expected = (source.images[index].astype(np.float64) / 16 - PIXEL_MEAN) / PIXEL_STD
        np.testing.assert_allclose(rows.images[:, 0].numpy(), expected, atol=1e-6)
        assert rows.targets.tolist() == source.target[index].tolist()


def test_split_is_whole_and_stratified() -> None:
    digits = load_digits_images(8)
    ids = torch.cat([digits.train.row_ids, digits.validation.row_ids])
    assert sorted(ids.tolist()) == list(range(1797))
    held = torch.bincount(digits.validation.targets)
    total = held + torch.bincount(digits.train.targets)
    assert held.tolist() == [round(0.25 * count) for count in total.tolist()]


def test_fewer_labels_are_a_subset_with_the_same_validation() -> None:
    whole, third, tenth = (load_digits_images(8, label_fraction=fraction) for fraction in (1.0, 1 / 3, 0.1))
    assert set(tenth.train.row_ids.tolist()) < set(third.train.row_ids.tolist()) < set(whole.train.row_ids.tolist())
    assert torch.equal(tenth.validation.row_ids, whole.validation.row_ids)
    assert len(torch.bincount(tenth.train.targets)) == 10


def test_size_changes_images_only() -> None:
    small, large = load_digits_images(8), load_digits_images(32)
    assert large.train.images.shape == (len(small.train.targets), 1, 32, 32)
    assert large.train.images.dtype == torch.float32
    assert torch.equal(small.train.row_digests, large.train.row_digests)
    # The mean over 4x4 pixels of a bilinear enlargement is a local average of the native image.
    pooled = torch.nn.functional.avg_pool2d(large.train.images, 4)
    assert torch.corrcoef(torch.stack([pooled.flatten(), small.train.images.flatten()]))[0, 1] > 0.95


def test_digests_cover_pixels_and_label() -> None:
    digits = load_digits_images(16)
    source = datasets.load_digits()
    row = int(digits.validation.row_ids[3])
    content = source.images[row].astype(np.uint8).tobytes() + bytes([source.target[row]])
    assert bytes(digits.validation.row_digests[3].tolist()) == hashlib.sha256(content).digest()


def test_every_row_is_permissive() -> None:
    digits = load_digits_images(8)
    assert {digits.class_names[index] for index in digits.train.class_ids.tolist()} == {"open/permissive"}


@pytest.mark.parametrize(("size", "held", "labels"), [(0, 0.25, 1.0), (8, 0.0, 1.0), (8, 0.25, 0.0), (8, 0.25, 1e-4)])
def test_arguments_out_of_range_are_refused(size: int, held: float, labels: float) -> None:
    with pytest.raises(DataError):
        load_digits_images(size, held_out_fraction=held, label_fraction=labels)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"cosmati\[vision\]"):
        load_digits_images()

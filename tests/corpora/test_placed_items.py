"""Images of placed items: drawn again pixel by pixel, and nothing held out is trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cosmati.corpora.placed_items import PlacedItemsPlan, items_at_hand, load_placed_items, place_items
from cosmati.errors import DataError
from tests.corpora.fashion_files import write

torch.set_num_threads(1)

SMALL = PlacedItemsPlan(num_train=6, num_held_out=3, size=20, max_items=3)
LEVELS = torch.tensor([[[0.0, 0.5], [0.9, 0.1]], [[1.0, 0.0], [0.0, 0.0]]])
KINDS = torch.tensor([3, 7])


def test_each_pixel_has_the_kind_of_what_lies_there() -> None:
    plan = replace(SMALL, noise=0.0, max_items=2)
    images, targets = place_items(LEVELS, KINDS, 40, plan, "test")
    grey = (images[:, 0] * 0.4 + 0.1).double()
    kinds = {0.0: {0}, 0.5: {4}, 0.9: {4}, 1.0: {8}}
    for level, kind in kinds.items():
        there = (grey - level).abs() < 1e-6
        assert bool(there.any())
        assert set(targets[there].tolist()) == kind
    # Faint pixels (0.1) are what is behind them.
    assert not bool(((grey - 0.1).abs() < 1e-3).any())
    assert set(targets.flatten().tolist()) == {0, 4, 8}
    assert len({int((target > 0).sum()) for target in targets}) > 1


def test_an_image_follows_from_its_number_and_seed_alone() -> None:
    few, many = (place_items(LEVELS, KINDS, number, SMALL, "test") for number in (3, 6))
    assert torch.equal(few[0], many[0][:3])
    assert torch.equal(few[1], many[1][:3])
    assert len(many[0].flatten(1).unique(dim=0)) == 6
    for other in (
        place_items(LEVELS, KINDS, 3, replace(SMALL, seed=1), "test"),
        place_items(LEVELS, KINDS, 3, SMALL, "other"),
    ):
        assert not torch.equal(few[0], other[0])
    state = torch.get_rng_state()
    place_items(LEVELS, KINDS, 3, SMALL, "test")
    assert torch.equal(state, torch.get_rng_state()), "draws from no generator of others"
    noisy = replace(SMALL, noise=0.25, size=200, max_items=1)
    background = place_items(LEVELS, KINDS, 1, noisy, "test")[0] * 0.4
    assert float(background.std()) == pytest.approx(0.25, rel=0.02)


@pytest.mark.parametrize("kind", ["fashion", "digits"])
def test_parts_share_no_items_and_no_rows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "fashion":
        write(tmp_path, num_train=60, num_test=20)
    given: list[torch.Tensor] = []

    def recorded(levels: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
        given.append(levels)
        return place_items(levels, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("cosmati.corpora.placed_items.place_items", recorded)
    made = load_placed_items(kind, SMALL, folder=tmp_path)  # type: ignore[arg-type]
    assert [len(part.targets) for part in (made.train, made.selection, made.reported)] == [6, 3, 3]
    sizes = [len(levels) for levels in given]
    assert sizes == ([50, 10, 20] if kind == "fashion" else sizes)
    assert sum(sizes) == (80 if kind == "fashion" else 1797)
    flat = [set(map(bytes, levels.flatten(1).numpy())) for levels in given]
    assert not any(one & other for one in flat for other in flat if one is not other)
    parts = (made.train, made.selection, made.reported)
    assert torch.cat([part.row_ids for part in parts]).tolist() == list(range(12))
    assert made.train.images.shape == (6, 1, 20, 20)
    assert made.train.targets.shape == (6, 20, 20)
    assert made.train.targets.dtype == torch.int64
    digests = torch.cat([part.row_digests for part in parts])
    assert len(digests.unique(dim=0)) == 12
    assert {made.class_names[i] for i in made.train.class_ids.tolist()} == {"open/permissive"}


def test_what_makes_no_images_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"num_train": 0}, {"size": 13}, {"noise": -1.0}, {"max_items": 0}, {"noise": float("nan")}):
        with pytest.raises(DataError, match="makes no images"):
            PlacedItemsPlan(**options)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no items 'cats'"):
        load_placed_items("cats", SMALL)  # type: ignore[arg-type]
    monkeypatch.setattr("cosmati.corpora.placed_items.DEBIAN_FOLDER", tmp_path / "none")
    assert items_at_hand() == "digits"
    monkeypatch.setattr("cosmati.corpora.placed_items.DEBIAN_FOLDER", tmp_path)
    assert items_at_hand() == "digits"
    (tmp_path / "file").touch()
    assert items_at_hand() == "fashion"

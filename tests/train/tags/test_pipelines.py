"""Lineage against content: random pipelines over every stage, and the sources of each row and token by brute force."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cosmati.core.batch import Batch
from cosmati.data.loader import StreamingLoader
from tests.train.tags import content
from tests.train.tags.content import NUM_ROWS, class_of
from tests.train.tags.pipelines import PIPELINES, Pipeline, number_of, pipelines, trained, written

pytestmark = pytest.mark.long

BLANKS = {"CropAndFlip", "CutOut"}
"""Methods that may leave nothing of a parent's pixels."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    written(folder)
    return folder


def check(pipeline: Pipeline, shards: Path, folder: Path) -> None:
    """Run a pipeline, and compare the tags of all that was trained on with what its content shows."""
    dataset = pipeline.dataset(shards) if pipeline.road in ("streamed", "workers", "loader") else None
    batches = trained(pipeline, shards, folder)
    assert batches
    digests: dict[int, set[bytes]] = {}
    for batch in batches:
        assert len(batch.lineage.row_ids) == len(content.input_in(batch.data))
        compare = {"images": compare_images, "tokens": compare_sequences, "packs": compare_packs}[pipeline.kind]
        compare(batch, (lambda row: number_of(dataset, row)) if dataset is not None else int, pipeline)
        told = batch.lineage.digests
        for row, digest in [] if told is None else zip(batch.lineage.row_ids.tolist(), told.numpy(), strict=True):
            digests.setdefault(row, set()).add(digest.tobytes())
    # Each row has one digest, and no other row has it.
    assert all(len(found) == 1 for found in digests.values())
    assert len(set.union(set(), *digests.values())) == len(digests)


def compare_images(batch: Batch, number: Callable[[int], int], pipeline: Pipeline) -> None:
    lineage = batch.lineage
    may_be_blank = any(type(method).__name__ in BLANKS for method in pipeline.methods)
    for place, pixels in enumerate(content.input_in(batch.data)):
        found, row = content.rows_in_image(pixels), int(lineage.row_ids[place])
        if row == -1:
            assert not found
            continue
        parents = [row] if lineage.parents is None else lineage.parents[place].tolist()
        numbers = [number(parent) for parent in parents]
        assert parents[0] == row
        assert found <= {*numbers} if may_be_blank else found == {*numbers}
        own = int(lineage.class_ids[place])
        assert own == class_of(numbers[0])
        classes = [own] if lineage.parent_class_ids is None else lineage.parent_class_ids[place].tolist()
        assert classes == [class_of(one) for one in numbers]
        assert batch.class_id in (None, *classes)
        assert not pipeline.is_governed or {*classes} == {batch.class_id}


def compare_sequences(batch: Batch, number: Callable[[int], int], pipeline: Pipeline) -> None:
    lineage = batch.lineage
    for place, line in enumerate(content.rows_of_tokens(content.input_in(batch.data))):
        row = int(lineage.row_ids[place])
        assert {*line} == {-1 if row == -1 else number(row)}
        assert row == -1 or int(lineage.class_ids[place]) == class_of(line[0])
        assert not pipeline.is_governed or row == -1 or batch.class_id == class_of(line[0])


def compare_packs(batch: Batch, number: Callable[[int], int], pipeline: Pipeline) -> None:
    del number, pipeline  # Documents are numbered as the rows that they are.
    lineage = batch.lineage
    found = torch.tensor(content.rows_of_tokens(content.input_in(batch.data)))
    assert lineage.token_row_ids is not None
    assert lineage.token_class_ids is not None
    assert torch.equal(lineage.token_row_ids, found)
    assert lineage.token_class_ids.tolist() == [[class_of(n) if n >= 0 else -1 for n in row] for row in found.tolist()]
    for own, classes in zip(lineage.class_ids.tolist(), lineage.token_class_ids.tolist(), strict=True):
        assert own == -1 or {*classes} <= {own, -1}


def run(pipeline: Pipeline, shards: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check(pipeline, shards, Path(folder) / "run")


SETTINGS = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda one: f"{one.kind}, {one.road}")
def test_tags_are_what_the_content_shows(pipeline: Pipeline, shards: Path) -> None:
    run(pipeline, shards)


@pytest.mark.slow
@settings(max_examples=400, **SETTINGS | {"derandomize": False})
@given(pipeline=pipelines())
def test_tags_of_many_pipelines_are_what_the_content_shows(pipeline: Pipeline, shards: Path) -> None:
    run(pipeline, shards)


@pytest.mark.slow
@settings(max_examples=12, **SETTINGS)
@given(pipeline=pipelines(num_workers=True))
def test_tags_out_of_worker_processes_are_what_the_content_shows(pipeline: Pipeline, shards: Path) -> None:
    run(pipeline, shards)


@settings(max_examples=20, **SETTINGS)
@given(pipeline=pipelines(), worlds=st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2])), at=st.integers(0, 4))
def test_tags_on_each_rank_are_what_the_content_shows_before_and_after_a_resumption(
    pipeline: Pipeline, worlds: tuple[int, int], at: int, shards: Path
) -> None:
    """The ranks' shares of one epoch, gone on with on other ranks, hold each row once and say which it is."""
    pipeline = replace(pipeline, kind="tokens", methods=(), repeats=1.0, is_governed=False)
    dataset, state, seen = pipeline.dataset(shards), None, list[int]()
    for world, num_batches in zip(worlds, (at, 99), strict=True):
        loaders = [StreamingLoader(dataset, 8, rank=rank, world=world) for rank in range(world)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            for batch in islice(loader, num_batches):
                compare_sequences(batch, partial(number_of, dataset), pipeline)
                lines = content.rows_of_tokens(content.input_in(batch.data))
                seen += [line[0] for line in lines if line[0] != -1]
        state = loaders[0].state_dict()
    assert sorted(seen) == list(range(NUM_ROWS))

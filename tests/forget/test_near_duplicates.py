"""What is like a text or an image, against all rows compared one by one; what a sketch estimates; the commands."""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.data.ingest import read_image_folder, read_jsonl
from cosmati.data.packing import Packing, pack_rows
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.streaming import StreamingDataset
from cosmati.data.tokens import ByteTokenizer, tokenize
from cosmati.errors import DataError
from cosmati.forget.near_duplicates import (
    NUM_BINS,
    bands_for,
    difference_hash,
    jaccard,
    like_image,
    like_text,
    normalised,
    shingles,
    sketch,
)

PILLOW = pytest.importorskip("PIL.Image")

pytestmark = pytest.mark.long
NUM_ROWS = 36


def texts() -> list[str]:
    """Rows of which every third is an edit of the one before the last, more or less."""
    draw = random.Random(4)
    words = ["".join(draw.choice("abcdeé") for _ in range(draw.randint(2, 7))) for _ in range(120)]
    made: list[str] = []
    for number in range(NUM_ROWS):
        if number % 3 == 2:
            rate = draw.choice([0.0, 0.02, 0.05, 0.3])
            made.append(" ".join(draw.choice(words) if draw.random() < rate else one for one in made[-2].split()))
        else:
            made.append(" ".join(draw.choice(words) for _ in range(draw.choice([1, 3, 20, 60]))))
    return made


def written(folder: Path, rows: list[str], packing: Packing | None = None) -> StreamingDataset:
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"text": one}) for one in rows), "utf-8")
    read = read_jsonl(folder / "rows.jsonl", {"text": "str"}, class_of="open/notes")
    if packing is not None:
        read = pack_rows(tokenize(read, ByteTokenizer()), packing, class_names=("open/notes",))
    write_dataset(read, folder / "out", read.columns, class_of="open/notes", source="s", size_limit=4000)
    return StreamingDataset(folder / "out")


def by_hand(one: str, other: str) -> float:
    """Jaccard's likeness, counted shingle by shingle."""
    a, b = (" ".join(text.lower().split()) for text in (one, other))
    runs = [[text[i : i + 9] for i in range(len(text)) if i == 0 or i + 9 <= len(text)] for text in (a, b)]
    counted = Counter([*dict.fromkeys(runs[0]), *dict.fromkeys(runs[1])])
    return sum(number == 2 for number in counted.values()) / len(counted)


@pytest.mark.parametrize("packing", [None, Packing(length=150), Packing(length=2000)])
@pytest.mark.parametrize("threshold", [0.3, 0.8, 1.0])
def test_it_finds_what_comparing_all_finds(tmp_path: Path, packing: Packing | None, threshold: float) -> None:
    """Nothing too much, ever; and here, with sketches that are what they are, nothing too little."""
    rows = texts()
    dataset = written(tmp_path, rows, packing)
    found = like_text(dataset, {str(i): rows[i].upper() + "\n" for i in range(2, NUM_ROWS, 3)}, threshold=threshold)
    values = [one.similarity for likenesses in found.values() for one in likenesses]
    assert threshold == 1 or any(threshold <= value < 1 for value in values)
    for name, likenesses in found.items():
        expected = {i: by_hand(rows[int(name)], rows[i]) for i in range(NUM_ROWS)}
        got = {one.row_id if packing is None else one.document: one.similarity for one in likenesses}
        assert got == pytest.approx({i: value for i, value in expected.items() if value >= threshold})
        assert [one.similarity for one in likenesses] == sorted((one.similarity for one in likenesses), reverse=True)
        assert {one.class_path for one in likenesses} == {"open/notes"}


@settings(max_examples=30, deadline=None)
@given(st.text(min_size=1, max_size=60), st.text(max_size=12), st.integers(0, 60))
def test_likeness_is_counted_rightly(text: str, more: str, place: int) -> None:
    one, other = normalised(text), normalised(text[:place] + more + text[place:])
    if one and other:
        assert jaccard(shingles(one), shingles(other)) == pytest.approx(by_hand(one, other))
        assert np.array_equal(sketch(one), sketch(one))
        assert len(sketch(other)) == NUM_BINS


def test_a_sketch_estimates_likeness() -> None:
    """Over 150 pairs the mean error is none, and that of one is about a binomial's; short texts too."""
    draw, errors, expected = random.Random(1), [], []
    for _ in range(150):
        letters = [draw.choice("abcdefgh ") for _ in range(draw.choice([15, 60, 400]))]
        other = [draw.choice("abcdefgh ") if draw.random() < 0.03 else one for one in letters]
        one, two = normalised("".join(letters)), normalised("".join(other))
        truth = jaccard(shingles(one), shingles(two))
        errors.append(float((sketch(one) == sketch(two)).mean()) - truth)
        expected.append(truth * (1 - truth) / NUM_BINS)
    assert abs(np.mean(errors)) < 4 * np.sqrt(np.mean(expected) / 150)
    assert np.std(errors) < 1.5 * np.sqrt(np.mean(expected))


@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.5, 0.8, 0.9, 0.99, 1.0])
def test_bands_are_as_few_as_find_what_is_as_like(threshold: float) -> None:
    def recall(bands: int) -> float:
        return 1 - (1 - threshold ** (NUM_BINS / bands)) ** bands

    bands = bands_for(threshold)
    assert recall(bands) >= 0.9999 or bands == NUM_BINS
    assert bands == 2 or recall(bands // 2) < 0.9999


def picture(seed: int, size: tuple[int, int] = (90, 120)) -> Any:
    small = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), np.uint8)
    return PILLOW.fromarray(small).resize(size[::-1], PILLOW.Resampling.BICUBIC)


def saved(image: Any, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_an_image_is_found_in_another_size_and_format(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02}.png").write_bytes(saved(picture(number), "PNG"))
    rows = read_image_folder(folder, class_of="customer/photos", with_labels=False)
    write_dataset(rows, tmp_path / "out", rows.columns, class_of=rows.class_of, source="s")
    dataset = StreamingDataset(tmp_path / "out")
    for number in (3, 17):
        small = picture(number).resize((61, 47), PILLOW.Resampling.LANCZOS)
        found = like_image(dataset, {"asked": saved(small, "JPEG", quality=70)})["asked"]
        assert [(one.row_id, one.class_path) for one in found] == [(number, "customer/photos")]
    everything = like_image(dataset, {"asked": saved(picture(3), "PNG")}, threshold=0.01)["asked"]
    own = difference_hash(saved(picture(3), "PNG"))
    for one in everything:
        bits = f"{own:064b}", f"{difference_hash(saved(picture(one.row_id), 'PNG')):064b}"
        assert one.similarity == sum(a == b for a, b in zip(*bits, strict=True)) / 64


def test_the_hash_is_of_means_over_equal_parts() -> None:
    """Against each part's mean by hand, on an image that nine columns and eight rows don't divide."""
    pixels = np.random.default_rng(0).integers(0, 255, (20, 31, 3), np.uint8)
    fine = np.repeat(np.repeat(pixels.astype(float) @ [0.299, 0.587, 0.114], 8, 0), 9, 1)  # 160 x 279
    means = fine.reshape(8, 20, 9, 31).mean((1, 3))
    expected = "".join(str(int(b > a)) for row in means for a, b in pairwise(row))
    assert f"{difference_hash(pixels):064b}" == expected


def test_plain_areas_are_all_alike() -> None:
    assert difference_hash(np.full((30, 20, 3), 7, np.uint8)) == difference_hash(np.zeros((9, 9, 3), np.uint8)) == 0


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    dataset = written(tmp_path, texts()[:4])
    with pytest.raises(DataError, match="no text to look for"):
        like_text(dataset, {"a": " \n"})
    with pytest.raises(DataError, match="no column 'body'; it has"):
        like_text(dataset, {"a": "x"}, column="body")
    with pytest.raises(DataError, match="not text"):
        like_text(dataset, {"a": "x"}, column="origin_place")
    with pytest.raises(DataError, match="no column 'image'"):
        like_image(dataset, {"a": saved(picture(0), "PNG")})
    for threshold in (0.0, -1.0, 1.1, float("nan")):
        with pytest.raises(DataError, match="threshold="):
            like_text(dataset, {"a": "x"}, threshold=threshold)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["data", *map(str, arguments)])


def test_the_commands(tmp_path: Path) -> None:
    rows = texts()
    made = [{"text": text, "who": [f"p{number % 7}", "all"]} for number, text in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, made)), "utf-8")
    data, key, out = tmp_path / "out", tmp_path / "key", tmp_path / "ids"
    assert run("write", data, tmp_path / "rows.jsonl", "--class", "open/notes").exit_code == 0
    assert "would lie in the data" in run("index-subjects", data, "--field", "who", "--key", data / "key").output
    assert not (data / "key").exists()
    assert "8 subjects in 36 rows; 0 name nobody" in run("index-subjects", data, "--field", "who", "--key", key).output
    found = run("find", data, "--subject", "p3", "--key", key, "--rows-to", out)
    assert found.exit_code == 0
    assert [int(one) for one in out.read_text().split()] == list(range(3, NUM_ROWS, 7))
    assert "row 3  open/notes  " in found.output
    asked = CliRunner().invoke(app, ["data", "find", str(data), "--subject", "-", "--key", str(key)], input="p3\n")
    assert asked.output == found.output
    nobody = run("find", data, "--subject", "p8", "--key", key, "--rows-to", out)
    assert (nobody.exit_code, nobody.output, out.read_text()) == (1, "None.\n", "")
    (tmp_path / "asked.txt").write_text(rows[2])
    like = run("find", data, "--like", tmp_path / "asked.txt", "--threshold", 1, "--rows-to", out)
    same = [number for number, text in enumerate(rows) if by_hand(text, rows[2]) == 1]
    assert [int(one) for one in out.read_text().split()] == same
    assert f"1.000  row {same[0]}  open/notes" in like.output
    (tmp_path / "blob.bin").write_bytes(b"\xff\xfe\xfd")
    for arguments, words in (
        ([], "one of these"),
        (["--subject", "p3", "--like", tmp_path / "asked.txt"], "one of these"),
        (["--subject", "p3"], "give --key FILE"),
        (["--like", tmp_path / "nowhere"], "can't be read"),
        (["--like", tmp_path / "blob.bin"], "neither text in UTF-8"),
    ):
        assert words in " ".join(run("find", data, *arguments).output.split())

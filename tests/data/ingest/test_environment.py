"""What a disk, a limit or memory brings about is no bad row: it ends the reading, whatever becomes of bad rows."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cosmati.data.ingest.files import read_records
from cosmati.data.ingest.hugging_face import read_hugging_face
from cosmati.data.ingest.images import read_image_folder
from cosmati.data.ingest.jsonl import read_jsonl
from cosmati.data.ingest.rows import Reading
from cosmati.data.ingest.text import read_text
from cosmati.data.shards.remote import EnvironmentFaultError

FAILING = Path("/proc/self/mem")
"""A file that opens, and whose first bytes can't be read: the kernel says EIO."""
pytestmark = [pytest.mark.skipif(not FAILING.exists(), reason="needs Linux's /proc"), pytest.mark.long]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    (tmp_path / "cat").mkdir()
    Image.fromarray(np.zeros((6000, 6000, 3), np.uint8)).save(tmp_path / "cat" / "large.png")
    Image.fromarray(np.ones((8, 8, 3), np.uint8)).save(tmp_path / "cat" / "small.png")
    return tmp_path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.xz", "a.jsonl.zst"])
def test_a_file_that_cant_be_read_is_no_bad_row(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to(FAILING)
    rows = read_jsonl(tmp_path, {"n": "int"}, class_of="unknown", on_error="record")
    with pytest.raises(EnvironmentFaultError, match=r"a\.jsonl.*, 1: .*Input/output error.*isn't left out"):
        list(rows)
    assert not rows.skipped


def test_an_image_and_a_whole_text_that_cant_be_read_are_no_bad_rows(tmp_path: Path) -> None:
    for name in ("cat/1.png", "1.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(FAILING)
    everything: list[Any] = [
        read_image_folder(tmp_path / "cat", class_of="unknown", with_labels=False, on_error="record"),
        read_text(tmp_path, class_of="unknown", on_error="record"),
    ]
    for rows in everything:
        with pytest.raises(EnvironmentFaultError, match="Input/output error"):
            list(rows)


def limited(limit: str, images: Path) -> str:
    """Read images in a process under a limit, and return what it printed."""
    code = f"""
        import resource
        from pathlib import Path
        from cosmati.data.ingest.images import read_image_folder
        rows = read_image_folder({str(images)!r}, class_of="unknown", on_error="record")
        from PIL import Image, ImageOps, PngImagePlugin
        Image.preinit()
        {limit}
        try:
            print(len(list(rows)), rows.skipped)
        except Exception as error:
            print(type(error).__name__, error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_memory_that_runs_out_is_no_bad_image(images: Path) -> None:
    pages = "used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()"
    printed = limited(f"{pages}; resource.setrlimit(resource.RLIMIT_AS, (used + 60_000_000,) * 2)", images)
    assert "EnvironmentFaultError cat/large.png, 1:" in printed
    assert "MemoryError" in printed


def test_handles_that_run_out_are_no_bad_images(images: Path) -> None:
    printed = limited("resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))", images)
    assert "EnvironmentFaultError cat/large.png, 1:" in printed
    assert "Too many open files" in printed


def test_damage_stays_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(b"no gzip at all")
    reading = Reading("record")
    assert not list(read_records("a.gz", tmp_path / "a.gz", reading, separator=b"\n", max_bytes=100))
    assert [bad.file for bad in reading.skipped] == ["a.gz"]


def test_a_file_of_a_hugging_face_row_that_fails_is_no_bad_row_and_one_that_is_missing_is() -> None:
    datasets: Any = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image()})

    def rows(path: str) -> Any:
        made = datasets.Dataset.from_dict({"image": [{"bytes": None, "path": path}]}, features=features)
        return read_hugging_face(made, name="pictures", class_of="unknown", on_error="record")

    with pytest.raises(EnvironmentFaultError, match="Input/output error"):
        list(rows(str(FAILING)))
    missing = rows("/nowhere/at/all.png")
    assert not list(missing)
    assert len(missing.skipped) == 1

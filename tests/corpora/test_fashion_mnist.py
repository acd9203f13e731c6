"""Fashion-MNIST's files: read strictly, from a fixture written byte by byte; the real ones where they are installed."""

from __future__ import annotations

import gzip
import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch

from cosmati.corpora import fashion_mnist
from cosmati.corpora.fashion_mnist import DEBIAN_FOLDER, download_fashion_mnist, load_fashion_mnist
from cosmati.errors import DataError
from tests.corpora.fashion_files import NAMES, idx, write


def test_rows_are_the_files_bytes(tmp_path: Path) -> None:
    arrays = write(tmp_path)
    fashion = load_fashion_mnist(tmp_path)
    for part, rows, first in (("train", fashion.train, 0), ("t10k", fashion.test, 6)):
        pixels, labels = arrays[f"{part}-images-idx3-ubyte.gz"], arrays[f"{part}-labels-idx1-ubyte.gz"]
        expected = (pixels[:, None] / 255 - 0.2860) / 0.3530
        np.testing.assert_allclose(rows.images.numpy(), expected, atol=2e-6)
        assert rows.images.dtype == torch.float32
        assert rows.targets.tolist() == labels.tolist()
        assert rows.row_ids.tolist() == list(range(first, first + len(labels)))
        content = pixels[1].astype(np.uint8).tobytes() + bytes([labels[1]])
        assert bytes(rows.row_digests[1].tolist()) == hashlib.sha256(content).digest()
        assert {fashion.class_names[index] for index in rows.class_ids.tolist()} == {"open/permissive"}


def test_missing_files_say_where_they_come_from(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / NAMES[1]).unlink()
    with pytest.raises(DataError, match=r"no train-labels-idx1-ubyte.gz.*dataset-fashion-mnist.*http://fashion-mnist"):
        load_fashion_mnist(tmp_path)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (NAMES[0], lambda raw: gzip.compress(gzip.decompress(raw) + b"\0"), "holds 4705 bytes, not 4704"),
        (NAMES[0], lambda raw: gzip.compress(gzip.decompress(raw)[:-1]), "holds 4703 bytes"),
        (NAMES[0], lambda raw: raw[:-9], "no whole gzip file"),
        (NAMES[0], lambda raw: b"plain", "no whole gzip file"),
        (NAMES[1], lambda raw: gzip.compress(b"\0\0\x0d\1" + gzip.decompress(raw)[4:]), "00000d01"),
        (NAMES[1], lambda raw: gzip.compress(b"\0\0\x08\1"), "no idx file of bytes in 1"),
        (NAMES[1], lambda raw: gzip.compress(idx(np.arange(5, 11))), "label 10"),
        (NAMES[1], lambda raw: gzip.compress(idx(np.zeros(5))), "5 labels"),
        (NAMES[2], lambda raw: gzip.compress(idx(np.zeros((3, 28, 27)))), r"\(3, 28, 27\)"),
        (NAMES[2], lambda raw: gzip.compress(idx(np.zeros((2, 28, 28)))), "3 labels"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, damage: Callable[[bytes], bytes], message: str) -> None:
    write(tmp_path)
    (tmp_path / name).write_bytes(damage((tmp_path / name).read_bytes()))
    with pytest.raises(DataError, match=message):
        load_fashion_mnist(tmp_path)


def test_a_download_is_checked_and_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    write(source)
    asked: list[str] = []

    def answer(url: str, timeout: float) -> io.BytesIO:
        asked.append(url)
        return io.BytesIO((source / url.rpartition("/")[2]).read_bytes())

    monkeypatch.setattr(fashion_mnist, "urlopen", answer)
    with pytest.raises(DataError, match="SHA-256 differs"):
        download_fashion_mnist(target)
    assert list(target.iterdir()) == []
    digests = {name: hashlib.sha256(gzip.decompress((source / name).read_bytes())).hexdigest() for name in NAMES}
    monkeypatch.setattr(fashion_mnist, "_CONTENT_SHA256", digests)
    asked.clear()
    download_fashion_mnist(target)
    download_fashion_mnist(target)
    assert [url.rpartition("/")[2] for url in asked] == list(NAMES)
    assert torch.equal(load_fashion_mnist(target).train.images, load_fashion_mnist(source).train.images)


def test_no_network_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(url: str, timeout: float) -> io.BytesIO:
        raise URLError("no route to host")

    monkeypatch.setattr(fashion_mnist, "urlopen", fail)
    with pytest.raises(DataError, match=r"no route to host.*apt-get install"):
        download_fashion_mnist(tmp_path)


@pytest.mark.skipif(not (DEBIAN_FOLDER / NAMES[0]).exists(), reason="dataset-fashion-mnist isn't installed")
def test_the_package_has_the_published_content() -> None:
    for name, digest in fashion_mnist._CONTENT_SHA256.items():
        assert hashlib.sha256(gzip.decompress((DEBIAN_FOLDER / name).read_bytes())).hexdigest() == digest
    fashion = load_fashion_mnist()
    assert torch.bincount(fashion.train.targets).tolist() == [6000] * 10
    assert torch.bincount(fashion.test.targets).tolist() == [1000] * 10
    assert abs(float(fashion.train.images.mean())) < 1e-3
    assert abs(float(fashion.train.images.std()) - 1) < 1e-3

"""The corpus of Python source: synthetic site directories, brute-force recomputation, and this machine."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cosmati.corpora.python_library import ByteRows, PythonLibrary, _level, load_python_library
from cosmati.corpora.python_packages import find_packages
from cosmati.errors import DataError
from cosmati.provenance.taxonomy import software_licences


def install(
    root: Path, name: str, files: dict[str, bytes], licence: str = "MIT", lies: frozenset[str] = frozenset()
) -> None:
    """Write a distribution as an installer does; files named in `lies` get a RECORD that doesn't match."""
    info = root / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\nLicense-Expression: {licence}\n"
    )
    record = [f"{info.name}/RECORD,,"]
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
        claimed = hashlib.sha256(b"another" if path in lies else content).digest()
        text = base64.urlsafe_b64encode(claimed).rstrip(b"=").decode()
        record.append(f"{path},sha256={text},{len(content)}")
    (info / "RECORD").write_text("\n".join(record) + "\n")


def code(name: str, num_bytes: int) -> bytes:
    """Return bytes without a null byte that no other name has."""
    return (name.encode() * num_bytes)[:num_bytes]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return five packages of two classes, with something wrong in most of them."""
    shared = code("shared", 300)
    install(tmp_path, "alpha", {"alpha/a.py": code("a", 500), "alpha/b.py": shared, "alpha/__init__.py": b""})
    install(
        tmp_path,
        "beta",
        {
            "beta/copy.py": shared,
            "beta/_vendor/six.py": code("six", 100),
            "beta/tests/test_b.py": code("test", 100),
            "beta/core.py": code("core", 700),
            "beta/data.txt": code("text", 100),
        },
    )
    install(
        tmp_path,
        "Gamma.Ray",
        {"gamma.py": code("g", 900), "wrong.py": b"tampered"},
        lies=frozenset({"wrong.py"}),
    )
    install(tmp_path, "delta", {"delta.py": code("d", 600), "null.py": b"x\0y"}, "GPL-3.0-only")
    install(tmp_path, "epsilon", {"epsilon.py": code("e", 400)}, "GPL-3.0-only")
    return tmp_path


def load(site: Path, **changes: object) -> PythonLibrary:
    arguments = {
        "sequence_length": 16,
        "max_bytes": 100_000,
        "held_out_fraction": 0.3,
        "roots": [site],
        **changes,
    }
    return load_python_library(**arguments)  # type: ignore[arg-type]


def both(library: PythonLibrary) -> ByteRows:
    """Return all rows of both splits, sorted by row id."""
    fields = [field.name for field in dataclasses.fields(ByteRows)]
    joined = [torch.cat([getattr(library.train, name), getattr(library.validation, name)]) for name in fields]
    order = torch.cat([library.train.row_ids, library.validation.row_ids]).argsort()
    return ByteRows(*(tensor[order] for tensor in joined))


@pytest.mark.parametrize("place", ["licenses/LICENSE.txt", "LICENSE.txt"])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_licence_file_is_read_where_it_lies(tmp_path: Path, place: str, is_named: bool) -> None:
    install(tmp_path, "alpha", {"alpha.py": code("a", 500)})
    info = tmp_path / "alpha-1.0.dist-info"
    file = "License-File: LICENSE.txt\nLicense-File: ../../secret\n" if is_named else ""
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: alpha\nVersion: 1.0\nClassifier: License :: OSI Approved :: BSD License\n{file}"
    )
    (tmp_path.parent / "secret").write_text("GNU General Public License")
    (info / place).parent.mkdir(exist_ok=True)
    (info / place).write_text("Redistribution and use in source and binary forms are permitted.")
    with (info / "RECORD").open("a") as record:
        record.write(f"{info.name}/{place},,\n")
    (package,) = find_packages([tmp_path])[0]
    exact = is_named or place == "LICENSE.txt"
    assert package.licence.spdx == ("BSD-2-Clause" if exact else None)
    assert package.licence.class_path == "open/permissive"


def test_packages_hold_what_is_theirs_and_verified(site: Path) -> None:
    library = load(site)
    assert [(package.name, package.num_files, package.num_bytes) for package in library.packages] == [
        ("alpha", 2, 802),
        ("beta", 1, 701),
        ("delta", 1, 601),
        ("epsilon", 1, 401),
        ("gamma-ray", 1, 901),
    ]
    assert library.skipped_files == {
        "empty": 1,
        "content seen before": 1,
        "vendored": 1,
        "tests": 1,
        "sha256 differs from RECORD": 1,
        "holds a null byte": 1,
    }


def test_rows_overlap_by_one_byte_and_never_mix_packages(site: Path) -> None:
    library = load(site)
    rows = both(library)
    assert rows.row_ids.tolist() == list(range(len(rows.tokens)))
    dropped = 0
    for index, package in enumerate(library.packages):
        mine = rows.tokens[rows.package_ids == index]
        assert torch.equal(mine[:-1, -1], mine[1:, 0])
        content = bytes(torch.cat([mine[0, :1], mine[:, 1:].flatten()]).tolist())
        assert package.num_rows == len(mine) == (package.num_bytes - 1) // 16
        dropped += package.num_bytes - len(content)
        if package.name == "gamma-ray":
            assert content == (code("g", 900) + b"\0")[: len(content)]
    assert library.dropped_bytes == dropped


def test_each_row_has_its_class_and_digest(site: Path) -> None:
    library = load(site)
    assert library.class_names == software_licences().classes
    rows = both(library)
    for tokens, class_id, digest, package_id in zip(
        rows.tokens, rows.class_ids, rows.row_digests, rows.package_ids, strict=True
    ):
        package = library.packages[int(package_id)]
        expected = "open/copyleft" if package.name in ("delta", "epsilon") else "open/permissive"
        assert library.class_names[int(class_id)] == package.licence.class_path == expected
        assert bytes(digest.tolist()) == hashlib.sha256(bytes(tokens.tolist())).digest()
    assert rows.tokens.dtype == rows.row_digests.dtype == torch.uint8
    assert rows.class_ids.dtype == rows.row_ids.dtype == rows.package_ids.dtype == torch.int64


def test_splits_share_no_package(site: Path) -> None:
    library = load(site)
    for rows, split in ((library.train, "train"), (library.validation, "validation")):
        names = {package.name for package in library.packages if package.split == split}
        assert {library.packages[index].name for index in rows.package_ids.tolist()} == names
        assert names


def test_a_small_fraction_still_holds_one_package_out(site: Path) -> None:
    held = [package.name for package in load(site, held_out_fraction=0.01).packages if package.split == "validation"]
    assert held == ["epsilon"]


def test_same_machine_same_bytes_and_a_manifest_that_says_which(site: Path) -> None:
    first, second = load(site), load(site)
    assert first.manifest_digest == second.manifest_digest == hashlib.sha256(first.manifest).hexdigest()
    assert torch.equal(first.train.tokens, second.train.tokens)
    entries = json.loads(first.manifest)["packages"]
    assert entries[4]["name"] == "gamma-ray"
    assert entries[4]["files"] == [["gamma.py", hashlib.sha256(code("g", 900)).hexdigest()]]
    assert entries[4]["digest"] == hashlib.sha256(code("g", 900) + b"\0").hexdigest()
    install(site, "zeta", {"zeta.py": code("z", 200)})
    assert load(site).manifest_digest != first.manifest_digest


def test_bounds_cut_the_largest_first(site: Path) -> None:
    by_package = {package.name: package.num_bytes for package in load(site, max_bytes_per_package=650).packages}
    assert by_package == {"alpha": 650, "beta": 650, "delta": 601, "epsilon": 401, "gamma-ray": 650}
    cut = load(site, max_bytes=2000, max_bytes_per_package=2000)
    assert {package.name: package.num_bytes for package in cut.packages} == {
        **dict.fromkeys(("alpha", "beta", "gamma-ray"), 333),
        "delta": 599,
        "epsilon": 401,
    }
    assert all(package.num_bytes == 100 for package in load(site, max_bytes=1600).packages)
    by_class = load(site, max_bytes_per_class=600, max_bytes_per_package=2000)
    assert sum(package.num_bytes for package in by_class.packages) == 1200


@given(st.lists(st.integers(1, 50), max_size=8), st.integers(0, 200))
def test_level_is_the_largest_that_fits(sizes: list[int], budget: int) -> None:
    def taken(level: int) -> int:
        return sum(min(size, level) for size in sizes)

    level = _level(sizes, budget)
    assert taken(level) <= budget
    assert level == max(sizes, default=0) or taken(level + 1) > budget


def test_a_missing_record_file_and_hash_are_counted(site: Path) -> None:
    (site / "bare-1.0.dist-info").mkdir()
    (site / "bare-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: bare\nVersion: 1.0\n")
    (site / "delta.py").unlink()
    record = site / "epsilon-1.0.dist-info" / "RECORD"
    record.write_text(record.read_text() + "legacy.py,md5=abc,5\nnohash.py,,\n../../bin/run.py,sha256=x,3\n")
    library = load(site)
    assert library.skipped_files["distribution without RECORD"] == 1
    assert library.skipped_files["missing"] == 1
    assert library.skipped_files["no sha256 in RECORD"] == 2
    assert library.skipped_files["outside the site directory"] == 1
    assert "delta" not in {package.name for package in library.packages}


@pytest.mark.parametrize("changes", [{"sequence_length": 0}, {"max_bytes": 33}, {"held_out_fraction": 1.0}])
def test_arguments_out_of_range_are_refused(site: Path, changes: dict[str, float]) -> None:
    with pytest.raises(DataError, match="Give"):
        load(site, **changes)


def test_too_little_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fills no train row: 0 packages"):
        load(tmp_path)
    install(tmp_path, "one", {"one.py": code("1", 500)})
    with pytest.raises(DataError, match="fills no validation row: 1 packages"):
        load(tmp_path)


@pytest.mark.long
def test_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = load_python_library(sequence_length=64, max_bytes=400_000)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    again = load_python_library(sequence_length=64, max_bytes=400_000)
    assert again.manifest_digest == library.manifest_digest
    names = [package.name for package in library.packages]
    assert len(names) == len(set(names))
    assert "python/json" in names
    assert "numpy" in names
    assert not {"cosmati", "python/test", "python/site-packages"} & set(names)
    assert sum(package.num_bytes for package in library.packages) <= 400_000
    standard = [package for package in library.packages if package.name.startswith("python/")]
    assert {package.licence.class_path for package in standard} == {"open/psf"}
    psf = library.class_names.index("open/psf")
    assert (library.train.class_ids == psf).any()
    assert (library.validation.class_ids == psf).any()
    held_bytes = sum(package.num_bytes for package in library.packages if package.split == "validation")
    assert 0.02 * 400_000 < held_bytes < 0.11 * 400_000


def test_the_first_of_two_versions_counts_and_cosmati_never_does(
    site: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    install(other, "delta", {"delta.py": code("another", 300)}, "GPL-3.0-only")
    install(other, "cosmati", {"cosmati/core.py": code("own", 300)})
    sizes = {package.name: package.num_bytes for package in load(site, roots=[site, other]).packages}
    assert sizes["delta"] == 601
    assert "cosmati" not in sizes
    assert {package.name: package.num_bytes for package in load(site, roots=[other, site]).packages}["delta"] == 301

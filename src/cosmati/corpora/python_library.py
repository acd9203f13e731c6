"""The Python source library of this machine: real code with real licences, for next-byte prediction.

Every machine that runs PyTorch has tens of megabytes of Python, file by file with a digest, and package by
package with a declared licence. `load_python_library` samples it evenly, deduplicates it, and splits it by
package, so that nothing of a held-out package is trained on. The same machine always gives the same bytes;
other machines have other packages, and the manifest's digest says so.

What the split doesn't catch: copies that were edited (`typing_extensions` and `typing`), since files are
compared whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import rfc8785
import torch
from numpy.typing import NDArray
from torch import Tensor

from cosmati.corpora.python_packages import Package, SourceFile, find_packages
from cosmati.errors import DataError
from cosmati.provenance.licences import LicenceFinding
from cosmati.provenance.taxonomy import software_licences

Split = Literal["train", "validation"]

SEPARATOR = b"\0"
"""Ends each file; files that hold it are left out."""


@dataclass(frozen=True, eq=False)
class ByteRows:
    """Rows of bytes for next-byte prediction; all tensors are on the CPU.

    Attributes:
        tokens: uint8 [rows, sequence_length + 1]; a row's last byte is the next one's first.
        class_ids: int64 [rows], index into the library's `class_names`.
        row_ids: int64 [rows], the row's place in the manifest, counted over both splits.
        row_digests: uint8 [rows, 32], SHA-256 of each row's bytes.
        package_ids: int64 [rows], index into the library's `packages`.
    """

    tokens: Tensor
    class_ids: Tensor
    row_ids: Tensor
    row_digests: Tensor
    package_ids: Tensor


@dataclass(frozen=True)
class PackageSource:
    """What was taken from a package.

    Attributes:
        name: `python/<module>` for the standard library, otherwise the distribution's normalised name.
        version: of the interpreter or the distribution.
        licence: what its metadata says, and the class that follows.
        num_files: files taken.
        num_bytes: bytes taken, a separator after each file; the last file drawn may be cut.
        num_rows: whole rows cut from them.
        split: all of it is in one.
        digest: SHA-256 of the bytes, in hex.
    """

    name: str
    version: str
    licence: LicenceFinding
    num_files: int
    num_bytes: int
    num_rows: int
    split: Split
    digest: str


@dataclass(frozen=True, eq=False)
class PythonLibrary:
    """The corpus (see `load_python_library`).

    Attributes:
        train: rows to learn from.
        validation: rows of packages that are held out whole.
        class_names: all classes of `software_licences`, in order; most machines have rows of a few of them.
        packages: what was taken, in the order of the rows.
        manifest: canonical JSON (RFC 8785) of the packages, their files and the files' digests.
        skipped_files: how many files were left out, by reason; what is beyond a bound isn't counted.
        dropped_bytes: bytes at packages' ends that filled no row.
    """

    train: ByteRows
    validation: ByteRows
    class_names: tuple[str, ...]
    packages: tuple[PackageSource, ...]
    manifest: bytes
    skipped_files: Mapping[str, int]
    dropped_bytes: int

    @property
    def manifest_digest(self) -> str:
        """SHA-256 of the manifest, in hex."""
        return hashlib.sha256(self.manifest).hexdigest()


def load_python_library(
    *,
    sequence_length: int,
    max_bytes: int,
    held_out_fraction: float = 0.1,
    max_bytes_per_class: int | None = None,
    max_bytes_per_package: int | None = None,
    roots: Sequence[Path] | None = None,
) -> PythonLibrary:
    """Load this machine's Python source as rows of bytes with provenance.

    Where there is more than `max_bytes`, the largest classes are cut to one common size, and within a class
    the largest packages likewise, so that none dominates. Files of a package come in the order of their
    names' hashes, up to the package's bound. Which packages are held out goes by the hash of their names,
    class by class; a class in which every package is too large for its share has none, and its rows all
    train.

    Args:
        sequence_length: bytes that a row predicts; a row has one more.
        max_bytes: upper bound of all bytes taken.
        held_out_fraction: fraction of bytes to hold out, in (0, 1); whole packages come near it at best.
        max_bytes_per_class: a further bound for each class.
        max_bytes_per_package: a further bound for each package; None is a sixteenth of `max_bytes`.
        roots: site directories to read instead of this machine's packages and standard library.

    Raises:
        DataError: an argument is out of range, or too little source is found to fill a row of each split.
    """
    _check(sequence_length, max_bytes, held_out_fraction)
    found, skipped = find_packages(roots)
    sampled = _sample(_without_repeats(found, skipped), max_bytes, max_bytes_per_class, max_bytes_per_package)
    read = [_read(package, bound, skipped) for package, bound in sampled]
    read = [(package, content) for package, content in read if content]
    return _assemble(read, _hold_out(read, held_out_fraction, sequence_length), sequence_length, skipped)


def _check(sequence_length: int, max_bytes: int, held_out_fraction: float) -> None:
    if sequence_length < 1 or max_bytes < 2 * (sequence_length + 1):
        msg = (
            f"sequence_length={sequence_length} and max_bytes={max_bytes} leave no room for a row "
            "of each split. Give a positive length, and room for two rows at least."
        )
        raise DataError(msg)
    if not 0 < held_out_fraction < 1:
        msg = f"held_out_fraction={held_out_fraction} holds out nothing or all. Give one between 0 and 1."
        raise DataError(msg)


def _without_repeats(packages: Sequence[Package], skipped: Counter[str]) -> list[Package]:
    """Leave out empty files, and each file whose content an earlier one has."""
    seen: set[str] = set()
    kept: list[Package] = []
    for package in packages:
        files = []
        for file in package.files:
            if file.num_bytes and file.sha256 not in seen:
                files.append(file)
            else:
                skipped["content seen before" if file.num_bytes else "empty"] += 1
            seen.add(file.sha256)
        kept.append(dataclasses.replace(package, files=tuple(files)))
    return [package for package in kept if package.files]


def _sample(
    packages: Sequence[Package],
    max_bytes: int,
    max_bytes_per_class: int | None,
    max_bytes_per_package: int | None,
) -> list[tuple[Package, int]]:
    """Bound classes, then packages of a class, by a common size; return packages with files and bound."""
    cap = max_bytes_per_package or max_bytes // 16
    sizes = {package.name: min(_num_bytes(package), cap) for package in packages}
    by_class: dict[str, list[int]] = {}
    for package in packages:
        by_class.setdefault(package.licence.class_path, []).append(sizes[package.name])
    class_bytes = _level([sum(group) for group in by_class.values()], max_bytes)
    class_bytes = min(class_bytes, max_bytes_per_class or max_bytes)
    levels = {path: _level(group, class_bytes) for path, group in by_class.items()}
    bounds = [min(sizes[package.name], levels[package.licence.class_path]) for package in packages]
    return [(_draw_files(package, bound), bound) for package, bound in zip(packages, bounds, strict=True)]


def _level(sizes: Sequence[int], budget: int) -> int:
    """Return the largest common bound under which the sizes sum to no more than the budget."""
    for index, size in enumerate(sorted(sizes)):
        share = budget // (len(sizes) - index)
        if size > share:
            return share
        budget -= size
    return max(sizes, default=0)


def _num_bytes(package: Package) -> int:
    return sum(file.num_bytes + len(SEPARATOR) for file in package.files)


def _draw_files(package: Package, bound: int) -> Package:
    """Keep files in the order of their names' hashes until the bound is reached."""
    drawn: list[SourceFile] = []
    for file in sorted(package.files, key=lambda file: _hash("file", package.name, file.name)):
        if bound <= 0:
            break
        drawn.append(file)
        bound -= file.num_bytes + len(SEPARATOR)
    return dataclasses.replace(package, files=tuple(drawn))


def _hash(*words: str) -> bytes:
    return hashlib.sha256("\0".join(words).encode()).digest()


def _read(package: Package, bound: int, skipped: Counter[str]) -> tuple[Package, bytes]:
    """Read and verify a package's files; return those that hold, and their bytes up to the bound."""
    files, parts = [], []
    for file in package.files:
        content = file.path.read_bytes() if file.path.is_file() else None
        if content is None:
            skipped["missing"] += 1
        elif hashlib.sha256(content).hexdigest() != file.sha256:
            skipped["sha256 differs from RECORD"] += 1
        elif SEPARATOR in content:
            skipped["holds a null byte"] += 1
        else:
            files.append(file)
            parts.append(content + SEPARATOR)
    return dataclasses.replace(package, files=tuple(files)), b"".join(parts)[:bound]


def _hold_out(read: Sequence[tuple[Package, bytes]], fraction: float, sequence_length: int) -> set[str]:
    """Choose the packages to hold out, among those with a whole row.

    In each class they are tried in the order of their names' hashes, and held out where they don't overshoot
    the class's share. If nothing is held out in any class, the smallest package is that has company in its
    class.
    """
    by_class: dict[str, list[tuple[bytes, str, int]]] = {}
    for package, content in read:
        if len(content) > sequence_length:
            entry = (_hash("split", package.name), package.name, len(content))
            by_class.setdefault(package.licence.class_path, []).append(entry)
    groups = [group for group in by_class.values() if len(group) > 1]
    chosen: set[str] = set()
    for group in groups:
        room = fraction * sum(size for _, _, size in group)
        for _, name, size in sorted(group):
            if size <= room:
                chosen.add(name)
                room -= size
    smallest = sorted((size, name) for group in groups for _, name, size in group)[:1]
    return chosen or {name for _, name in smallest}


def _assemble(
    read: Sequence[tuple[Package, bytes]],
    held_out: set[str],
    sequence_length: int,
    skipped: Mapping[str, int],
) -> PythonLibrary:
    tables = [_cut_rows(content, sequence_length) for _, content in read]
    sources = [
        PackageSource(
            name=package.name,
            version=package.version,
            licence=package.licence,
            num_files=len(package.files),
            num_bytes=len(content),
            num_rows=len(table),
            split="validation" if package.name in held_out else "train",
            digest=hashlib.sha256(content).hexdigest(),
        )
        for (package, content), table in zip(read, tables, strict=True)
    ]
    used = sum(source.num_rows * sequence_length + 1 for source in sources if source.num_rows)
    return PythonLibrary(
        train=_stack("train", sources, tables),
        validation=_stack("validation", sources, tables),
        class_names=software_licences().classes,
        packages=tuple(sources),
        manifest=_manifest(sources, [package for package, _ in read], sequence_length),
        skipped_files=dict(skipped),
        dropped_bytes=sum(source.num_bytes for source in sources) - used,
    )


def _cut_rows(content: bytes, sequence_length: int) -> NDArray[np.uint8]:
    """Cut bytes into rows that overlap by one: [rows, sequence_length + 1], a view."""
    flat = np.frombuffer(content, np.uint8)
    if len(flat) <= sequence_length:
        return np.empty((0, sequence_length + 1), np.uint8)
    return np.lib.stride_tricks.sliding_window_view(flat, sequence_length + 1)[::sequence_length]


def _stack(split: Split, sources: Sequence[PackageSource], tables: Sequence[NDArray[np.uint8]]) -> ByteRows:
    num_rows = np.asarray([source.num_rows for source in sources], np.int64)
    package_ids = np.repeat(np.arange(len(sources)), num_rows)
    row_ids = np.flatnonzero(np.asarray([source.split == split for source in sources], bool)[package_ids])
    if not len(row_ids):
        msg = (
            f"The Python source that was found fills no {split} row: {len(sources)} packages, "
            f"{sum(source.num_bytes for source in sources)} bytes. Use a shorter sequence_length, raise "
            "max_bytes, or install more packages; a split needs two packages of one licence class."
        )
        raise DataError(msg)
    tokens = np.concatenate([table for source, table in zip(sources, tables, strict=True) if source.split == split])
    taxonomy = software_licences()
    class_ids = np.asarray([taxonomy.id_of(source.licence.class_path) for source in sources], np.int64)
    digests = b"".join(hashlib.sha256(row).digest() for row in tokens)
    return ByteRows(
        tokens=torch.from_numpy(tokens),
        class_ids=torch.from_numpy(class_ids[package_ids[row_ids]]),
        row_ids=torch.from_numpy(row_ids),
        row_digests=torch.frombuffer(bytearray(digests), dtype=torch.uint8).view(-1, 32),
        package_ids=torch.from_numpy(package_ids[row_ids]),
    )


def _manifest(sources: Sequence[PackageSource], packages: Sequence[Package], sequence_length: int) -> bytes:
    entries = [
        {**dataclasses.asdict(source), "files": [[file.name, file.sha256] for file in package.files]}
        for source, package in zip(sources, packages, strict=True)
    ]
    return rfc8785.dumps({"version": 1, "sequence_length": sequence_length, "packages": entries})

"""The Python source of this machine's packages, a file a row, each of the class that its package's licence has."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cosmati.corpora.python_packages import Package, SourceFile, find_packages
from cosmati.data.ingest.rows import ORIGIN_COLUMNS, OnError, Reading, Row, Rows

_COLUMNS = {"content": "bytes", "package": "str", "version": "str", "licence": "str"} | dict(ORIGIN_COLUMNS)


def read_python_packages(
    roots: Sequence[Path] | None = None, *, deduplicate: bool = True, on_error: OnError = "raise"
) -> Rows:
    r"""Read Python packages: columns `content` (bytes), `package`, `version` and `licence` (SPDX, or empty).

    The class is that of the package's licence in `software_licences` (see `classify_licence`). `origin_file` is the
    package's name and the file's, `numpy/numpy/version.py`. What is left out by rule (tests, vendored copies, empty
    files) is counted in `Rows.left_out`.

    Args:
        roots: site directories; None means this machine's packages and the standard library.
        deduplicate: leave out a file whose content an earlier one has, since it might come in two classes.
        on_error: `raise` at a file that is gone or isn't what its `RECORD` says, or leave it out and `record` it.
    """
    packages, skipped = find_packages(roots)
    classes = {package.name: package.licence.class_path for package in packages}
    files = list(_files(packages, skipped, deduplicate=deduplicate))

    def class_of(row: Mapping[str, Any]) -> str:
        return classes[row["package"]]

    def read(reading: Reading) -> Iterator[Row]:
        for package, file in files:
            name = f"{package.name}/{file.name}"
            try:
                content = file.path.read_bytes()
            except OSError as error:
                because = None if isinstance(error, FileNotFoundError) else error
                reading.reject(name, 1, f"can't be read ({error})", because)
                continue
            sha256 = hashlib.sha256(content)
            if sha256.hexdigest() != file.sha256:
                reading.reject(name, 1, "isn't what the RECORD of its package says; install the package again")
                continue
            yield {
                "content": content,
                "package": package.name,
                "version": package.version,
                "licence": package.licence.spdx or "",
                "origin_file": name,
                "origin_place": 1,
                "origin_sha256": sha256.digest(),
            }

    return Rows(
        MappingProxyType(_COLUMNS),
        class_of,
        read,
        on_error,
        left_out=MappingProxyType(dict(skipped)),
        inputs=lambda: {f"{package.name}/{file.name}": file.sha256 for package, file in files},
    )


def _files(
    packages: Sequence[Package], skipped: Counter[str], *, deduplicate: bool
) -> Iterator[tuple[Package, SourceFile]]:
    seen: set[str] = set()
    for package in packages:
        for file in package.files:
            if not file.num_bytes:
                skipped["empty"] += 1
            elif deduplicate and file.sha256 in seen:
                skipped["content seen before"] += 1
            else:
                yield package, file
            seen.add(file.sha256)

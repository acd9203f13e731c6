"""Notices of bundled works in a licence text: blocks of `Name:`, `Files:` and `License:`, as wheels append them.

NumPy's and SciPy's wheels put such notices after their own licence, for the compiled libraries that they bring.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_FIELD = re.compile(r"^[ \t]*(?P<name>[A-Z][a-z]+):[ \t]*(?P<value>.*?)[ \t]*$")
_FIELDS = frozenset({"Name", "Files", "Description", "Availability", "License"})
_LIBRARY = re.compile(r"\.(?:so(?:[.\d*]*)?|dylib|dll|pyd|a|lib)$|(?:^|[/\\])(?:\.dylibs|[^/\\]+\.libs)[/\\]")


@dataclass(frozen=True)
class BundledWork:
    """What a notice says of a work.

    Args:
        name: of the work.
        files: patterns of its files inside the distribution.
        licence: what the field `License` says.
        text: what follows it, up to the next notice.
    """

    name: str
    files: tuple[str, ...]
    licence: str
    text: str

    @property
    def is_compiled(self) -> bool:
        """Whether all of its files are compiled libraries, by their names."""
        return all(_LIBRARY.search(name) for name in self.files)


def split_bundled_works(text: str) -> tuple[str, tuple[BundledWork, ...]]:
    """Return the part of a licence text that is the distribution's own, and the works whose notices follow it.

    A notice counts only where it's whole: name, files and licence. Otherwise its lines stay with what is before them.
    """
    lines = text.splitlines()
    starts = [index for index, line in enumerate(lines) if _field(line) == "Name" and _head(lines, index) is not None]
    if not starts:
        return text, ()
    ends = [*starts[1:], len(lines)]
    works = tuple(_work(lines[start:end]) for start, end in zip(starts, ends, strict=True))
    return "\n".join(lines[: starts[0]]), works


def _field(line: str) -> str | None:
    found = _FIELD.match(line)
    return found["name"] if found and found["name"] in _FIELDS else None


def _head(lines: list[str], start: int) -> tuple[dict[str, str], int] | None:
    """Return the fields of the notice that starts at a line, and where its text does; None where it isn't whole."""
    fields: dict[str, str] = {}
    for index in range(start, len(lines)):
        found = _FIELD.match(lines[index])
        if found is None or found["name"] not in _FIELDS or found["name"] in fields:
            break
        fields[found["name"]] = found["value"]
        if found["name"] == "License":
            whole = all(fields.get(name) for name in ("Name", "Files", "License"))
            return (fields, index + 1) if whole else None
    return None


def _work(lines: list[str]) -> BundledWork:
    head = _head(lines, 0)
    assert head is not None, "looked for where the notice starts"
    fields, end = head
    files = tuple(re.split(r"[,\s]+", fields["Files"].strip(", ")))
    return BundledWork(fields["Name"], files, fields["License"], "\n".join(lines[end:]))

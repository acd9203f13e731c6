"""The options that name an index of subjects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

IndexKey = Annotated[Path | None, typer.Option("--key", metavar="FILE", help="The index's key.")]
IndexFile = Annotated[
    Path | None,
    typer.Option("--index", metavar="FILE", help="The index; beside the key, as FILE.subjects, if left out."),
]


def index_of(key: Path, index: Path | None) -> Path:
    """Return where an index is: beside its key, unless it was named."""
    return index or key.with_name(key.name + ".subjects")

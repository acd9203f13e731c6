"""Write `written/` anew where mosaicml-streaming is installed: `python -m tests.data.peer.write FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.data.peer import rows


def write(out: Path) -> None:
    """Write every data set."""
    from streaming import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter

    with MDSWriter(out=str(out / "encodings"), columns=rows.COLUMNS) as writer:
        for n in range(3):
            writer.write(rows.row(n))
    for name in rows.HASHES:
        with MDSWriter(out=str(out / "hashes" / name), columns=rows.FEW, hashes=[name]) as writer:
            for n in range(3):
                writer.write(rows.few(n))
    for name in rows.COMPRESSIONS:
        options = {"compression": name, "hashes": ["sha1", "xxh64"]}
        with MDSWriter(out=str(out / "compression" / name.replace(":", "-")), columns=rows.FEW, **options) as writer:
            for n in range(3):
                writer.write(rows.few(n))
    kinds = {"json": JSONWriter, "csv": CSVWriter, "tsv": TSVWriter, "xsv": XSVWriter}
    for name, options in rows.SPLITS.items():
        kind = kinds[name.partition("-")[0]]
        with kind(out=str(out / "split" / name), columns=rows.SPLIT, size_limit=150, **options) as writer:
            for n in range(7):
                writer.write(rows.split(n))


if __name__ == "__main__":
    write(Path(sys.argv[1]))

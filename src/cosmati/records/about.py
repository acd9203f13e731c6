"""What the program that trained a run tells about it besides: the content of `about.json` in its folder.

Nothing signs it: a run's ledger covers what was trained on and who taught what, not these words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cosmati.records.encoding import FileRecord
from cosmati.records.governance import SourceRow

ABOUT_VERSION = 1
ABOUT_FILE = "about.json"


@dataclass(frozen=True)
class SampleRecord:
    """What a trained model wrote.

    Attributes:
        prompt: what it was given to go on from.
        text: what it wrote after it.
        seed: keys the draws: one model, prompt, temperature and seed always write the same.
        temperature: that divided the logits.
        step: of the weights.
    """

    prompt: str
    text: str
    seed: int
    temperature: float
    step: int


@dataclass(frozen=True)
class PackageRecord:
    """How the class of a package's rows was decided.

    Attributes:
        name: of the package.
        version: of it.
        class_name: its rows' class.
        licence: SPDX expression, empty where nothing names it exactly.
        licence_state: `declared`, `normalised` or `unknown`.
        evidence: what was read, parts joined by semicolons, shortened where it's long.
        num_rows: of the package.
        split: `train` or `validation`.
    """

    name: str
    version: str
    class_name: str
    licence: str
    licence_state: str
    evidence: str
    num_rows: int
    split: str


@dataclass(frozen=True, kw_only=True)
class RunAbout(FileRecord):
    """What a run's program tells of it.

    Attributes:
        quality: name of the metric that counts, empty where none was chosen.
        higher_is_better: whether a higher one is the better one.
        sources: the data, grouped.
        packages: how each package's class was decided.
        samples: what the model wrote.
        commands: what makes the run again, each a plain call of `cosmati`; pages leave others out.
        signatures: what a reader must know of the keys that have signed data and policy.
        notes: whatever a reader must know besides.
        version: of this record's form.
    """

    version: int = ABOUT_VERSION
    quality: str = ""
    higher_is_better: bool = True
    sources: tuple[SourceRow, ...] = ()
    packages: tuple[PackageRecord, ...] = ()
    samples: tuple[SampleRecord, ...] = ()
    commands: tuple[str, ...] = ()
    signatures: str = ""
    notes: tuple[str, ...] = ()

    @staticmethod
    def upgraded(record: dict[str, Any], /) -> dict[str, Any]:
        """Return what an earlier release wrote, which said nothing of signatures, as this one writes it."""
        return {"signatures": "", **record}

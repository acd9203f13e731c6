"""What carries a study's runs out where this machine doesn't: see `cosmati.launch.studies`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from cosmati.study.definition import Study
from cosmati.study.jobs import Jobs


class Cluster(Protocol):
    """Machines that share a disk with this one. Each run is trained there by one process with one thread.

    Attributes:
        num_jobs: how many runs at a time.
    """

    num_jobs: int

    def hardware(self, study: Study) -> str:
        """Return what its runs train on there, in words; asked before anything else.

        Raises:
            RunError: no arm's run can be made.
        """
        ...

    def workers(self, study: Study, recipes: Mapping[str, str], hardware: str) -> Jobs:
        """Return what carries out calls whose keys are the study's cells.

        Args:
            study: whose cells.
            recipes: by arm the digests for which finished runs count.
            hardware: that they're to train on.
        """
        ...

    def profile(self, study: Study, hardware: str) -> None:
        """Profile its costs there, alone, into `costs.jsonl` of the study's folder.

        Raises:
            RunError: that failed.
        """
        ...

"""Asks a run's witnesses to cosign its ledger: before the first step, every hour, and at the end.

It happens in a thread, so that no step waits, but for the first and the last time. Under the profile `attested` a run
doesn't begin without its quorum, and stops with a checkpoint where it can't be had any more.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic

from cosmati.errors import LedgerError
from cosmati.ledger.cosigned import ForkError, Send, WitnessRefusedError, ask_witness
from cosmati.ledger.profile import ATTESTED, HOUR_SECONDS, PATIENCE_SECONDS, LedgerProfile
from cosmati.ledger.witness_http import over_http, witness_and_url
from cosmati.train.config import RunConfig

_AGAIN_SECONDS = 60.0
"""After which an attested run asks again that couldn't have its quorum."""
_END_SECONDS = 15.0


class AskedWitnesses:
    """A run's witnesses.

    Args:
        directory: the ledger's.
        profile: under which it's kept: who they are, and how many it needs.
        sends: reach them, in their order.
    """

    def __init__(self, directory: Path, profile: LedgerProfile, sends: Sequence[Send]) -> None:
        self.profile = profile
        self._directory, self._sends = directory, sends
        self._is_attested = profile.name == ATTESTED
        self._met, self._refusals, self._forked = monotonic(), list[str](), ""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Ask for the first time, and go on every hour.

        Raises:
            WitnessRefusedError: an attested run can't have its quorum; nothing was trained.
        """
        if self._is_attested and not self._ask():
            raise WitnessRefusedError(f"Training doesn't begin: {self._why()} {_MEND}")
        pause = HOUR_SECONDS if self._is_attested else 0.0
        self._closed.clear()
        self._thread = threading.Thread(target=self._go_on, args=(pause,), daemon=True, name="cosmati-witnesses")
        self._thread.start()

    def refuse(self) -> str:
        """Return why an attested run has to stop; empty where it may go on."""
        if not self._is_attested:
            return ""
        if self._forked:
            return self._forked
        if monotonic() - self._met > HOUR_SECONDS + PATIENCE_SECONDS:
            return f"its ledger couldn't be witnessed for an hour: {self._why()}"
        return ""

    def end(self, *, must: bool) -> None:
        """Ask for the last time, once the ledger is signed to its end.

        Args:
            must: the run is complete: an attested one that isn't witnessed to its end says so.

        Raises:
            WitnessRefusedError: it isn't.
        """
        self.close()
        is_witnessed = self._ask()
        # A quorum of the others doesn't make good what one has seen; a run that has stopped for it has said so.
        forked = self._forked if self._is_attested and must else ""
        if is_witnessed and not forked:
            return
        words = f"The end of the run isn't witnessed: {forked or self._why()}"
        if must and self._is_attested:
            raise WitnessRefusedError(
                f"{words} All is on disk: start the run again, or `cosmati ledger witness ask`, and it's asked again."
            )
        warnings.warn(words, stacklevel=2)

    def close(self) -> None:
        """Ask no more; what is being asked is given a moment."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def _go_on(self, pause: float) -> None:
        while not self._closed.wait(pause):
            pause = HOUR_SECONDS if self._ask() or not self._is_attested else _AGAIN_SECONDS

    def _ask(self) -> bool:
        """Ask all of them at once; return whether enough have cosigned: of a run that isn't attested all."""
        with ThreadPoolExecutor(len(self._sends)) as pool:
            refusals = list(pool.map(self._ask_one, range(len(self._sends))))
        self._refusals = [text for text in refusals if text]
        needed = self.profile.quorum if self._is_attested else len(self._sends)
        is_met = len(self._sends) - len(self._refusals) >= needed
        if is_met:
            self._met = monotonic()
        return is_met

    def _ask_one(self, index: int) -> str:
        witness = self.profile.witnesses[index]
        try:
            ask_witness(self._directory, witness, self._sends[index])
        except ForkError as error:
            self._forked = str(error)
            return self._forked
        except (LedgerError, OSError) as error:
            return str(error)
        return ""

    def _why(self) -> str:
        seen = len(self._sends) - len(self._refusals)
        return f"{seen} of {len(self._sends)} witnesses have cosigned. {' '.join(self._refusals)}"


_MEND = "Wait until they answer, or take ledger_profile='self', whose figures are operator-asserted."


def asked_witnesses(run_folder: Path, config: RunConfig) -> AskedWitnesses | None:
    """Return a run's witnesses; None where nobody is asked."""
    found = [witness_and_url(text) for text in config.witnesses]
    if not found:
        return None
    quorum = config.witness_quorum or len(found)
    profile = LedgerProfile(config.ledger_profile, tuple(key for key, _ in found), quorum)
    return AskedWitnesses(run_folder / "ledger", profile, [over_http(url) for _, url in found])

"""A process of a test's can be signalled at any time, its end included."""

from __future__ import annotations

import os
import signal

import pytest

from tests.processes import PythonProcess


def test_a_signal_to_what_has_just_ended_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    process = PythonProcess(["-c", "print(1)"])
    assert process.communicate() == ("1\n", "")
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    monkeypatch.setattr(PythonProcess, "returncode", None)  # its fork server has waited for it, and not told yet
    process.send_signal(signal.SIGINT)
    process.kill()

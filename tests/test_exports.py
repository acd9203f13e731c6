"""The names that `cosmati` exports are pinned, and each one is where it says."""

import subprocess
import sys

import pytest

import cosmati

pytestmark = pytest.mark.long


def test_every_exported_name_is_there_and_nothing_else() -> None:
    assert sorted(cosmati._HOME_OF) == sorted(cosmati.__all__)
    for name in cosmati.__all__:
        assert getattr(cosmati, name).__module__ == f"cosmati.{cosmati._HOME_OF[name]}"


def test_import_loads_nothing() -> None:
    code = (
        "import sys, cosmati; print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'pydantic', 'rich')))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=280
    ).stdout
    assert output.strip() == "[]"


def test_import_of_the_loop_loads_no_compiler() -> None:
    """It takes longer than all of PyTorch; building an optimizer of PyTorch's loads it."""
    code = "import sys\nfrom cosmati import Trainer\nprint('torch._dynamo' in sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=280
    ).stdout
    assert output.strip() == "False"


def test_dir_lists_what_may_be_imported() -> None:
    assert {name for name in dir(cosmati) if not name.startswith("__")} == set(cosmati.__all__)

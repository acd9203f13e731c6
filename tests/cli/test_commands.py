"""The list of commands, which is shown and completed without loading any of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cosmati.cli.commands import SUMMARIES, load_command
from cosmati.cli.main import app

_LONG = 200


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_command_says_of_itself_what_the_list_says_of_it(name: str) -> None:
    listed, loaded = typer.main.get_command(app).commands[name], load_command(name)  # type: ignore[attr-defined]
    assert loaded.name == name
    assert loaded.get_short_help_str(_LONG) == listed.get_short_help_str(_LONG)
    assert listed.get_short_help_str(_LONG) == SUMMARIES[name]
    assert not {"install_completion", "show_completion"} & {param.name for param in loaded.params}


def test_every_module_of_commands_is_listed() -> None:
    folder = Path(sys.modules["cosmati.cli"].__file__ or "").parent
    defining = {file.stem for file in folder.glob("*.py") if "typer.Argument(" in file.read_text()}
    # `ledger_queries` is a part of `ledger`, which lists its commands.
    assert {name for name in defining if name.partition("_")[0] not in SUMMARIES} == set()


@pytest.mark.parametrize("given", [["--help"], ["--version"], ["trian"], []])
def test_help_loads_no_pytorch(given: list[str]) -> None:
    code = f"import sys\nfrom cosmati.cli.main import app\ntry:\n    app({given})\nexcept SystemExit:\n    pass\n"
    code += "print(sorted({'torch', 'numpy', 'rfc8785'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout.splitlines()[-1] == "[]"


def test_commands_that_read_what_runs_have_left_load_no_pytorch() -> None:
    code = "import sys\nfrom cosmati.cli.commands import load_command\n"
    code += "for name in ('explore', 'ledger', 'report', 'store'):\n    load_command(name)\n"
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout == "False\n"


def completed(words: str, shell: str = "bash") -> list[str]:
    """Return what a shell is told to complete a line to."""
    place = len(words.split(" ")) - 1
    environment = {
        "_COSMATI_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": words,
        "COMP_CWORD": str(place),
        "_TYPER_COMPLETE_ARGS": words,
    }
    return CliRunner().invoke(app, prog_name="cosmati", env=environment).stdout.split()


def test_shells_complete_commands_options_and_paths() -> None:
    assert completed("cosmati tr") == ["train", "track"]
    assert completed("cosmati study ex") == ["export"]
    assert completed("cosmati train --run") == ["--run-folder"]
    # Nothing, for which bash (`-o default`) takes names of files; zsh is told to.
    for paths in ("cosmati train dig", "cosmati train digits.py --run-folder ru", "cosmati export ru"):
        assert completed(paths) == []
        assert completed(paths, "zsh") == ["_files"]


def test_the_script_for_bash_falls_back_to_files() -> None:
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    code = "from cosmati.cli.main import app; app(['--show-completion', 'bash'], prog_name='cosmati')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=200
    )
    assert "complete -o default -F _cosmati_completion cosmati" in done.stdout

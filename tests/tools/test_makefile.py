"""Which PyTorch `make` installs: a build for CPUs, from PyTorch's own index where that answers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
case "$*" in
  "-c "*) exec {python} "$@" ;;
  *{refuses}*) exit 1 ;;
  *) echo "$@" >> {log} ;;
esac
"""


class Index(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/whl/cpu/torch/" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (its base's)
        pass


@pytest.fixture
def index() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def installed(folder: Path, *options: str, what: str = ".with-torch", refuses: str = "nothing") -> str:
    """Return what the environment's Python is asked to install, by a `make` whose environment is a stand-in.

    Args:
        folder: of the environment.
        options: of `make`.
        what: the stamp that is made.
        refuses: words that the stand-in can't install.
    """
    (folder / "bin").mkdir(parents=True)
    log, python = folder / "log", folder / "bin" / "python"
    python.write_text(PYTHON.format(python=sys.executable, log=log, refuses=refuses))
    python.chmod(0o755)
    (folder / ".made").touch()
    command = ["make", "-C", str(ROOT), f"VENV={folder}", *options, f"{folder}/{what}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (folder / what).exists()
    return log.read_text()


def test_a_build_for_cpus_comes_from_pytorchs_index_where_it_answers(tmp_path: Path, index: str) -> None:
    words = installed(tmp_path / "env", f"TORCH_INDEX={index}/whl/cpu").split()
    assert words[words.index("--extra-index-url") + 1] == f"{index}/whl/cpu"
    assert words[-1] == "torch"
    assert words[words.index("-c") + 1] == "constraints.txt"


@pytest.mark.parametrize("options", [("TORCH_INDEX={index}/elsewhere",), ("TORCH_INDEX={index}/whl/cpu", "TORCH=cuda")])
def test_else_it_comes_from_pips_own(tmp_path: Path, index: str, options: tuple[str, ...]) -> None:
    words = installed(tmp_path / "env", *(option.format(index=index) for option in options)).split()
    assert "--extra-index-url" not in words
    assert words[-1] == "torch"


@pytest.mark.parametrize(("refuses", "signs"), [("nothing", True), ("authority", False)])
def test_the_quickstart_is_installed_with_or_without_what_it_signs_with(
    tmp_path: Path, refuses: str, signs: bool
) -> None:
    lines = installed(tmp_path / "env", "TORCH=cuda", what=".with-quickstart", refuses=refuses).splitlines()
    assert [line for line in lines if ".[vision,explorer]" in line]
    assert bool([line for line in lines if ".[authority]" in line]) == signs


def test_no_other_environment_signs_by_the_way(tmp_path: Path) -> None:
    assert "authority" not in installed(tmp_path / "env", "TORCH=cuda", what=".with-test")


@pytest.mark.parametrize("is_root", [True, False])
def test_slurm_is_installed_where_it_is_absent(tmp_path: Path, is_root: bool) -> None:
    """Debian's programs are played: who isn't root is told what to ask for, and no test is said to have passed."""
    folder, programs = tmp_path / "env", tmp_path / "programs"
    (folder / "bin").mkdir(parents=True)
    programs.mkdir()
    log, python, install = tmp_path / "log", folder / "bin" / "python", programs / "apt-get"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 1\necho tests "$@" >> {log}\n')
    install.write_text(f'#!/bin/sh\necho installs "$@" >> {log}\n[ "$1" = update ] || exit {int(not is_root)}\n')
    for path in (python, install):
        path.chmod(0o755)
    for stamp in (".made", ".with-torch", ".with-test"):
        (folder / stamp).touch()
    command = ["make", "-C", str(ROOT), f"VENV={folder}", "test-slurm"]
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    update, *lines = log.read_text().splitlines()
    assert update.startswith("installs update")
    assert lines[0].split()[:3] == ["installs", "install", "--yes"]
    assert {"slurmctld", "slurmd", "slurm-client", "munge"} <= {*lines[0].split()}
    assert (done.returncode == 0, [line.split()[0] for line in lines[1:]]) == (is_root, ["tests"] * is_root)
    assert is_root or "As root: apt-get install slurmctld" in done.stderr

"""Manifests: nothing that was given is read as something else."""

from __future__ import annotations

import dataclasses
import subprocess
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cosmati.launch.manifests import render
from tests.launch.test_manifests import KINDS, as_kubernetes_gives, request_of, script_of

# What a reader other than PyYAML takes for a truth or a number, where it stands plain.
MISREAD = [
    "y",
    "Y",
    "n",
    "N",
    "1e3",
    "1E3",
    "1e+3",
    "0o17",
    "on",
    "null",
    "~",
    "=",
    "017",
    "1_000",
    "12:30:45",
    "",
    ".",
]
DOLLARS = ["cost$$5", "$(OMP_NUM_THREADS)", "$$(OMP_NUM_THREADS)", "$", "$$", "$$$", "a$", "$(", "$()", "$HOME", "`id`"]
KUBERNETES = ["job", "jobset", "trainjob"]


def rendered(engine: str, kind: str, *arguments: str, job: str = "gpt", **environment: str) -> str:
    asked = request_of(**({"kind": kind} if kind else {}), max_seconds=None)
    command = ("/app/train.py", *arguments)
    program = dataclasses.replace(asked.program, command=command, environment=environment)
    return render(engine, dataclasses.replace(asked, program=program, job=job))


def variables_of(engine: str, kind: str, text: str) -> dict[str, str]:
    """Return what a program finds in its environment, as its scheduler fills it in."""
    last = list(yaml.safe_load_all(text))[-1]
    if engine == "skypilot":
        return dict(last["envs"])
    if engine == "dstack":
        return {name: as_dstack_gives(value) for name, value in last["env"].items()}
    listed = last["spec"]["trainer"]["env"] if kind == "trainjob" else pod_of(last, kind)["containers"][0]["env"]
    found: dict[str, str] = {}
    for one in listed:
        found[one["name"]] = as_kubernetes_gives(one.get("value", ""), found)
    return found


def pod_of(last: dict[str, Any], kind: str) -> dict[str, Any]:
    spec = last["spec"]["replicatedJobs"][0]["template"]["spec"] if kind == "jobset" else last["spec"]
    return dict(spec["template"]["spec"])


def as_dstack_gives(value: str) -> str:
    """Return a variable's value as dstack 0.22 does: `$$` is one `$`, and `${{ NAME }}` is filled in, or refused."""
    assert "${{" not in value.replace("$$", ""), "dstack would fill it in"
    return value.replace("$$", "$")


def arguments_by_bash(script: str) -> list[str]:
    """Return what a worker's program is given, by bash itself."""
    line = next(line for line in script.splitlines() if "cosmati.launch.worker" in line)
    words = line.split("cosmati.launch.worker ", 1)[1]
    told = subprocess.run(["bash", "-c", f"printf '%s\\0' {words}"], capture_output=True, text=True, check=True).stdout
    return told.split("\0")[1:-1]  # after the folder of the attempt


@pytest.mark.parametrize(("engine", "kind"), KINDS)
def test_every_text_is_in_quotes(engine: str, kind: str) -> None:
    environment = {f"T{number}": text for number, text in enumerate(MISREAD)}
    text = rendered(engine, kind, **environment)
    found = variables_of(engine, kind, text)
    assert {name: found[name] for name in environment} == environment
    values = [token for token in yaml.scan(text) if isinstance(token, yaml.ScalarToken)]
    plain = {token.value for token in values if token.plain}
    # What stands plain is a field's name, a whole number or a truth.
    assert not plain & {*MISREAD, "gpt", "bash", "ghcr.io/me/training:1"}
    for value in plain:
        assert value in {"true", "false"} or value.isdecimal() or f"{value}:" in text


@pytest.mark.parametrize("engine", ["skypilot", "dstack"])
def test_a_name_that_would_be_misread_is_in_quotes_too(engine: str) -> None:
    text = rendered(engine, "", y="1", n="2", N1="3", on="4", _1="5")
    told = text.split("envs:" if engine == "skypilot" else "env:")[1]
    for line in ('"y": "1"', '"n": "2"', 'N1: "3"', "'on': \"4\"", '"_1": "5"'):
        assert f"  {line}\n" in told


def test_lines_of_a_script_stay_lines() -> None:
    text = rendered("kubernetes", "job", "a" * 300, "a b " * 60)
    assert "      - |\n" in text.replace("          - |\n", "      - |\n")
    assert "set -eu\n" in text
    assert "\\\n" not in text, "a line is broken"


@pytest.mark.parametrize(("engine", "kind"), KINDS)
def test_dollars_come_through(engine: str, kind: str) -> None:
    more = [*DOLLARS, "${{ secrets.x }}", "${{ groups[0].nodes[0].IP_ADDRESS }}", "it's ${{ x }}"]
    environment = {f"T{number}": text for number, text in enumerate(more)}
    text = rendered(engine, kind, *more, **environment)
    found = variables_of(engine, kind, text)
    assert {name: found[name] for name in environment} == environment
    script = script_of(engine, kind, text)
    assert arguments_by_bash(script) == ["/app/train.py", *more]
    assert engine != "dstack" or "${{" not in script, "dstack would fill it in"


@given(st.text(alphabet="$(){}A a'\"", max_size=12))
def test_any_dollars_come_through_kubernetes(text: str) -> None:
    made = rendered("kubernetes", "job", A="1", T=text)
    assert variables_of("kubernetes", "job", made)["T"] == text


def test_what_we_render_for_a_shell_is_left_to_it() -> None:
    for kind in KUBERNETES:
        text = rendered("kubernetes", kind)
        assert '--local-addr="$$(/' not in text
        assert '--local-addr="$$(python -m' in text
        assert '--local-addr="$(python -m' in script_of("kubernetes", kind, text)

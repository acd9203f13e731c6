"""Manifests: nothing that was given vanishes or is read as something else, and what can't be is refused."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cosmati.errors import RunError
from cosmati.launch.job import JobRequest
from cosmati.launch.manifests import RENDERED, render
from cosmati.launch.manifests.rendered import RETRIES
from tests.launch.test_manifests import KINDS, as_kubernetes_gives, documents, request_of, script_of

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


@pytest.mark.long
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


@pytest.mark.parametrize("engine", ["skypilot", "dstack"])
@pytest.mark.parametrize("told", ["true", "True", "TRUE", "false", "False"])
def test_spot_is_true_or_false_in_any_case(engine: str, told: str) -> None:
    (made,) = documents(engine, spot=told)
    if engine == "skypilot":
        assert made["resources"]["use_spot"] is (told.lower() == "true")
    else:
        assert made["spot_policy"] == ("spot" if told.lower() == "true" else "on-demand")
    for other in ("yes", "1", "on"):
        with pytest.raises(RunError, match=f"spot='{other}' is neither true nor false"):
            documents(engine, spot=other)


def test_a_priority_stands_where_there_is_one() -> None:
    asked = request_of(max_seconds=None)
    assert yaml.safe_load(render("skypilot", asked, priority=-7))["resources"]["priority"] == -7
    assert yaml.safe_load(render("dstack", asked, priority=7))["priority"] == 7
    for engine, priority, told in (
        ("kubernetes", 7, "Leave out --priority"),
        ("skypilot", 1001, "from -1000 to 1000"),
        ("dstack", -1, "from 0 to 100"),
        ("dstack", 101, "from 0 to 100"),
    ):
        with pytest.raises(RunError, match=told):
            render(engine, asked, priority=priority)


@pytest.mark.parametrize("engine", RENDERED)
def test_retries_are_refused_and_restarts_named(engine: str) -> None:
    asked = request_of(max_seconds=None)
    with pytest.raises(RunError, match="--with restarts=9"):
        render(engine, asked, retries=9)
    assert JobRequest(name="gpt", program=asked.program).retries == RETRIES
    assert render(engine, asked, retries=RETRIES) == render(engine, asked)


def test_a_duration_is_rendered_or_refused() -> None:
    with pytest.raises(RunError, match="Leave out --max-duration"):
        render("skypilot", request_of(max_seconds=60))
    (jobset,) = documents("kubernetes", "jobset")
    # Else it would be begun again, with all of its time.
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["DeadlineExceeded"])
    short = yaml.safe_load(render("dstack", request_of(max_seconds=0.2)))
    assert short["max_duration"] == "1s", "0 s ends it before it begins"
    endless = yaml.safe_load(render("kubernetes", request_of(kind="jobset", max_seconds=None)))
    assert endless["spec"]["failurePolicy"] == {"maxRestarts": 10}


def test_a_trainjob_takes_the_nodes_of_an_accelerator() -> None:
    (made,) = documents("kubernetes", "trainjob", accelerator="a.b/gpu=H200")
    (patch,) = made["spec"]["runtimePatches"]
    (patched,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert patched["template"]["spec"]["template"]["spec"]["nodeSelector"] == {"a.b/gpu": "H200"}
    assert "nodeSelector" not in render("kubernetes", request_of(kind="trainjob"))


@pytest.mark.parametrize("engine", RENDERED)
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"nodes": "1-2"}, "nodes=1-2 can't be rendered.*--with nodes=2"),
        ({"nodes": "3-4"}, "nodes=3-4 can't be rendered.*--with nodes=4"),
        ({"image": ""}, "image is empty"),
        ({"image": "a b"}, "has no spaces"),
        ({"volume": ""}, "volume is empty"),
        ({"mount": ""}, "mount is empty"),
        ({"mount": "mnt/runs"}, "mount='mnt/runs' is no place"),
        ({"mount": "/"}, "mount='/' is no place"),
        ({"mount": "/mnt/../runs"}, "is no place"),
        ({"mount": "/mnt:ro"}, "is no place"),
        ({"cpus_per_node": "many"}, "cpus-per-node='many' is no whole number, 1 or more"),
        ({"cpus_per_node": "0"}, "cpus-per-node='0' is no"),
        ({"cpus_per_node": "-1"}, "cpus-per-node='-1' is no"),
        ({"cpus_per_node": ""}, "cpus-per-node is empty"),
        ({"memory": "0"}, "memory='0' is no whole number of GiB, 1 or more"),
        ({"gpus_per_node": "-1"}, "gpus-per-node='-1' is no whole number, 0 or more"),
        ({"restarts": "often"}, "restarts='often' is no"),
        ({"accelerator": " "}, "accelerator is empty"),
    ],
)
def test_what_no_scheduler_can_use_is_refused(engine: str, settings: dict[str, str], told: str) -> None:
    with pytest.raises(RunError, match=told):
        render(engine, request_of(max_seconds=None, **settings))


@pytest.mark.parametrize(
    ("engine", "settings", "told"),
    [
        ("skypilot", {"accelerator": "H200"}, "without gpus-per-node"),
        ("dstack", {"accelerator": "H200"}, "without gpus-per-node"),
        ("dstack", {"accelerator": "H200", "gpus_per_node": "0"}, "without gpus-per-node"),
        ("dstack", {"volume": "a:b"}, "volume='a:b' is no volume of dstack"),
        ("kubernetes", {"volume": "a:b"}, "volume='a:b' is no name in Kubernetes"),
        ("kubernetes", {"runtime": "torch"}, "A job has no runtime.*kind=trainjob"),
        ("kubernetes", {"runtime": "torch", "kind": "jobset"}, "A jobset has no runtime"),
        ("kubernetes", {"runtime": "Q q", "kind": "trainjob"}, "runtime='Q q' is no name"),
        ("kubernetes", {"namespace": "Not A Name"}, "namespace='Not A Name' is no name"),
        ("kubernetes", {"namespace": "a.b"}, "namespace='a.b' is no name"),
        ("kubernetes", {"namespace": "a" * 64}, "at most 63"),
        ("kubernetes", {"namespace": "-a"}, "is no name"),
        ("kubernetes", {"queue": "Q q"}, "queue='Q q' is no name"),
        ("kubernetes", {"queue": "q" * 64}, "at most 63"),
        ("kubernetes", {"accelerator": "=b"}, "accelerator='=b' names no nodes"),
        ("kubernetes", {"accelerator": "a=b=c"}, "names no nodes"),
        ("kubernetes", {"accelerator": "a=b c"}, "names no nodes"),
        ("kubernetes", {"accelerator": "A_B/c=d"}, "names no nodes"),
        ("kubernetes", {"accelerator": "/c=d"}, "names no nodes"),
        ("kubernetes", {"accelerator": "c=" + "d" * 64}, "names no nodes"),
        ("kubernetes", {"accelerator": "=b", "kind": "trainjob"}, "names no nodes"),
    ],
)
def test_what_this_scheduler_cannot_use_is_refused(engine: str, settings: dict[str, str], told: str) -> None:
    with pytest.raises(RunError, match=told):
        render(engine, request_of(max_seconds=None, **settings))


def test_what_a_scheduler_can_use_is_not_refused() -> None:
    asked = {"namespace": "a-1", "queue": "team.b", "volume": "runs.v2", "accelerator": "x.y/a_b.c="}
    pod = pod_of(documents("kubernetes", "job", **asked)[1], "job")
    assert pod["nodeSelector"] == {"x.y/a_b.c": ""}, "a label may be without a value"
    assert documents("dstack", volume="/nfs/runs")[0]["volumes"] == ["/nfs/runs:/mnt/runs"]
    assert documents("dstack", nodes="2-2", mount="/mnt/runs/")[0]["volumes"] == ["runs:/mnt/runs"]


@pytest.mark.parametrize(("job", "name"), [("j", "run-j"), ("7", "run-7"), ("Ünï", "run-n"), ("1" * 60, None)])
def test_a_name_is_one_that_every_scheduler_takes(job: str, name: str | None) -> None:
    (made,) = yaml.safe_load_all(rendered("dstack", "", job=job))
    assert name is None or made["name"] == name
    assert 2 <= len(made["name"]) <= 40


def test_nodes_of_a_job_meet_before_they_are_ready() -> None:
    service, _ = documents("kubernetes", "job")
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert documents("kubernetes", "jobset")[0]["spec"]["network"]["publishNotReadyAddresses"] is True


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_a_pod_has_shared_memory_as_large_as_its_own(kind: str) -> None:
    pod = pod_of(documents("kubernetes", kind)[-1], kind)
    assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]


@pytest.mark.parametrize(("engine", "kind"), KINDS)
def test_a_program_begins_in_its_own_folder(engine: str, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "it's $(mine) $$"
    folder.mkdir()
    asked = request_of(**({"kind": kind} if kind else {}), max_seconds=None)
    text = render(engine, dataclasses.replace(asked, program=dataclasses.replace(asked.program, folder=folder)))
    line = next(line for line in script_of(engine, kind, text).splitlines() if line.startswith("cd "))
    told = subprocess.run(["bash", "-c", f"{line} && pwd"], capture_output=True, text=True, check=True).stdout
    assert told == f"{folder}\n"

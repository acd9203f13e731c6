"""Manifests: what they say is what was asked for; their scripts are bash, and give torchrun what it needs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cosmati.errors import RunError
from cosmati.launch.agents import node_counts
from cosmati.launch.engine import AttemptRequest, RankProgram
from cosmati.launch.manifests import RENDERED, render

KINDS = [("kubernetes", "job"), ("kubernetes", "jobset"), ("kubernetes", "trainjob"), ("skypilot", ""), ("dstack", "")]
# What each scheduler tells a container of node 1, of 2.
TOLD = {
    "job": {"JOB_COMPLETION_INDEX": "1", "COSMATI_NODE": "node-b"},
    "jobset": {"JOB_COMPLETION_INDEX": "1", "COSMATI_NODE": "node-b", "COSMATI_RESTART": "3"},
    "trainjob": {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "first", "PET_MASTER_PORT": "29500", "HOSTNAME": "node-b"},
    "skypilot": {
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_TASK_ID": "task-7",
        "HOSTNAME": "node-b",
    },
    "dstack": {
        "DSTACK_NODE_RANK": "1",
        "DSTACK_MASTER_NODE_IP": "10.0.0.1",
        "DSTACK_RUN_NAME": "gpt",
        "HOSTNAME": "node-b",
    },
}
ENDPOINTS = {
    "job": "gpt-0.gpt:29400",
    "jobset": "gpt-node-0-0.gpt:29400",
    "trainjob": "first:29500",
    "skypilot": "10.0.0.1:29400",
    "dstack": "10.0.0.1:29400",
}


def request_of(ranks: int = 16, *, max_seconds: float | None = 3600.0, **settings: str) -> AttemptRequest:
    program = RankProgram(
        command=("-m", "cosmati", "train", "/app/it's mine.py", "--run-folder", "/mnt/runs/gpt"),
        folder=Path("/"),
        python=Path("/home/me/.venv/bin/python"),
        environment={"MESSAGE": 'two "words"'},
    )
    given = {"image": "ghcr.io/me/training:1", "volume": "runs", "nodes": "2", **settings}
    asked = {name.replace("_", "-"): value for name, value in given.items()}
    folder = Path("/queue/jobs/gpt/attempt-0")
    return AttemptRequest(
        job="gpt", number=0, program=program, ranks=ranks, folder=folder, max_seconds=max_seconds, settings=asked
    )


def documents(engine: str, kind: str = "", **settings: str) -> list[dict[str, Any]]:
    more = {"kind": kind} if kind else {}
    # SkyPilot ends no job by a clock.
    asked = request_of(max_seconds=None if engine == "skypilot" else 3600.0, **more, **settings)
    return list(yaml.safe_load_all(render(engine, asked)))


def as_kubernetes_gives(text: str, known: Mapping[str, str]) -> str:
    """Return a command's or a variable's text as a container gets it, by Kubernetes' documents on `$(NAME)`."""
    given, at = "", 0
    while at < len(text):
        follows = text[at + 1 : at + 2]
        end = text.find(")", at + 2)
        if text[at] != "$" or follows not in ("$", "("):
            given, at = given + text[at], at + 1
        elif follows == "$":
            given, at = given + "$", at + 2
        elif end < 0:
            given, at = given + "$(", at + 2
        else:
            name = text[at + 2 : end]
            given, at = given + known.get(name, f"$({name})"), end + 1
    return given


def script_of(engine: str, kind: str, text: str = "") -> str:
    """Return what bash is given, of a manifest."""
    last = list(yaml.safe_load_all(text))[-1] if text else documents(engine, kind)[-1]
    script = _script_in(last, engine, kind)
    return as_kubernetes_gives(script, {"OMP_NUM_THREADS": "1"}) if engine == "kubernetes" else script


def _script_in(last: dict[str, Any], engine: str, kind: str) -> str:
    if engine == "skypilot":
        return str(last["run"])
    if engine == "dstack":
        return "\n".join(last["commands"])
    if kind == "trainjob":
        return str(last["spec"]["trainer"]["command"][2])
    spec = last["spec"]["replicatedJobs"][0]["template"]["spec"] if kind == "jobset" else last["spec"]
    return str(spec["template"]["spec"]["containers"][0]["command"][2])


@pytest.mark.parametrize(("engine", "kind"), KINDS)
@pytest.mark.parametrize("index", [0, 1])
def test_bash_gives_torchrun_what_it_needs(engine: str, kind: str, index: int, tmp_path: Path) -> None:
    """The script is run, with a `python` that writes down what it was given."""
    python = tmp_path / "python"
    told_by = '"$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" "$COSMATI_PLACE" "$@"'
    python.write_text(
        f'#!/bin/sh\nprintf "%s\\n" {told_by} > {tmp_path}/given-$2\n'
        '[ "$2" != cosmati.launch.address ] || echo "at $3"\n'
    )
    python.chmod(0o755)
    told = {
        name: str(index) if "RANK" in name or "INDEX" in name else value for name, value in TOLD[kind or engine].items()
    }
    script = script_of(engine, kind).replace("mkdir -p", "true")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **told}
    subprocess.run(["bash", "-c", script], check=True, env=environment)
    own_store, place, *words = (tmp_path / "given-torch.distributed.run").read_text().splitlines()
    # Agents count restarts each for themselves, and ranks mustn't meet by that number.
    assert (own_store, place) == ("1", "node-b")
    options = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--") and "=" in word)
    assert options["nnodes"] == "2"
    assert options["nproc-per-node"] == "8"
    assert options["rdzv-endpoint"] == ENDPOINTS[kind or engine]
    assert options["local-addr"] == f"at {ENDPOINTS[kind or engine]}"
    assert options["rdzv-conf"] == f"is_host={'false' if index else 'true'}"
    assert options["rdzv-id"].endswith({"jobset": "-3", "skypilot": "task-7"}.get(kind or engine, "gpt"))
    worker = words.index("cosmati.launch.worker")
    assert words[worker - 1 : worker + 2] == ["-m", "cosmati.launch.worker", "/mnt/runs/.launch/gpt-0"]
    assert words[worker + 2 :] == list(request_of().program.command)
    # The first node alone makes an earlier writer stale.
    assert (tmp_path / "given-cosmati.launch.agents").exists() is (index == 0)


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_kueue_finds_its_queue(kind: str) -> None:
    last = documents("kubernetes", kind, queue="team")[-1]
    assert last["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert "kueue.x-k8s.io/queue-name" not in documents("kubernetes", kind)[-1]["metadata"]["labels"]


def test_pods_of_a_job_find_each_other() -> None:
    service, job = documents("kubernetes", "job")
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"] == "gpt"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["backoffLimit"]) == (2, 2, 20)


def test_what_was_asked_for_stands_where_each_looks_for_it() -> None:
    asked = {"gpus_per_node": "8", "cpus_per_node": "32", "memory": "256", "restarts": "4"}
    pod = documents("kubernetes", "job", accelerator="gpu=H200", **asked)[1]["spec"]["template"]["spec"]
    wanted = {"cpu": "32", "memory": "256Gi", "nvidia.com/gpu": "8"}
    assert pod["containers"][0]["resources"] == {"requests": wanted, "limits": wanted}
    assert pod["nodeSelector"] == {"gpu": "H200"}
    assert {"name": "CUBLAS_WORKSPACE_CONFIG", "value": ":4096:8"} in pod["containers"][0]["env"]
    assert {"name": "MESSAGE", "value": 'two "words"'} in pod["containers"][0]["env"]
    sky = documents("skypilot", accelerator="H200", spot="true", infra="aws/eu-west-1", **asked)[0]
    assert sky["resources"] == {
        "image_id": "docker:ghcr.io/me/training:1",
        "job_recovery": {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": 4},
        "accelerators": "H200:8",
        "cpus": "32+",
        "memory": "256+",
        "infra": "aws/eu-west-1",
        "use_spot": True,
    }
    assert sky["volumes"] == {"/mnt/runs": "runs"}
    dstack = documents("dstack", accelerator="H200", spot="false", **asked)[0]
    assert dstack["resources"] == {"cpu": "32..", "memory": "256GB..", "gpu": "H200:8"}
    assert (dstack["spot_policy"], dstack["max_duration"]) == ("on-demand", "3600s")
    assert documents("kubernetes", "trainjob", **asked)[0]["spec"]["activeDeadlineSeconds"] == 3600


def test_without_gpus_none_are_asked_for() -> None:
    pod = documents("kubernetes", "job")[1]["spec"]["template"]["spec"]
    assert "resources" not in pod["containers"][0]
    assert "CUBLAS_WORKSPACE_CONFIG" not in {one["name"] for one in pod["containers"][0]["env"]}
    assert "accelerators" not in documents("skypilot")[0]["resources"]


@pytest.mark.parametrize("engine", RENDERED)
def test_the_header_says_that_it_is_not_tried(engine: str) -> None:
    assert "not tried on a live cluster" in render(engine, request_of(max_seconds=None)).splitlines()[1]


@pytest.mark.parametrize(
    ("engine", "settings", "told"),
    [
        ("kubernetes", {"kind": "pod"}, "job, jobset, trainjob"),
        ("kubernetes", {"colour": "red"}, "no setting colour"),
        ("dstack", {"queue": "team"}, "no setting queue"),
        ("kubernetes", {"accelerator": "H200"}, "names no nodes"),
        ("kubernetes", {"nodes": "3"}, "can't be shared by 3 nodes"),
        ("skypilot", {"memory": "lots"}, "whole number of GiB"),
        ("kubernetes", {"mount": "/data"}, "doesn't lie on the shared volume"),
        ("nomad", {}, "There are kubernetes, skypilot, dstack"),
    ],
)
def test_what_has_no_sense_is_refused(engine: str, settings: dict[str, str], told: str) -> None:
    with pytest.raises(RunError, match=told):
        render(engine, request_of(**settings))


@pytest.mark.parametrize("name", ["image", "volume"])
def test_what_lacks_is_named(name: str) -> None:
    asked = request_of()
    lacking = {key: value for key, value in asked.settings.items() if key != name}
    with pytest.raises(RunError, match=f"--with {name}="):
        render(
            "dstack",
            AttemptRequest(job="a", number=0, program=asked.program, ranks=2, folder=asked.folder, settings=lacking),
        )


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_nodes_that_may_go_on_share_the_ranks_evenly(fewest: int, more: int, per_node: int) -> None:
    most = fewest + more - 1
    counts, each = node_counts(most * per_node, f"{fewest}-{most}")
    assert each == per_node
    ranks = most * per_node
    assert counts == [n for n in range(most, fewest - 1, -1) if ranks % (n * per_node) == 0 and most % n == 0]


def test_nodes_that_may_go_on_hold_whole_replicas() -> None:
    assert node_counts(12, "1-12") == ([12, 6, 4, 3, 2, 1], 1)
    assert node_counts(12, "1-12", 2) == ([12, 6, 4, 2, 1], 1), "one rank alone computes everything"
    assert node_counts(12, "1-6", 4) == ([6, 2], 2)


@pytest.mark.parametrize("text", ["", "two", "2-", "-2", "0", "2-1", "1-2-3"])
def test_what_is_no_number_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(RunError):
        node_counts(4, text)

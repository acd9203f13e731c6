"""Manifests against the schemas of those who read them: Kubernetes, Kubeflow, JobSet, SkyPilot, dstack.

`make test-manifests` has these packages, in an environment of its own.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from cosmati.launch.manifests import render
from tests.launch.test_manifests import documents, request_of
from tests.launch.test_manifests_more import DOLLARS, arguments_by_bash, rendered

FULL = {"gpus_per_node": "8", "cpus_per_node": "32", "memory": "256", "restarts": "4"}
QUEUED = {"queue": "team", "namespace": "training", **FULL}


def _is_kept(model: Any, given: dict[str, Any]) -> bool:
    """Whether a model of Kubeflow's, which drops what it doesn't know without a word, gives back all of it."""
    return bool(model.from_dict(copy.deepcopy(given)).to_dict() == given)


@pytest.mark.parametrize("asked", [{}, QUEUED, {"accelerator": "gpu=H200", **FULL}])
def test_kubernetes_takes_the_job_and_its_service(asked: dict[str, str]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    made = documents("kubernetes", "job", **asked)
    assert [one["kind"] for one in made] == ["Service", "Job"]
    for one in made:
        validate.validate(one, "1.34", strict=True)
    broken = copy.deepcopy(made[1])
    broken["spec"]["completion"] = 2
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, "1.34", strict=True)


@pytest.mark.parametrize("asked", [{}, QUEUED, {"accelerator": "a.b/gpu=H200", "runtime": "torch-mine", **FULL}])
def test_kubeflow_keeps_every_word_of_a_trainjob(asked: dict[str, str]) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (made,) = documents("kubernetes", "trainjob", **asked)
    assert _is_kept(models.TrainerV1alpha1TrainJob, made)
    made["spec"]["podTemplateOverrides"] = []  # of an older Kubeflow
    assert not _is_kept(models.TrainerV1alpha1TrainJob, made)


@pytest.mark.parametrize("asked", [{}, QUEUED])
def test_jobset_keeps_every_word(asked: dict[str, str]) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (made,) = documents("kubernetes", "jobset", **asked)
    assert _is_kept(models.JobsetV1alpha2JobSet, made)
    made["spec"]["failurePolicy"]["maxRetries"] = 3
    assert not _is_kept(models.JobsetV1alpha2JobSet, made)


@pytest.mark.parametrize("asked", [{}, {"accelerator": "H200", "spot": "true", "infra": "aws/eu-west-1", **FULL}])
def test_skypilot_takes_the_task(asked: dict[str, str]) -> None:
    schemas, jsonschema = pytest.importorskip("sky.utils.schemas"), pytest.importorskip("jsonschema")
    (made,) = documents("skypilot", **asked)
    jsonschema.validate(made, schemas.get_task_schema())
    jsonschema.validate(made["resources"], schemas.get_resources_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**made, "nodes": 2}, schemas.get_task_schema())


def test_skypilot_and_dstack_take_the_priorities_that_are_rendered() -> None:
    """And none beyond: the bounds are theirs."""
    schemas, jsonschema = pytest.importorskip("sky.utils.schemas"), pytest.importorskip("jsonschema")
    configurations = pytest.importorskip("dstack._internal.core.models.configurations")
    errors = pytest.importorskip("dstack._internal.core.errors")
    asked = request_of(max_seconds=None)
    for priority in (-1000, 1000):
        resources = yaml.safe_load(render("skypilot", asked, priority=priority))["resources"]
        jsonschema.validate(resources, schemas.get_resources_schema())
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**resources, "priority": 1001}, schemas.get_resources_schema())
    made = yaml.safe_load(render("dstack", asked, priority=100))
    assert configurations.parse_run_configuration(copy.deepcopy(made)).priority == 100
    with pytest.raises(errors.ConfigurationError):
        configurations.parse_run_configuration({**made, "priority": 101})


def test_dstack_fills_in_nothing_of_what_was_given() -> None:
    """By its own code: in variables, and in commands."""
    variables = pytest.importorskip("dstack._internal.utils.interpolator")
    nodes = pytest.importorskip("dstack._internal.utils.nodes_interpolator")
    texts = [*DOLLARS, "${{ secrets.x }}", "${{ groups[0].nodes[0].IP_ADDRESS }}", "${{ groups.x }}", "a ${{"]
    given = {f"T{number}": text for number, text in enumerate(texts)}
    made = yaml.safe_load(rendered("dstack", "", *texts, **given))
    interpolate = variables.VariablesInterpolator({"secrets": {"x": "filled in"}}).interpolate_or_error
    assert {name: interpolate(value) for name, value in made["env"].items() if name in given} == given
    (script,) = made["commands"]
    filled = nodes.interpolate_groups_ip_address(script, [["10.0.0.1"]])
    assert arguments_by_bash(filled) == ["/app/train.py", *texts]


@pytest.mark.parametrize("asked", [{}, {"accelerator": "H200", "spot": "true", **FULL}])
def test_dstack_takes_the_task(asked: dict[str, str]) -> None:
    configurations = pytest.importorskip("dstack._internal.core.models.configurations")
    errors = pytest.importorskip("dstack._internal.core.errors")
    (made,) = documents("dstack", **asked)
    parsed = configurations.parse_run_configuration(copy.deepcopy(made))
    assert (parsed.nodes, parsed.name, parsed.commands) == (2, "gpt", made["commands"])
    assert parsed.max_duration == 3600
    if asked:
        assert parsed.resources.gpu.count.min == 8
    with pytest.raises(errors.ConfigurationError):
        configurations.parse_run_configuration({**made, "num_nodes": 2})

"""The packages of trackers as their documentation describes them, writing down what they are told.

A call that the documentation doesn't name, or an argument that it doesn't have, is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal


class CometExperiment:
    """https://www.comet.com/docs/v2/api-and-sdk/python-sdk/reference/Experiment"""

    def __init__(self, key: str) -> None:
        self.key, self.name, self.is_ended = key, "", False
        self.tags: set[str] = set()
        self.parameters: dict[str, object] = {}
        self.others: dict[str, object] = {}
        self.metrics: list[tuple[str, int, float]] = []

    def set_name(self, name: str) -> None:
        self.name = name

    def add_tag(self, tag: str) -> None:
        self.tags.add(tag)

    def log_parameters(
        self, parameters: Mapping[str, object], prefix: str | None = None, nested_support: bool = True, step: Any = None
    ) -> None:
        self.parameters |= parameters

    def log_metrics(
        self, dic: Mapping[str, float], prefix: str | None = None, step: int | None = None, epoch: int | None = None
    ) -> None:
        assert not self.is_ended
        assert step is not None
        self.metrics += [(name, step, value) for name, value in dic.items()]

    def log_other(self, key: str, value: object, include_context: bool = True) -> None:
        self.others[key] = value

    def end(self) -> None:
        self.is_ended = True


class CometPackage:
    """https://www.comet.com/docs/v2/api-and-sdk/python-sdk/reference/start"""

    def __init__(self) -> None:
        self.experiments: dict[str, CometExperiment] = {}
        self.is_online = True

    @staticmethod
    def ExperimentConfig(  # noqa: N802
        disabled: bool | None = None,
        log_code: bool | None = True,
        log_graph: bool | None = True,
        offline_directory: str | None = None,
        parse_args: bool | None = True,
        log_env_details: bool | None = True,
        auto_output_logging: str | Literal[False] | None = None,
    ) -> SimpleNamespace:
        return SimpleNamespace(offline_directory=offline_directory)

    def start(
        self,
        api_key: str | None = None,
        workspace: str | None = None,
        project_name: str | None = None,
        experiment_key: str | None = None,
        mode: str | None = None,
        online: bool | None = None,
        experiment_config: Any = None,
    ) -> CometExperiment:
        assert experiment_key is not None
        assert experiment_key.isalnum()
        assert 32 <= len(experiment_key) <= 50
        assert mode == "get_or_create"
        assert online == (experiment_config.offline_directory is None)
        found = self.experiments.setdefault(experiment_key, CometExperiment(experiment_key))
        found.is_ended = False
        return found


class WandbRun:
    """https://docs.wandb.ai/ref/python/run, online: an earlier run can be opened again."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        self.tags: tuple[str, ...] = ()
        self.summary: dict[str, object] = {}
        self.history: list[tuple[int, dict[str, float]]] = []
        self.exit_codes: list[int | None] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert step is not None
        if not self.history or step >= self.history[-1][0]:  # "steps must monotonically increase": others are ignored
            self.history.append((step, data))

    def finish(self, exit_code: int | None = None) -> None:
        self.exit_codes.append(exit_code)


class WandbPackage:
    """https://docs.wandb.ai/ref/python/init"""

    def __init__(self) -> None:
        self.runs: dict[str, WandbRun] = {}

    @staticmethod
    def Settings(*, silent: bool, console: str, disable_git: bool, x_disable_stats: bool) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(silent=silent)

    def init(
        self,
        entity: str | None = None,
        project: str | None = None,
        dir: str | None = None,  # noqa: A002
        id: str | None = None,  # noqa: A002
        name: str | None = None,
        config: dict[str, Any] | None = None,
        group: str | None = None,
        job_type: str | None = None,
        mode: Literal["online", "offline", "disabled", "shared"] | None = None,
        resume: bool | Literal["allow", "never", "must", "auto"] | None = None,
        settings: Any = None,
    ) -> WandbRun:
        assert id is not None
        if id in self.runs:
            assert resume in ("allow", "must"), "a run that is there"
            return self.runs[id]
        self.runs[id] = WandbRun({"name": name, "group": group, "config": config, "project": project})
        return self.runs[id]

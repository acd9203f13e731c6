"""MLflow: a database or a server."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cosmati.errors import RunError
from cosmati.integrations.tracker import Config, TrackedRun, require, tag_of

_BATCH = 100
"""Parameters a request; MLflow's own limit."""
_MAX_TEXT, _MAX_NAME = 500, 250
_KEY = "cosmati.key"


@dataclass(kw_only=True)
class MLflow:
    """Stores each attempt as a run with the tag `cosmati.group`. MLflow keeps a value once that is sent twice.

    Args:
        uri: of the tracking server, or `sqlite:///FILE`; empty takes MLFLOW_TRACKING_URI, or `sqlite:///mlflow.db`.
        experiment: its name; it is made where there is none.

    Raises:
        MissingExtraError: mlflow isn't installed.
        RunError: the address is a plain folder, which MLflow no longer writes.
    """

    uri: str = ""
    experiment: str = "cosmati"
    _client: Any = field(default=None, init=False, repr=False)
    _run_id: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        self.uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI", "") or "sqlite:///mlflow.db"
        if "://" not in self.uri or self.uri.startswith("file:"):
            msg = (
                f"mlflow: uri={self.uri} is a folder, and MLflow has refused its file store since 3.17. Give a "
                "database, uri=sqlite:///mlflow.db, or a server, uri=http://HOST:5000."
            )
            raise RunError(msg)
        self._package = require("mlflow.tracking", "MLflow")
        self._entities = require("mlflow.entities", "MLflow")
        self.label, self.where, self.rewrites = "mlflow", f"{self.uri} {self.experiment}", True

    def _connect(self) -> Any:  # noqa: ANN401
        if self._client is None:
            self._client = self._package.MlflowClient(tracking_uri=self.uri)
        return self._client

    def _experiment(self) -> str:
        client = self._connect()
        found = client.get_experiment_by_name(self.experiment)
        return str(found.experiment_id if found is not None else client.create_experiment(self.experiment))

    def _find(self, run: TrackedRun, attempt: int) -> str:
        wanted = f"tags.`{_KEY}` = '{run.key(attempt)}'"
        found = self._connect().search_runs([self._experiment()], wanted, max_results=1)
        return str(found[0].info.run_id) if found else ""

    def open(self, run: TrackedRun, attempt: int, first_step: int, config: Config) -> None:
        """Make the attempt's run, or go on with it."""
        client = self._connect()
        self._run_id = self._find(run, attempt)
        if not self._run_id:
            tags = {_KEY: run.key(attempt), "cosmati.group": run.name, "cosmati.attempt": str(attempt)}
            made = client.create_run(self._experiment(), run_name=run.title(attempt), tags=tags)
            self._run_id = str(made.info.run_id)
        told = {_name(key): str(value)[:_MAX_TEXT] for key, value in {**config, "first_step": first_step}.items()}
        params = [self._entities.Param(key, value) for key, value in told.items()]
        known = client.get_run(self._run_id).data.params  # They can't be changed.
        params = [one for one in params if one.key not in known]
        for start in range(0, len(params), _BATCH):
            client.log_batch(self._run_id, params=params[start : start + _BATCH])

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Log a batch of metrics."""
        metric = self._entities.Metric
        told = [metric(_name(name), value, int(time * 1000), step) for name, value in values.items()]
        if told:
            self._connect().log_batch(self._run_id, metrics=told)

    def summary(self, values: Mapping[str, float]) -> None:
        """Set tags: a metric would be one more point."""
        for name, value in values.items():
            self._connect().set_tag(self._run_id, _name(f"summary.{name}"), repr(value))

    def artifact(self, path: Path, digest: str) -> None:
        """Set a tag."""
        self._connect().set_tag(self._run_id, _name(f"artifact.{path.name}"), f"{path} {digest}")

    def supersede(self, run: TrackedRun, attempt: int, from_step: int) -> bool:
        """Set a tag on the attempt's run."""
        found = self._find(run, attempt)
        if found:
            self._connect().set_tag(found, "cosmati.superseded", tag_of(from_step))
        return bool(found)

    def close(self, outcome: str) -> None:
        """Set the run's status: finished, killed or failed."""
        if self._run_id:
            status = {"completed": "FINISHED", "exhausted": "FINISHED", "stopped": "KILLED"}.get(outcome, "FAILED")
            self._connect().set_tag(self._run_id, "cosmati.outcome", outcome)
            if outcome != "running":
                self._connect().set_terminated(self._run_id, status)
            self._run_id = ""


def _name(text: str) -> str:
    """Return a name that MLflow takes; where that's another one, with a few digits of the text's digest.

    Without them two names would become one, and two curves be drawn as one.
    """
    name = "/".join(part for part in re.sub(r"[^\w\-./ ]", "_", text).split("/") if part.strip("."))
    if name == text and 0 < len(name) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:6]
    return f"{name[: _MAX_NAME - 7]}-{digest}".lstrip("-")

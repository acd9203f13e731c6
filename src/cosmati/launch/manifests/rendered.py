"""Manifests as text, by the scheduler's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import yaml

from cosmati.errors import RunError
from cosmati.launch.engine import AttemptRequest
from cosmati.launch.manifests import dstack, kubernetes, skypilot
from cosmati.launch.manifests.container import ContainerJob, container_job

_Documents = Callable[[ContainerJob], list[dict[str, Any]]]
RENDERED: Final[dict[str, tuple[_Documents, tuple[str, ...], str]]] = {
    "kubernetes": (kubernetes.documents, kubernetes.OWN, "kubectl apply -f FILE"),
    "skypilot": (skypilot.documents, skypilot.OWN, "sky jobs launch FILE"),
    "dstack": (dstack.documents, dstack.OWN, "dstack apply -f FILE"),
}
"""By name: what makes its documents, its own settings, and the command that takes them."""
_HEADER = """\
# Rendered by: cosmati launch --on {engine} --dry-run. Hand it over with: {command}
# Checked against the schema of {engine}, and not tried on a live cluster: read it before you apply it.
"""


def render(engine: str, request: AttemptRequest) -> str:
    """Return a manifest, as YAML.

    Raises:
        RunError: there's none for this engine, or a setting is unknown, lacks or has no sense.
    """
    if engine not in RENDERED:
        msg = f"There's no manifest for {engine!r}. There are {', '.join(RENDERED)}."
        raise RunError(msg)
    documents, own, command = RENDERED[engine]
    made = documents(container_job(engine, request, own))
    text = yaml.dump_all(made, Dumper=_Blocks, sort_keys=False, width=120)
    return _HEADER.format(engine=engine, command=command) + text


class _Blocks(yaml.SafeDumper):
    """Writes a script as people do: line by line."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002  (its base's)
        """Write a thing twice where it stands twice."""
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Blocks.add_representer(str, _write_text)

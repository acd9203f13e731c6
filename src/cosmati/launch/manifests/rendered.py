"""Manifests as text, by the scheduler's name."""

from __future__ import annotations

import re
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
RETRIES: Final = 5
"""What the launcher takes where nothing is said: a job that asks for so many asks for nothing."""
_PLAIN = re.compile("/?[A-Za-z][A-Za-z0-9_./-]+")
"""No reader takes a word of two letters for a number; PyYAML itself quotes `on`, `yes`, `null` and their like."""
_NO_WIDTH = 10**6  # lines aren't broken
_HEADER = """\
# Rendered by: cosmati launch --on {engine} --dry-run. Hand it over with: {command}
# Checked against the schema of {engine}, and not tried on a live cluster: read it before you apply it.
"""


def render(engine: str, request: AttemptRequest, *, priority: int = 0, retries: int = RETRIES) -> str:
    """Return a manifest, as YAML.

    Args:
        engine: the scheduler's name.
        request: an attempt.
        priority: as the launcher has it: higher ones start first.
        retries: as the launcher has them, which no scheduler counts.

    Raises:
        RunError: there's none for this engine, or a setting is unknown, lacks or has no sense, or can't be rendered.
    """
    if engine not in RENDERED:
        msg = f"There's no manifest for {engine!r}. There are {', '.join(RENDERED)}."
        raise RunError(msg)
    if retries != RETRIES:
        msg = (
            f"{engine} doesn't count failures in a row that get no further, and {retries} retries were given. Leave "
            f"out --retries, and say how often it may begin again in all: --with restarts={retries}"
        )
        raise RunError(msg)
    documents, own, command = RENDERED[engine]
    made = documents(container_job(engine, request, own, priority))
    text = yaml.dump_all(made, Dumper=_Quoted, sort_keys=False, width=_NO_WIDTH)
    return _HEADER.format(engine=engine, command=command) + text


class _Quoted(yaml.SafeDumper):
    """Writes a script as people do, line by line, and every other text in quotes.

    What reads it may be older or newer than PyYAML: kubectl takes a plain `y` for true and `1e3` for a number.
    """

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002  (its base's)
        """Write a thing twice where it stands twice."""
        return True

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:  # noqa: ANN401
        """Write names of fields plain, as everybody does, where all readers take them for text."""
        node = super().represent_mapping(tag, mapping, flow_style)
        for key, _ in node.value:
            if _PLAIN.fullmatch(key.value):
                key.style = None
        return node


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else '"')


_Quoted.add_representer(str, _write_text)

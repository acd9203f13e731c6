"""YAML for what is signed: plain values alone, and each of them with its line."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import yaml

_MAX_DEPTH = 20
"""Of nested lists and mappings: a policy has five."""


def load_yaml(text: str) -> tuple[Any, yaml.Node | None]:
    """Return a document's content, and its nodes, which know their lines.

    Raises:
        ValueError: it isn't the YAML that's allowed here; the message names the line.
    """
    try:
        loader = _StrictLoader(text)
        node = loader.get_single_node()
        return (None if node is None else loader.construct_document(node)), node
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = f"#x{error.character:04x}" if isinstance(error.character, int) else repr(error.character)
        raise ValueError(f"line {line}: the character {character} isn't allowed") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ValueError(
            f"line {mark.line + 1 if mark else 1}: {', '.join(filter(None, (error.context, error.problem)))}"
        ) from error


def line_of(node: yaml.Node | None, place: Sequence[object]) -> int:
    """Return the line, from 1, of what lies at a place: keys, and numbers from 0; of what is nearest around it."""
    line = 1 if node is None else node.start_mark.line + 1
    for part in place:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == part), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            found = (node.value[part],) * 2
        else:
            found = None
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader with YAML 1.2's plain scalars, and without duplicate keys, anchors, aliases and tags."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {  # type: ignore[misc]
        None: [
            ("tag:yaml.org,2002:bool", re.compile(r"(?:true|false)\Z")),
            ("tag:yaml.org,2002:null", re.compile(r"(?:null|~|)\Z")),
            ("tag:yaml.org,2002:int", re.compile(r"-?(?:0|[1-9][0-9]*)\Z")),
            (
                "tag:yaml.org,2002:float",
                re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?\Z"),
            ),
        ]
    }
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse anchors, aliases, tags and a nest of nests before a node is built."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _refused("anchors and aliases aren't allowed", event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise _refused(f"tags aren't allowed: {event.tag}", event.start_mark)
        if self._depth > _MAX_DEPTH:
            raise _refused(f"lists and mappings are nested deeper than {_MAX_DEPTH}", event.start_mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: ANN401  (SafeLoader's)
        """Name the line of what Python can't read, such as a number of thousands of digits."""
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise _refused(str(error), node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse keys that aren't strings or come twice, then build the mapping."""
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # else a list is still empty
            if not isinstance(key, str):
                raise _refused(f"key {key!r} isn't a string; quote it", key_node.start_mark)
            if key in seen:
                raise _refused(f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _refused(problem: str, mark: Any) -> yaml.MarkedYAMLError:  # noqa: ANN401  (YAML's mark)
    return yaml.constructor.ConstructorError(None, None, problem, mark)

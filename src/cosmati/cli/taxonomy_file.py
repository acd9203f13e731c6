"""A taxonomy in a file: YAML or JSON with name, version and classes, and those of them that are sensitive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cosmati.errors import ProvenanceError
from cosmati.provenance.taxonomy import Taxonomy


class _Words(yaml.BaseLoader):
    """YAML whose words stay words, and where no key takes another one's place."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := sorted({str(key) for key in keys if keys.count(key) > 1}):
            raise yaml.constructor.ConstructorError(None, None, f"it has {twice[0]!r} twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_taxonomy(path: Path) -> Taxonomy:
    """Return the taxonomy of a file: its name, version and classes.

    Raises:
        ProvenanceError: it can't be read, or is none.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Words)  # noqa: S506  (strings alone)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ProvenanceError(f"The taxonomy {path} can't be read: {error}. It has name, version, classes.") from error
    if not isinstance(content, dict):
        raise ProvenanceError(f"The taxonomy {path} is no mapping. It has name, version and classes.")
    return Taxonomy.from_mapping(content)

"""Policies to begin with, each for a field: with the classes that it speaks of, and regions for kinds of models."""

from __future__ import annotations

import re
from importlib.resources import files

import yaml

from cosmati.errors import PolicyError
from cosmati.provenance.taxonomy import Taxonomy, closest

TEMPLATES = {
    "rights-compliant": "What may be learnt from works, by the rights under which each was obtained.",
    "personal-data": "What may be learnt from data about people, by the ground on which they are processed.",
    "medical": "What may be learnt from clinical sources, by their kind and by how certain their evidence is.",
    "legal": "Binding sources over persuasive ones, and current ones over those overruled or repealed.",
}
"""What each is about, by its name."""
MODELS = {
    "transformer": "Cosmati's GPT, and models whose parts are called alike",
    "llama": "Llama, Mistral, Qwen and their like of `transformers`",
    "resnet": "Cosmati's ResNet",
}
"""Which models the regions fit, by what they are called."""
WRITTEN_FOR = "transformer"
"""The kind whose regions stand in the files."""
_REGIONS = re.compile(r"^regions:\n(?: .*\n)+", re.MULTILINE)


def policy_template(name: str, model: str = WRITTEN_FOR) -> str:
    """Return a policy file, with its comments.

    Args:
        name: one of `TEMPLATES`.
        model: one of `MODELS`, whose regions it has.

    Raises:
        PolicyError: there's none of that name.
    """
    _refuse_unknown("template", name, tuple(TEMPLATES))
    _refuse_unknown("kind of model", model, tuple(MODELS))
    text = _text(f"{name}.yaml")
    return text if model == WRITTEN_FOR else _REGIONS.sub(lambda _: _text(f"regions-{model}.yaml"), text)


def template_classes(name: str) -> str:
    """Return the file of a template's classes: what `cosmati keys init --taxonomy` takes.

    Raises:
        PolicyError: there's no template of that name.
    """
    _refuse_unknown("template", name, tuple(TEMPLATES))
    return _text(f"{name}.classes.yaml")


def template_taxonomy(name: str) -> Taxonomy:
    """Return a template's classes, for `Recipe(taxonomy=...)` and `Trainer(taxonomy=...)`.

    Raises:
        PolicyError: there's no template of that name.
    """
    return Taxonomy.from_mapping(yaml.safe_load(template_classes(name)))


def _refuse_unknown(what: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise PolicyError(f"There's no {what} {name[:80]!r}{closest(name, known)}")


def _text(name: str) -> str:
    return files("cosmati.recipes").joinpath("policies", name).read_text(encoding="utf-8")

"""What a setting of a manifest may be: what a scheduler would refuse, or take for something else, is refused here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from cosmati.errors import RunError

_EXAMPLES = {"image": "ghcr.io/me/training:1", "volume": "runs"}
_PART = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_LABEL_NAME = "[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
_LONGEST = {"label": 63, "subdomain": 253}


def check_given(engine: str, given: Mapping[str, str]) -> None:
    """Refuse settings without a value, and that an image and a volume lack.

    Raises:
        RunError: one is empty or lacks.
    """
    for name, value in given.items():
        if not value.strip():
            do = "" if name in _EXAMPLES else ", or leave it out"
            raise RunError(f"{name} is empty. Give it a value{do}: --with {name}={_EXAMPLES.get(name, 'VALUE')}")
    for name, example in _EXAMPLES.items():
        if name not in given:
            msg = f"--on {engine} needs {'an' if name[0] in 'aeiou' else 'a'} {name}. Give it: --with {name}={example}"
            raise RunError(msg)
    if re.search(r"\s", given["image"]):
        msg = f"image={given['image']!r} can't be: an image's name has no spaces. Give it: --with image=NAME:TAG"
        raise RunError(msg)


def whole(given: Mapping[str, str], name: str, otherwise: int, *, fewest: int) -> int:
    """Return a setting that is a number, or what holds where it isn't given.

    Raises:
        RunError: it's no whole number, or too small.
    """
    if name not in given:
        return otherwise
    text, unit = given[name], " of GiB" if name == "memory" else ""
    if not text.isdecimal() or int(text) < fewest:
        msg = f"{name}={text!r} is no whole number{unit}, {fewest} or more. Give one: --with {name}=8"
        raise RunError(msg)
    return int(text)


def one_number(nodes: str) -> None:
    """Refuse a fewest and a most: a manifest has one number of nodes.

    Raises:
        RunError: they aren't the same.
    """
    fewest, dash, most = nodes.partition("-")
    if dash and int(fewest) != int(most):
        msg = (
            f"nodes={nodes} can't be rendered: a manifest has one number of nodes, and waits for all of them. "
            f"Give it: --with nodes={most}"
        )
        raise RunError(msg)


def mount_of(given: Mapping[str, str]) -> str:
    """Return where the volume is mounted.

    Raises:
        RunError: it's no absolute path, the root, or has a colon, which separates it from the volume's name.
    """
    text = given.get("mount", "/mnt/runs")
    path = PurePosixPath(text)
    if not path.is_absolute() or not path.name or ".." in path.parts or ":" in text:
        msg = (
            f"mount={text!r} is no place for a volume: that's an absolute path below /, without a colon and `..`. "
            "Give it: --with mount=/mnt/runs"
        )
        raise RunError(msg)
    return str(path)


def truth(name: str, text: str) -> bool:
    """Return a setting that is true or false, in any case.

    Raises:
        RunError: it's neither.
    """
    if text.lower() not in ("true", "false"):
        raise RunError(f"{name}={text!r} is neither true nor false. Say which: --with {name}=true")
    return text.lower() == "true"


def check_accelerator(accelerator: str, gpus: int) -> None:
    """Refuse an accelerator of which a node has none.

    Raises:
        RunError: it's named, and no number of it.
    """
    if accelerator and not gpus:
        msg = (
            f"accelerator={accelerator!r} without gpus-per-node: nodes would have none. Say how many, or leave it out: "
            "--with gpus-per-node=8"
        )
        raise RunError(msg)


def check_priority(engine: str, priority: int, low: int, high: int) -> None:
    """Refuse a priority that a scheduler doesn't have.

    Raises:
        RunError: it's outside of the bounds.
    """
    if not low <= priority <= high:
        raise RunError(
            f"{engine} has priorities from {low} to {high}, and {priority} was given. Give one: --priority 10"
        )


def check_name(setting: str, name: str, kind: str = "subdomain", longest: int = 0) -> None:
    """Refuse a name that Kubernetes wouldn't take (RFC 1123).

    Args:
        setting: that names it.
        name: of an object.
        kind: `label`, or `subdomain`, which is labels with dots between.
        longest: characters, where that's fewer than the kind's.

    Raises:
        RunError: it's none.
    """
    pattern = _PART if kind == "label" else rf"{_PART}(\.{_PART})*"
    limit = longest or _LONGEST[kind]
    if not re.fullmatch(pattern, name) or len(name) > limit:
        dots = "" if kind == "label" else ", dots"
        msg = (
            f"{setting}={name!r} is no name in Kubernetes: those have lower-case letters, digits{dots} and hyphens, "
            f"begin and end with a letter or digit, and have at most {limit} characters. "
            f"Give its name: --with {setting}=team"
        )
        raise RunError(msg)


def label_of(accelerator: str) -> dict[str, str]:
    """Return the label of the nodes that have an accelerator, as Kubernetes has it.

    Raises:
        RunError: it's none.
    """
    name, equals, value = accelerator.partition("=")
    prefix, slash, own = name.rpartition("/")
    is_label = (
        equals
        and re.fullmatch(_LABEL_NAME, own)
        and len(own) <= _LONGEST["label"]
        and (not slash or (re.fullmatch(rf"{_PART}(\.{_PART})*", prefix) and len(prefix) <= _LONGEST["subdomain"]))
        # A label may be without a value.
        and re.fullmatch(f"({_LABEL_NAME})?", value)
        and len(value) <= _LONGEST["label"]
    )
    if not is_label:
        msg = (
            f"accelerator={accelerator!r} names no nodes: Kubernetes has labels. Give the label that they bear: "
            "--with accelerator=nvidia.com/gpu.product=NVIDIA-H200"
        )
        raise RunError(msg)
    return {name: value}

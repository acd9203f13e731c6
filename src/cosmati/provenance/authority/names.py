"""What things are called in an authority's repository: roles, targets, files."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cosmati.errors import ProvenanceError
from cosmati.provenance.taxonomy import Taxonomy

METADATA, TARGETS = "metadata", "targets"
"""The repository's folders, as TUF clients expect them below its address."""
TOP_ROLES = ("root", "targets", "snapshot", "timestamp")
TAXONOMY_PATH = "taxonomy"
"""What stands before the name and version of a published taxonomy."""
POLICY_PATH = "policy"
"""What stands before the name and number of a policy."""
_MAX_SEGMENT, _MAX_CLASS_PATH = 128, 180
"""Characters: files are called by them, with digests before and endings behind, and have 255 at most."""
_SEGMENT = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{_MAX_SEGMENT - 1}}}")
_POLICY, _NUMBER = re.compile(r"[a-z0-9-]{1,128}"), re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class SourceName:
    """A version of a source and its class: what a target's path says, and nothing else does.

    Args:
        taxonomy: name of the taxonomy.
        class_path: path of a class in it.
        source: name of the source, one segment.
        version: of its content, one segment.

    Raises:
        ProvenanceError: source or version can't stand in a path.
    """

    taxonomy: str
    class_path: str
    source: str
    version: str

    def __post_init__(self) -> None:
        check_segment("source", self.source)
        check_segment("version", self.version)

    @property
    def target(self) -> str:
        """The target's path. One more slash would be another class: TUF matches patterns segment by segment."""
        return f"{self.taxonomy}/{self.class_path}/{self.source}/{self.version}"

    @classmethod
    def of_target(cls, path: str) -> SourceName:
        """Read a target's path.

        Raises:
            ProvenanceError: it isn't one of a source.
        """
        parts = path.split("/")
        if len(parts) < 4 or not all(parts):
            raise ProvenanceError(f"{path!r} names no source. It has the form TAXONOMY/CLASS/SOURCE/VERSION.")
        return cls(parts[0], "/".join(parts[1:-2]), *parts[-2:])


@dataclass(frozen=True)
class PolicyName:
    """A version of a policy: what a target's path says.

    It has three segments and a source's has four at least, so that no taxonomy called `policy` makes one.

    Args:
        name: of the policy, `[a-z0-9-]+`.
        number: of the version, from 1.

    Raises:
        ProvenanceError: the name can't stand in a path.
    """

    name: str
    number: int = 1

    def __post_init__(self) -> None:
        if not _POLICY.fullmatch(self.name):
            msg = f"The policy's name {self.name[:200]!r} isn't of the form [a-z0-9-]+, of 128 characters at most."
            raise ProvenanceError(msg)

    @property
    def target(self) -> str:
        """The target's path."""
        return f"{POLICY_PATH}/{self.name}/{self.number}"

    @property
    def role(self) -> str:
        """The role that signs all versions of the policy."""
        return f"{POLICY_PATH}.{self.name}"

    @property
    def pattern(self) -> str:
        """Which targets that role may sign: those of exactly this policy."""
        return f"{POLICY_PATH}/{self.name}/*"

    @classmethod
    def of_target(cls, path: str) -> PolicyName:
        """Read a target's path.

        Raises:
            ProvenanceError: it isn't one of a policy.
        """
        parts = path.split("/")
        if len(parts) != 3 or parts[0] != POLICY_PATH or not _NUMBER.fullmatch(parts[2]):
            raise ProvenanceError(f"{path!r} names no policy. It has the form {POLICY_PATH}/NAME/NUMBER.")
        return cls(parts[1], int(parts[2]))


def check_segment(what: str, text: str) -> None:
    """Refuse what can't be one segment of a target's path, or a file's name.

    Raises:
        ProvenanceError: it can't.
    """
    if not _SEGMENT.fullmatch(text):
        msg = (
            f"The {what} {text[:200]!r} can't stand in a signed path. Use letters, digits, '.', '_' and '-', at most "
            f"{_MAX_SEGMENT}, and begin with a letter or a digit."
        )
        raise ProvenanceError(msg)


def check_taxonomy(taxonomy: Taxonomy) -> None:
    """Refuse a taxonomy whose names no files can have.

    Raises:
        ProvenanceError: its name, its version or a class's path is too long, or the version isn't one segment.
    """
    check_segment("taxonomy's name", taxonomy.name)
    check_segment("taxonomy's version", taxonomy.version)
    for path in taxonomy.classes:
        if len(path) > _MAX_CLASS_PATH:
            msg = f"The class {path[:40]!r}... has {len(path)} characters. Use at most {_MAX_CLASS_PATH}."
            raise ProvenanceError(msg)


def is_repository_file(name: str) -> bool:
    """Return whether a path is one of a repository's files: below its two folders, and no way out of them."""
    folder, *parts = name.split("/")
    depth = len(parts) == 1 if folder == METADATA else folder == TARGETS and len(parts) > 1
    return depth and all(part[:1].isalnum() and "\\" not in part and "\0" not in part for part in parts)


def role_of(class_path: str) -> str:
    """Return the role that signs a class. It's a file's name, so it has no slash; no class path has a dot."""
    return f"class.{class_path.replace('/', '.')}"


def class_of_role(role: str) -> str:
    """Return the class that a role signs, empty where it's none of a class."""
    return role.removeprefix("class.").replace(".", "/") if role.startswith("class.") else ""


def pattern_of(taxonomy: str, class_path: str) -> str:
    """Return which targets the signers of a class may sign: those of exactly this class."""
    return f"{taxonomy}/{class_path}/*/*"


def taxonomy_target(name: str, version: str) -> str:
    """Return the target under which a taxonomy is published."""
    return f"{TAXONOMY_PATH}/{name}/{version}.json"


def metadata_file(role: str, version: int | None) -> str:
    """Return the file of a role's metadata below the repository; the timestamp's has no version."""
    return f"{METADATA}/{role}.json" if version is None else f"{METADATA}/{version}.{role}.json"


def target_file(path: str, sha256: str) -> str:
    """Return the file of a target below the repository: consistent snapshots put the digest before its name."""
    folder, _, name = path.rpartition("/")
    return f"{TARGETS}/{folder}/{sha256}.{name}"

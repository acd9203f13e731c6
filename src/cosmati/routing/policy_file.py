"""The policy file: YAML that says which class of data may teach which region of the model, and when.

    version: 1
    taxonomy: software-licences
    regions:                          # without it: one region, `all`
      embedding:   {tag: embedding}
      near_input:  {blocks: {container: blocks, from: 0, to: 2}}
      near_output: {blocks: {container: blocks, from: 2}, params: ["ln_f.*"]}
      head:        {tag: head}
    phases:                           # spans of the run in order; without it: one phase, `main`
      - {name: warm, until: 0.2dur}
      - {name: main}                  # the last one lasts to the end
    rules:                            # in any order
      - {class: "open/**", weight: 1}
      - {class: open/copyleft, region: [embedding, near_input], weight: 0}
      - {class: open/copyleft, region: [embedding, near_input], phase: warm, weight: 0}
      - {class: open/copyleft, phase: warm, weight: 0.5}
      - {class: public-domain, weight: 1}
      - {class: public-domain, phase: warm, decision: defer}
    default: reject                   # what holds where no rule does; it can't be anything else
    grace: {revocation: reject}       # what a run does when nobody vouches for a class any more; without it: stop
    starvation: alarm                 # or stop: where the data lack all classes that may teach a region
    allow: {amplify: false, tied: false}

*Rules.* A rule covers the cells (class, band, phase, region) that it names. `class` is a class, `branch/**` or
`**`; `region`, `phase` and `band` (see `bands`) are names, or `*` where left out; each may be a list. A rule
gives a `weight` (0 denied, between 0 and 1 attenuated, 1 full, above 1 amplified and only with
`allow: {amplify: true}`), or a `decision` for all regions: `reject` (no forward pass) or `defer` (kept for a
later phase, which must admit it). What rows were measured to be lowers a weight further (see `measures`), and so does
a schedule of depth (see `depth`).

*Which rule wins.* On each axis the more specific one: a class over a branch over a branch nearer the root
over `**`, a name over `*`. A rule is beaten by one that's at least as specific on every axis and more so on
one. What isn't beaten decides the cell; where that's several rules which say different things, the policy
is refused. In the example the third rule settles what the second and the fourth leave open.

*Digest.* SHA-256 over the canonical JSON (RFC 8785) of `PolicyFile.to_mapping`: defaults filled in, names
sorted, rules sorted by their own canonical JSON. Comments, order of rules and spelling of numbers don't
change it.

*YAML.* Only `true`, `false`, `null` and JSON's numbers mean something; `no`, `on`, `1:30` and `2024-01-01`
are strings. Duplicate keys, anchors, aliases and tags are refused.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import rfc8785
import yaml
from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, model_validator

from cosmati.errors import PolicyError
from cosmati.provenance.voucher import VouchedPolicy
from cosmati.records.grace import REASONS
from cosmati.routing.bands import Bands, Floor
from cosmati.routing.depth import Depth, OpenBlocks
from cosmati.routing.grace import Finish, Grace
from cosmati.routing.measures import MAX_KINDS, Attenuation, Grading, RowKind, kinds_of
from cosmati.routing.selectors import Names, RegionName, RegionSelector, Strict, odd_letters
from cosmati.routing.strict_yaml import line_of, load_yaml

_MAX_CHARACTERS = 1_000_000


def _with_unit(until: object) -> object:
    """Refuse a number: pydantic would only say that it's no string."""
    if isinstance(until, int | float) and not isinstance(until, bool):
        msg = f"{until} has no unit: write 0.3dur (part of the run), 300ba (steps) or 3ep (epochs)"
        raise ValueError(msg)  # noqa: TRY004  (pydantic's way)
    return until


class PhaseSpec(Strict):
    """A span of the run, from the end of the phase before to `until`, a time string; the last has none."""

    name: RegionName
    until: Annotated[str | None, BeforeValidator(_with_unit)] = None


class Rule(Strict):
    """What some classes may do to some regions in some phases: a weight, or a decision."""

    classes: Annotated[Names, Field(alias="class", min_length=1)]
    region: Annotated[Names, Field(min_length=1)] = ("*",)
    phase: Annotated[Names, Field(min_length=1)] = ("*",)
    band: Annotated[Names, Field(min_length=1)] = ("*",)
    weight: Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0)] | None = None
    decision: Literal["reject", "defer"] | None = None

    @model_validator(mode="after")
    def _one_result(self) -> Rule:
        if (self.weight is None) == (self.decision is None):
            msg = "a rule gives either a weight or a decision"
            raise ValueError(msg)
        if self.decision is not None and self.region != ("*",):
            msg = f"decision: {self.decision} holds for all regions; leave out region, or use weight: 0"
            raise ValueError(msg)
        return self


class Allow(Strict):
    """What a policy has to allow expressly: weights above 1, and tied parameters across regions."""

    amplify: Annotated[bool, Field(strict=True)] = False
    tied: Annotated[bool, Field(strict=True)] = False


class PolicyFile(Strict):
    """A policy as written, see the module's text. `compile_policy` checks it against model and taxonomy."""

    version: Annotated[int, Field(strict=True, ge=1, le=1)]
    taxonomy: str
    regions: dict[RegionName, RegionSelector] = Field(default_factory=dict)
    phases: tuple[PhaseSpec, ...] = ()
    bands: Bands | None = None
    floors: tuple[Floor, ...] = ()
    measures: dict[RegionName, Grading] = Field(default_factory=dict)
    attenuate: tuple[Attenuation, ...] = ()
    depth: Depth | None = None
    rules: tuple[Rule, ...]
    default: Literal["reject"] = "reject"
    starvation: Literal["alarm", "stop"] = "alarm"
    allow: Allow = Allow()
    grace: Grace | None = None

    _vouched: VouchedPolicy | None = PrivateAttr(default=None)
    _lines: dict[str, int] = PrivateAttr(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        """Compare what policies say, and who vouches for it; not in which order, on which lines and since when."""
        if not isinstance(other, PolicyFile):
            return NotImplemented
        own, others = (one.vouched and (one.vouched.vouchers, one.vouched.statement) for one in (self, other))
        return (self.canonical, own) == (other.canonical, others)

    __hash__ = None  # type: ignore[assignment]

    def at(self, place: str) -> str:
        """Return the line of a part in words, such as `rules.3` or `regions.head`; empty where there's no file."""
        line = self._lines.get(place)
        return f" (line {line})" if line else ""

    @property
    def vouched(self) -> VouchedPolicy | None:
        """Who has signed it; None where nobody was asked: it's `declared` by whoever wrote it."""
        return self._vouched

    @property
    def signed_root(self) -> str:
        """SHA-256 in hex of the first root of the authority that has signed it; empty where it's `declared`."""
        return self._vouched.voucher.root if self._vouched else ""

    def with_voucher(self, vouched: VouchedPolicy) -> PolicyFile:
        """Return the policy as one that was signed."""
        policy = self.model_copy()
        policy._vouched = vouched  # noqa: SLF001  (its own)
        return policy

    @model_validator(mode="after")
    def _consistent(self) -> PolicyFile:
        names = [phase.name for phase in self.phases]
        problems = [f"phase {name!r} is given twice" for name in sorted({n for n in names if names.count(n) > 1})]
        problems += [f"phase {phase.name!r} needs `until`" for phase in self.phases[:-1] if phase.until is None]
        problems += [
            f"phase {phase.name!r} is the last one and lasts to the end of the run: leave out `until`"
            for phase in self.phases[-1:]
            if phase.until is not None
        ]
        problems += [
            f"rule {number} amplifies (weight {rule.weight:g}), and allow.amplify is false"
            for number, rule in enumerate(self.rules, 1)
            if not self.allow.amplify and (rule.weight or 0) > 1
        ]
        num_kinds = math.prod((len(one.grades) + 1 for one in self.measures.values()), start=len(self.band_names))
        if self.measures and num_kinds > MAX_KINDS:
            problems.append(
                f"measures and bands tell {num_kinds} kinds of rows apart, and {MAX_KINDS} are the most: leave out "
                "measures, or name fewer grades"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def selectors(self) -> dict[str, RegionSelector]:
        """What each region takes: those of the file, and those of `depth`."""
        if self.depth is None:
            return self.regions
        return {**(self.regions or self.depth.rest), **self.depth.regions_beside(self.regions.values())}

    @property
    def phase_names(self) -> tuple[str, ...]:
        """Names of the phases in order; `main` where the file has none."""
        return tuple(phase.name for phase in self.phases) or ("main",)

    @property
    def band_names(self) -> tuple[str, ...]:
        """Names of the bands from the lowest; one without a name where the file has none."""
        return self.bands.names if self.bands else ("",)

    @property
    def graces(self) -> Iterator[tuple[str, str | Finish]]:
        """What follows where nobody vouches for a class any more, by reason."""
        for reason in REASONS:
            yield reason, getattr(self.grace or Grace(), reason)

    @property
    def kinds(self) -> tuple[RowKind, ...]:
        """The kinds of rows that the policy tells apart in each class: by band, and by grades."""
        return kinds_of(self.band_names, self.measures)

    def to_mapping(self) -> dict[str, Any]:
        """Return the plain form that the digest covers."""
        mapping = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        for rule in mapping["rules"]:
            if rule["band"] == ["*"]:
                del rule["band"]  # so that policies without bands have the digests that they always had
        mapping["rules"] = sorted(mapping["rules"], key=rfc8785.dumps)
        mapping["floors"] = sorted(mapping["floors"], key=rfc8785.dumps)
        mapping["attenuate"] = sorted(mapping["attenuate"], key=rfc8785.dumps)
        if self.depth:
            mapping["depth"]["open"] = sorted(mapping["depth"]["open"], key=rfc8785.dumps)
        usual: dict[str, object] = {"floors": [], "measures": {}, "attenuate": [], "starvation": "alarm"}
        return {name: value for name, value in mapping.items() if name not in usual or value != usual[name]}

    @property
    def digest(self) -> bytes:
        """SHA-256 of the canonical form; 32 bytes."""
        return hashlib.sha256(self.canonical).digest()

    @property
    def canonical(self) -> bytes:
        """Canonical JSON (RFC 8785) of `to_mapping`: what is signed."""
        return rfc8785.dumps(self.to_mapping())


def load_policy(source: Path | str) -> PolicyFile:
    """Read a policy from a file, or from YAML text.

    Args:
        source: a `Path`, a file's name that ends in `.yaml` or `.yml`, or the text itself.

    Raises:
        PolicyError: the file can't be read, isn't the YAML that's allowed here, or has fields that are
            missing, unknown or wrong; all of them are listed.
    """
    if isinstance(source, str) and source.endswith((".yaml", ".yml")) and "\n" not in source:
        source = Path(source)
    where = f"Policy {str(source)!r}" if isinstance(source, Path) else "The policy"
    try:
        text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
        if len(text) > _MAX_CHARACTERS:
            msg = f"{where} has {len(text)} characters; policies have at most {_MAX_CHARACTERS}."
            raise PolicyError(msg)
        document, node = load_yaml(text)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, PolicyError):
            raise
        msg = f"{where} can't be read: {error}"
        raise PolicyError(msg) from error
    if not isinstance(document, dict):
        mend = " A file's name ends in .yaml or .yml, or is a Path." if isinstance(document, str) else ""
        line = line_of(node, ())
        msg = f"{where} is {document!r:.80} (line {line}), not a mapping with version, taxonomy and rules.{mend}"
        raise PolicyError(msg)
    try:
        policy = PolicyFile.model_validate(document)
    except ValidationError as error:
        problems = "\n".join(f"  - {_problem(entry, node)}" for entry in error.errors())
        msg = f"{where} isn't valid:\n{problems}"
        raise PolicyError(msg) from error
    policy._lines = _lines(policy, node)  # noqa: SLF001  (its own)
    return policy


def _lines(policy: PolicyFile, node: yaml.Node | None) -> dict[str, int]:
    """Return the lines of what a problem may be about once the file is read."""
    places: list[tuple[object, ...]] = [
        ("taxonomy",),
        ("regions",),
        ("depth",),
        *(("regions", name) for name in policy.regions),
    ]
    places += [("phases", index) for index in range(len(policy.phases))]
    places += [("rules", index) for index in range(len(policy.rules))]
    places += [("floors", index) for index in range(len(policy.floors))]
    places += [("attenuate", index) for index in range(len(policy.attenuate))]
    places += [("depth", "open", index) for index in range(len(policy.depth.open) if policy.depth else 0)]
    return {_named(place): line_of(node, place) for place in places}


def _named(place: Sequence[object]) -> str:
    return ".".join(str(part + 1) if isinstance(part, int) else str(part) for part in place)


def _problem(entry: Any, node: yaml.Node | None) -> str:  # noqa: ANN401  (pydantic's ErrorDetails)
    """Return one line for one of pydantic's findings, with close matches for an unknown field."""
    where = _named(entry["loc"]) or "policy"
    # What is wrong with several parts together names the first of them.
    patterns = r"rule (\d+) amplifies", r"^Value error, (?:(phase) '|(measures) and bands)"
    rule, part = (re.search(pattern, entry["msg"]) for pattern in patterns)
    named = ("phases" if part[1] else part[2],) if part else ()
    place = entry["loc"] or (("rules", int(rule[1]) - 1) if rule else named)
    where = f"line {line_of(node, place)}, {where}"
    message = entry["msg"].removeprefix("Value error, ")
    if entry["type"] == "extra_forbidden":
        name = str(entry["loc"][-1])  # One that belongs elsewhere isn't a slip of the pen.
        near = [] if name in _FIELDS else difflib.get_close_matches(name, _FIELDS, n=1)
        return f"{where}: there's no such field{odd_letters(name)}" + (f"; did you mean {near[0]}?" if near else "")
    if entry["type"] in {"value_error", "missing"}:
        return f"{where}: {message}"
    odd = odd_letters(entry["input"]) if isinstance(entry["input"], str) else ""
    return f"{where}: {message}, not {entry['input']!r:.60}{odd}"


_FIELDS = [
    field.alias or name
    for model in (
        PolicyFile,
        Rule,
        PhaseSpec,
        Bands,
        Floor,
        Grading,
        Attenuation,
        Depth,
        OpenBlocks,
        Allow,
        Grace,
        Finish,
        RegionSelector,
    )
    for name, field in model.model_fields.items()
]

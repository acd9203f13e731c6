"""Whether what a run learns from is signed, or only declared by whoever wrote it; the latter can be refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from cosmati.core.source import Source
from cosmati.data.source import StreamingSource
from cosmati.data.tombstoned import beneath
from cosmati.data.vouching import vouched_data, vouched_sources
from cosmati.errors import PlanError
from cosmati.provenance.artifact import Artifact
from cosmati.provenance.authority.errors import DeclaredOnlyError, UntrustedRootError
from cosmati.provenance.voucher import VouchedData
from cosmati.records.artifacts import EVALUATION_DATA
from cosmati.train.config import RunConfig
from cosmati.train.ingredients import Ingredients

_NO_CLASSES = (("all",), ("unknown",))
"""Class names of data that have none."""


def vouched_of(data: object) -> VouchedData | None:
    """Return who vouched for data; None where nobody was asked.

    A source around a signed one (of packs, say) gives rows and tokens classes and names of its own, which no path of a
    signature says: they're declared. Rows that are gone leave the others what they were.
    """
    data, _ = beneath(data)
    if isinstance(data, Source) and not isinstance(data, StreamingSource):
        return None
    return vouched_data(vouched_sources(data))


def digests_of(data: object) -> tuple[str, str, VouchedData | None]:
    """Return the data's digest, and where somebody vouches for them what it is of, and who does."""
    digest, vouched = str(getattr(data, "digest", "")), vouched_of(data)
    text = "" if vouched is None else str(getattr(getattr(data, "dataset", None), "digest_text", ""))
    return digest, text if hashlib.sha256(text.encode()).hexdigest() == digest else "", vouched


def provenance_of(given: Ingredients, artifacts: Iterable[Artifact] = ()) -> dict[str, str]:
    """Return in words whether data, policy and artifacts are signed; nothing of data without classes or policy."""
    vouched, root = vouched_of(given.data), given.policy.signed_root if given.policy is not None else ""
    has_classes = isinstance(given.data, Source) and tuple(given.data.class_names) not in _NO_CLASSES
    told = {}
    if vouched is not None:
        told["data"] = f"signed, of the authority {', '.join(sorted({one.root[:12] for one in vouched.vouchers}))}"
    elif has_classes or given.policy is not None or given.config.require_signed:
        told["data"] = "declared: nobody vouches for their classes"
    if given.policy is not None:
        told["policy"] = f"signed, of the authority {root[:12]}" if root else "declared: nobody has signed it"
    return told | {one.label: str(one) for one in artifacts}


def refuse_declared(given: Ingredients) -> None:
    """Refuse data and a policy that nobody vouches for, where the run takes only what is signed.

    Raises:
        DeclaredOnlyError: they're declared.
        UntrustedRootError: they're signed by others than those who are trusted.
    """
    if not given.config.require_signed:
        if given.config.trusted_roots:
            msg = "RunConfig.trusted_roots says whom to trust, and nobody is asked. Give require_signed=True too."
            raise PlanError(msg)
        return
    vouched = vouched_of(given.data)
    if vouched is None:
        what = "a loop of your own gives" if given.data is None else f"{type(given.data).__name__} gives"
        msg = (
            f"require_signed=True, and the rows that {what} are only declared: nobody vouches for their classes. Have "
            "them signed (`cosmati data sign`), and open them with StreamingSource(StreamingDataset(..., "
            "authority=Authority(url, root=...)), ...). Or leave require_signed out."
        )
        raise DeclaredOnlyError(msg)
    roots = _roots(vouched)
    if given.policy is not None:
        if not (root := given.policy.signed_root):
            msg = (
                "require_signed=True, and the policy is only declared: nobody has signed it. Take a signed one, or "
                "leave require_signed out."
            )
            raise DeclaredOnlyError(msg)
        roots.add(root)
    _refuse_untrusted(given, roots)


def refuse_ungoverned(given: Ingredients, artifacts: Iterable[Artifact]) -> None:
    """Refuse what was prepared before the run and nobody vouches for, where the run takes only what is signed.

    Raises:
        DeclaredOnlyError: it's ungoverned.
        UntrustedRootError: it's signed by others than those who are trusted.
    """
    if not given.config.require_signed:
        return
    for one in artifacts:
        if one.vouched is None:
            raise DeclaredOnlyError(
                f"require_signed=True, and the {one.label} is ungoverned: nobody vouches for it. {_signed_how(one)} Or "
                "leave require_signed out."
            )
        _refuse_untrusted(given, _roots(one.vouched))


def _signed_how(artifact: Artifact) -> str:
    if artifact.kind == EVALUATION_DATA:
        return (
            "Open it as the data that the run learns from: StreamingDataset(..., authority=...), of a data set that "
            "`cosmati data write` has written and `cosmati data sign` has signed."
        )
    return (
        "Put its files into a folder, describe and sign it (`cosmati data describe FOLDER --class CLASS`, `cosmati "
        f"data sign FOLDER`), and name it: RunConfig(artifacts=[artifact({artifact.kind!r}, FOLDER, authority=...)])."
    )


def _roots(vouched: VouchedData) -> set[str]:
    return {one.root for one in vouched.vouchers}


def _refuse_untrusted(given: Ingredients, roots: set[str]) -> None:
    trusted = {root.removeprefix("sha256:") for root in given.config.trusted_roots}
    if trusted and (others := sorted(roots - trusted)):
        msg = (
            f"The authority with the first root {others[0]} isn't one of RunConfig.trusted_roots "
            f"({', '.join(sorted(root[:12] for root in trusted))}). Ask the authority for its digest, and add it only "
            "if it's the same."
        )
        raise UntrustedRootError(msg)


def refuse_own_rows(config: RunConfig) -> None:
    """Refuse rows of a loop of the user's own where a run takes only what is signed: nobody has vouched for them.

    Raises:
        DeclaredOnlyError: it does.
    """
    if config.require_signed:
        msg = "require_signed=True, and the rows that step() is given are only declared. Call fit(), over signed data."
        raise DeclaredOnlyError(msg)


def wants_ledger(config: RunConfig, *governed_by: object) -> bool:
    """Say whether a run keeps a ledger; unasked where it has a policy, signed data, or witnesses."""
    if config.ledger and config.run_folder is None:
        msg = "RunConfig(ledger=True) needs a run_folder to keep the ledger in."
        raise PlanError(msg)
    wanted = (any(governed_by) or bool(config.witnesses)) if config.ledger is None else config.ledger
    if config.witnesses and (not wanted or config.run_folder is None):
        msg = "RunConfig.witnesses cosign a ledger, and there is none. Give a run_folder, and leave ledger=False out."
        raise PlanError(msg)
    return config.run_folder is not None and wanted

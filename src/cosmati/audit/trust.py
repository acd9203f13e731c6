"""What an auditor trusts, got another way than the bundle: keys and fingerprints, in a small file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cosmati.errors import LedgerError
from cosmati.ledger.evidence import TrustedEvidence
from cosmati.ledger.note import VerifierKey
from cosmati.routing.strict_yaml import load_yaml

_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

BLANK = """\
# What you trust about a run. Get each line from the party itself, never from the bundle that you check with it.

operator: ""          # verifier key of who trained (the file operator.vkey): name+id+key
data_roots: []        # SHA-256 of root 1 of each data authority (`cosmati keys status`)
policy_roots: []      # SHA-256 of root 1 of each policy authority
witnesses: []         # verifier keys of witnesses who may have seen the log: name+id+key
quorum: 0             # how many of them have to have seen it; 0 is all
pinned: ""            # text of an earlier file `checkpoint` of the log, from which it has to go on
replays: []           # SHA-256 of results of spot checks that you have run, or whose auditor gave you the digest
"""


class TrustFile(BaseModel):
    """Keys and fingerprints that an auditor got elsewhere.

    Attributes:
        operator: verifier key of who trained, `name+id+base64`.
        data_roots: SHA-256 of the first root of each authority that may vouch for data, in hex.
        policy_roots: likewise for policies.
        witnesses: verifier keys of those who may have seen the log.
        quorum: how many of them have to have seen it; 0 takes all.
        pinned: text of an earlier `checkpoint` file of the log, of which this one has to be a continuation.
        replays: SHA-256, in hex, of results of replays that the auditor believes: a bundle's others raise no level.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    operator: str
    data_roots: tuple[_Sha256, ...] = ()
    policy_roots: tuple[_Sha256, ...] = ()
    witnesses: tuple[str, ...] = ()
    quorum: int = 0
    pinned: str = ""
    replays: tuple[_Sha256, ...] = ()

    @model_validator(mode="after")
    def _check_keys(self) -> TrustFile:
        VerifierKey.parse(self.operator)
        _ = self.evidence
        return self

    @property
    def evidence(self) -> TrustedEvidence:
        """Whom the auditor trusts to have seen the log."""
        return TrustedEvidence.parse(self.witnesses, self.quorum)


def read_trust(path: Path) -> TrustFile:
    """Read a file of what an auditor trusts, YAML or JSON.

    Raises:
        LedgerError: it can't be read, or isn't of that form.
    """
    try:
        content, _ = load_yaml(path.read_text("utf-8"))
        lists = {
            name: tuple(value) if isinstance(value, list) else value for name, value in dict(content or {}).items()
        }
        return TrustFile.model_validate(lists)
    except OSError as error:
        raise LedgerError(f"{path} can't be read: {error.strerror}. Begin one with: cosmati audit trust") from error
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'operator'}: {one['msg']}" for one in error.errors())
        raise LedgerError(
            f"{path} doesn't say what is trusted: {wrong}. `cosmati audit trust` prints a blank."
        ) from error
    except (LedgerError, ValueError, TypeError) as error:
        raise LedgerError(
            f"{path} doesn't say what is trusted: {error} `cosmati audit trust` prints a blank."
        ) from error

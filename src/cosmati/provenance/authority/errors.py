"""What can be wrong with what an authority has signed: each its own error, so that a policy can answer each its way."""

from __future__ import annotations

from cosmati.errors import ProvenanceError
from cosmati.provenance.voucher import Reason


class UnsignedMetadataError(ProvenanceError):
    """A signature is missing or wrong, or too few have signed."""


class UntrustedRootError(ProvenanceError):
    """The repository's first root isn't the one that is trusted: it's another authority's."""


class ExpiredMetadataError(ProvenanceError):
    """Something that was signed holds no longer; a frozen repository looks like this too."""


class RolledBackError(ProvenanceError):
    """Metadata are older than what was seen here before."""


class InconsistentMetadataError(ProvenanceError):
    """Files are missing, damaged, or of different states of the repository (mix and match)."""


class OutOfScopeError(ProvenanceError):
    """Nobody who may sign the class has signed this source."""


class UnknownClassError(ProvenanceError):
    """The authority's taxonomy has no such class, and never had."""


class WithdrawnClassError(ProvenanceError):
    """An earlier version of the authority's taxonomy had the class, and the newest hasn't."""


class TamperedManifestError(ProvenanceError):
    """A manifest isn't the one that was signed."""


class UnreachableAuthorityError(ProvenanceError):
    """The repository can't be fetched."""


class DeclaredOnlyError(ProvenanceError):
    """A run takes only what is signed, and its data or its policy are declared."""


class NoLongerVouchedError(ProvenanceError):
    """What a run learns from isn't vouched for any more, and it stops."""


_REVOKED = (OutOfScopeError, TamperedManifestError, UnsignedMetadataError)
"""Of what was signed, these say that who may sign it has taken it back. Others say that nothing new was learnt."""


def reason_of(error: Exception, *, was_asked: bool) -> Reason:
    """Return what an error means for what was vouched for: that it was taken back, or that it's as if it had expired.

    Args:
        error: of one thing that was signed.
        was_asked: whether the authority as a whole has answered, with what is trusted.
    """
    return "revocation" if was_asked and isinstance(error, _REVOKED) else "expiry"

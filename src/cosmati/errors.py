"""Every exception that Cosmati raises on purpose.

    CosmatiError
    ├── PlanError          (ValueError)    methods, routes or losses that can't be composed
    ├── BatchError         (ValueError)    a batch that the plan can't split or the loss can't read
    ├── DivergenceError    (RuntimeError)  the loss or a gradient is not finite
    ├── PolicyError        (ValueError)    a policy that doesn't parse, doesn't partition or isn't total
    ├── ProvenanceError    (ValueError)    an unknown class, a broken tag
    ├── DataError          (ValueError)    a source that can't be read or doesn't match its digest
    ├── LedgerError        (RuntimeError)  the ledger can't be written
    │   ├── TamperError                    the ledger or a proof doesn't verify
    │   └── RefutedError                   what was asked of a ledger is answered with no
    ├── CheckpointError    (RuntimeError)  a checkpoint that is damaged, partial or of another plan
    │   └── ChangedRunError                a checkpoint of another run than the one that was to go on from it
    ├── RunError           (RuntimeError)  a run folder that is in use or not a run
    ├── ExportError        (RuntimeError)  a model that can't be exported, or isn't the one that was measured
    ├── ForgetError        (RuntimeError)  what can't be deleted as it was asked
    └── MissingExtraError  (ImportError)   a package of an extra that isn't installed

Each message says what happened, why, and what mends it.
"""

from __future__ import annotations


class CosmatiError(Exception):
    """Root of the tree: catch it to catch everything that Cosmati raises on purpose."""


class PlanError(CosmatiError, ValueError):
    """Methods, routes, optimizers or losses that can't be composed."""


class BatchError(CosmatiError, ValueError):
    """A batch that the plan can't split, or that the loss can't read."""


class DivergenceError(CosmatiError, RuntimeError):
    """The loss or a gradient is not finite."""


class OutOfMemoryError(CosmatiError, RuntimeError):
    """Memory is too short for a step, however its microbatches are cut; nothing of it is committed."""


class PolicyError(CosmatiError, ValueError):
    """A policy that doesn't parse, doesn't partition the parameters or isn't total."""


class ProvenanceError(CosmatiError, ValueError):
    """An unknown class or a broken tag."""


class DataError(CosmatiError, ValueError):
    """A source that can't be read, or whose content isn't what its digest says."""


class LedgerError(CosmatiError, RuntimeError):
    """The ledger can't be written."""


class TamperError(LedgerError):
    """The ledger, a proof or a signature doesn't verify."""


class RefutedError(LedgerError):
    """What was asked is answered with no: the statement is false, the weights are others."""


class CheckpointError(CosmatiError, RuntimeError):
    """A checkpoint that is damaged, partial, or made by another plan."""


class ChangedRunError(CheckpointError):
    """A checkpoint of another run than the one that was to go on from it: it would be refused again."""


class RunError(CosmatiError, RuntimeError):
    """A run folder that another process uses, or that holds no run."""


class ExportError(CosmatiError, RuntimeError):
    """A model that can't be exported as asked, or whose export isn't the model that was measured."""


class ForgetError(CosmatiError, RuntimeError):
    """A deletion that can't be done as it was asked, or that a legal hold forbids."""


class MissingExtraError(CosmatiError, ImportError):
    """A package of one of the extras that isn't installed; the message names the extra."""


def words_of(error: BaseException) -> str:
    """Return what an exception of anybody's says; nothing where its own words fail."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  (whatever they do)
        return ""

"""One epoch of mosaicml-streaming over S3, in a Python that has it: prints seconds to the first batch and to the last.

S3_ENDPOINT_URL=... python -P benchmarks/remote_peer.py s3://bucket/text CACHE WORKERS
"""

from __future__ import annotations

import json
import sys
import types
from importlib.machinery import ModuleSpec
from time import perf_counter

ABSENT = {"torchvision", "oci", "azure", "paramiko", "google", "matplotlib", "databricks", "alipcs_py", "datasets"}


class Stand:
    """Stands in for packages that mosaicml-streaming imports and these rows don't need."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        """Return a specification for what is absent."""
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ABSENT else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Return a module in which every name is an empty class."""

        class Empty(types.ModuleType):
            def __getattr__(self, name: str) -> type:
                if name.startswith("__"):
                    raise AttributeError(name)
                return type(name, (), {})

        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing."""


def main(remote: str, cache: str, workers: int) -> None:
    """Read an epoch."""
    sys.meta_path.append(Stand())  # type: ignore[arg-type]
    import boto3  # noqa: F401  (as ours has imported its client)
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    start = perf_counter()
    data = StreamingDataset(remote=remote, local=cache, shuffle=True, batch_size=256)
    rows, first = 0, 0.0
    for batch in DataLoader(data, 256, num_workers=workers):
        first = first or perf_counter() - start
        rows += len(batch["label"])
    print(json.dumps({"first": first, "epoch": perf_counter() - start, "rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

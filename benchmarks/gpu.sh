#!/usr/bin/env bash
# The GPU tests and benchmarks in one call, from source and without a network: bash benchmarks/gpu.sh [NAME ...]
# Names are those of `python -m benchmarks.gpu`: scaling (beside DDP, FSDP2; ledger, hashes), routing_cost, ...; all without.
# Results go to $OUT, or to benchmarks/results. Needs torch>=2.9 with CUDA and the base dependencies.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}" CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTHONUNBUFFERED=1
python3 - <<'PY' || exit 1
import importlib.util, sys
needed = "torch numpy pydantic yaml rfc8785 blake3 cryptography safetensors pyarrow rich typer pytest hypothesis sklearn scipy".split()
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"Not installed: {', '.join(missing)}. Install them, or put their wheels' folder on PYTHONPATH.")
PY
status=0
timeout 300 python3 -m pytest -m gpu -q -p no:randomly -p no:cacheprovider tests || status=$?
timeout 280 python3 -m benchmarks.gpu "$@" || status=$?
exit "$status"

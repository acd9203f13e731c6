# Everything happens in $(VENV), which the first target that needs it makes.
# Change the interpreter with `make PYTHON=python3.12 ...`, the environment with `make VENV=/some/where ...`.
# PyTorch is a build for CPUs; `make TORCH=cuda ...` in a new environment takes the usual one.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

QUICKSTART_EXTRAS := vision,explorer
# The quickstart signs with these, and does without where they can't be installed.
QUICKSTART_SIGNS := authority
TEST_EXTRAS := $(QUICKSTART_EXTRAS),streaming,llm,study,test,mutants
CHECK_EXTRAS := $(TEST_EXTRAS),check,docs
DOCS_EXTRAS := $(QUICKSTART_EXTRAS),study,docs
# Apart from the others: the text corpus is the Python source of what its environment has installed.
OTHER_EXTRAS := $(TEST_EXTRAS),audit,outside,authority,onnx,trackers
OTHER_TESTS := tests/integrations tests/cli/test_quickstart.py tests/cli/test_rehearsal.py tests/explorer/test_signed_chain.py \
  tests/export/test_onnx_form.py tests/audit tests/provenance tests/data/test_vouched.py tests/data/test_vouched_kinds.py tests/data/test_vouched_layout.py tests/data/test_vouched_http.py \
  tests/docs/test_authorities_page.py tests/docs/test_credentials_page.py tests/train/test_vouched_run.py tests/train/test_authority_watch.py tests/train/test_authority_processes.py \
  tests/train/test_signed_only.py tests/train/test_signed_policy.py tests/train/test_replay_signed.py tests/train/test_prepared_watch.py \
  tests/train/test_many_authorities.py tests/train/test_watch_of_signers.py tests/train/test_followed_policy.py tests/train/isolated/test_revoked.py tests/train/isolated/test_revoked_and_prepared.py \
  tests/train/test_policy_change.py tests/train/test_joint_vouched.py tests/tampering tests/worked_examples tests/test_dataclasses.py
SLURM := slurmctld slurmd slurm-client munge
BENCH_EXTRAS := $(QUICKSTART_EXTRAS),streaming,llm,study,bench

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-all pages seeds test-slurm test-ray test-torchft test-manifests tutorials extras slow golden bits mutants check methods bench docs
.NOTPARALLEL:

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' Makefile

quickstart: $(VENV)/.with-quickstart ## install, train a first governed run and write its page
	$(BIN)/cosmati quickstart

test: $(VENV)/.with-test ## run the default test suite (tests of a second or more, and those of pages, left out)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not long and not slow and not browser"

test-all: $(VENV)/.with-test ## run the default test suite and the `long` tests: whole runs and processes
	$(BIN)/python -m pytest -n 2 --dist worksteal

seeds: $(VENV)/.with-test ## run what `test-all` runs under N new seeds (BUSY of them beside heavy jobs), and keep what came of it
	$(BIN)/python -m tools.suite_runs $(if $(N),--num $(N)) $(if $(BUSY),--busy $(BUSY))

slow: $(VENV)/.with-test ## run the tests that `test-all` leaves out
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

extras: $(VENV)-extras/.with-extras ## test authorities, trackers and ONNX, whose packages `test` leaves out, in an environment of their own
	$(VENV)-extras/bin/python -m pytest -n 2 $(OTHER_TESTS)

test-slurm: $(VENV)/.with-test ## kill nodes of a Slurm cluster on this machine; as root, it installs Debian's packages where they're absent
	@$(BIN)/python -c 'import sys; from tools.slurm_on_one_host import missing_programs; sys.exit(bool(missing_programs()))' || \
	  { set -x; apt-get update --quiet=2 && apt-get install --yes $(SLURM); } || { echo "Slurm is absent. As root: apt-get install $(SLURM)"; exit 1; } >&2
	$(BIN)/python -m pytest -n 0 -m slurm tests/launch

test-ray: $(VENV)-ray/.with-ray ## kill nodes of a Ray cluster on this machine, in an environment of its own
	$(VENV)-ray/bin/python -m pytest -n 0 -m ray tests/launch

test-torchft: $(VENV)-torchft/.with-torchft ## kill processes that a lighthouse of torchft's knows, in an environment of its own
	$(VENV)-torchft/bin/python -m pytest -n 0 -m torchft tests/launch

test-manifests: $(VENV)-manifests/.with-manifests ## hold manifests against the schemas of those who read them, in an environment of its own
	$(VENV)-manifests/bin/python -m pytest -n 0 tests/launch/test_manifest_schemas.py

tutorials: $(VENV)/.with-test ## walk through the tutorials and recipes of the docs, each in an empty folder
	$(BIN)/python -m pytest -n 2 -m slow tests/docs

pages: $(VENV)/.with-test ## open the Explorer's and the audit's pages in Chromium, where it's installed, and use them
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "browser and not slow" tests/browser tests/explorer tests/audit

golden: $(VENV)/.with-test ## write this platform's digests of training (tests/golden): a change of bits is a decision
	$(BIN)/python -m tests.golden.digests

bits: $(VENV)/.with-test ## compare the bits of training with another commit's (BASE=HEAD~1) on this machine
	$(BIN)/python tools/compare_bits.py $(BASE)

mutants: $(VENV)/.with-test ## plant small mistakes (N=400, SEED=the commit) and see which the tests notice
	@$(BIN)/python -m tools.mutants $(if $(N),--num $(N)) $(if $(SEED),--seed $(SEED)) \
	  $(if $(ROOMS),--rooms $(ROOMS)) $(if $(JOBS),--jobs $(JOBS)) $(if $(AGAIN),--again $(AGAIN))

check: $(VENV)/.with-check ## lint, format, types, layers, sizes, the build of the docs, links and pictures
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_size.py
	$(BIN)/python tools/list_methods.py --check
	$(BIN)/python tools/write_headline.py --check
	$(BIN)/python -m benchmarks.evidence_summary --check
	$(BIN)/python tools/write_findings.py --check
	$(BIN)/python tools/write_cli.py --check
	rm -rf docs/api/_generated
	$(BIN)/sphinx-build -W --keep-going -q docs docs/_build/html
	$(BIN)/python tools/check_links.py docs/_build/html

methods: $(VENV)/.with-test ## list the methods anew, and train every pair of them, after one is added or renamed
	$(BIN)/python tools/list_methods.py
	$(BIN)/python docs/cards/run_pairs.py

bench: $(VENV)/.with-bench ## run the benchmarks
	$(BIN)/python -m benchmarks

docs: $(VENV)/.with-docs ## build the docs into docs/_build/html
	rm -rf docs/api/_generated
	$(BIN)/sphinx-build -W --keep-going docs docs/_build/html

# Stamps: installed once, and again when what to install has changed.

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  "Cosmati needs Python 3.11 or later, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	  "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; } >&2
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and by itself: pip then takes the build that the constraints name, and nothing later replaces it.
# A build for CPUs, since plain Linux wheels bring gigabytes of CUDA: from PyTorch's own index where that answers.
$(VENV)/.with-torch: constraints.txt $(VENV)/.made
	@if [ "$(TORCH)" = cpu ] && $(BIN)/python -c \
	  'import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=5)' $(TORCH_INDEX) 2>/dev/null; \
	then set -x; $(INSTALL) --extra-index-url $(TORCH_INDEX) torch; else set -x; $(INSTALL) torch; fi
	@touch $@

$(VENV)/.with-quickstart: EXTRAS := $(QUICKSTART_EXTRAS)
$(VENV)/.with-quickstart: OPTIONAL := $(QUICKSTART_SIGNS)
$(VENV)/.with-test: EXTRAS := $(TEST_EXTRAS)
$(VENV)/.with-check: EXTRAS := $(CHECK_EXTRAS)
$(VENV)/.with-docs: EXTRAS := $(DOCS_EXTRAS)
$(VENV)/.with-bench: EXTRAS := $(BENCH_EXTRAS)

$(VENV)/.with-quickstart $(VENV)/.with-test $(VENV)/.with-check $(VENV)/.with-docs $(VENV)/.with-bench: \
		pyproject.toml constraints.txt $(VENV)/.with-torch
	$(INSTALL) -e '.[$(EXTRAS)]'
	@$(if $(OPTIONAL),set -x; $(INSTALL) -e '.[$(OPTIONAL)]' || echo "It goes without the extra $(OPTIONAL).",)
	@touch $@

$(VENV)-ray/.with-ray: pyproject.toml constraints.txt
	$(MAKE) VENV=$(VENV)-ray TEST_EXTRAS=test,ray $(VENV)-ray/.with-test
	@touch $@

$(VENV)-torchft/.with-torchft: pyproject.toml constraints.txt
	$(MAKE) VENV=$(VENV)-torchft TEST_EXTRAS=test,torchft $(VENV)-torchft/.with-test
	@touch $@

$(VENV)-manifests/.with-manifests: pyproject.toml constraints.txt
	$(MAKE) VENV=$(VENV)-manifests TEST_EXTRAS=test,manifests $(VENV)-manifests/.with-test
	@touch $@

$(VENV)-extras/.with-extras: pyproject.toml constraints.txt
	$(MAKE) VENV=$(VENV)-extras TEST_EXTRAS=$(OTHER_EXTRAS) $(VENV)-extras/.with-test
	@touch $@

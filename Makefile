# `make help` lists the targets. Each prepares what it needs; a fresh machine needs Python 3.11 only.
#
#   PYTHON=python3.12   the interpreter that environments are made with
#   JOBS=2              how many tests run at the same time
#   ARGS='-k commit'    passed on to pytest, the demonstration or the benchmarks
#   TORCH_BUILD=any     accept a torch that is not the pinned CPU build

PYTHON ?= python3
JOBS ?= 2
ARGS ?=
TORCH_BUILD ?= cpu

LOCK := requirements/constraints.txt
TORCH := $(shell sed -n 's/^torch==//p' $(LOCK))
VENV := .venv
BENCH := .venv-bench
READY := $(VENV)/.ready
BENCH_READY := $(BENCH)/.ready
INPUTS := pyproject.toml $(LOCK) src/waypost/_version.py scripts/check_torch.py

# Quiet unless it fails. Never upgraded: another pip may choose another build of torch.
PIP_INSTALL := -m pip --disable-pip-version-check --no-input install -qq
PYTEST := $(VENV)/bin/python -m pytest -n $(JOBS)

# $(call prepare,ENVIRONMENT,EXTRAS): torch first and alone, then the rest under the lock.
define prepare
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "waypost: $(PYTHON) is older than 3.11; choose another: make PYTHON=python3.12 ..." >&2; exit 1; }
@echo "waypost: preparing $(1) (minutes the first time: torch is large)"
@$(PYTHON) -m venv $(1)
@$(1)/bin/python $(PIP_INSTALL) torch==$(TORCH)
@test "$(TORCH_BUILD)" = any || $(1)/bin/python scripts/check_torch.py $(TORCH)
@$(1)/bin/python $(PIP_INSTALL) -c $(LOCK) editables hatchling
@$(1)/bin/python $(PIP_INSTALL) -c $(LOCK) --no-build-isolation -e '.[$(2)]'
endef

.PHONY: help venv check test torture docs demo bench lock clean debian-packages
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | \
	  while IFS='|' read -r target text; do printf '%-16s %s\n' "$$target" "$$text"; done

venv: $(READY) ## prepare .venv with the pinned versions

check: $(READY) ## format, lint, types, layers, shape: a minute
	@$(VENV)/bin/ruff format --check --output-format concise . || { echo "waypost: to format: $(VENV)/bin/ruff format ." >&2; exit 1; }
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-logo
	@$(VENV)/bin/python -m pytest -q tests/tidy

test: $(READY) debian-packages ## all tests but the torture tests: minutes
	@$(PYTEST) $(ARGS)

torture: $(READY) debian-packages ## all tests and the torture tests
	@$(PYTEST) -m "" $(ARGS)

docs: $(READY) ## run every example of the documentation
	@$(PYTEST) tests/docs $(ARGS)

demo: $(READY) ## a training run that is killed and goes on
	@$(VENV)/bin/waypost demo $(ARGS)

bench: $(BENCH_READY) ## measure Waypost beside its peers on this machine
	@$(BENCH)/bin/python -m benchmarks $(ARGS)
	@$(BENCH)/bin/python -m benchmarks.plan
	@$(BENCH)/bin/python -m benchmarks.ranks

lock: $(READY) ## write the versions of .venv into the lock file
	@{ sed -n '/^#/p' $(LOCK); \
	   $(VENV)/bin/python -m pip freeze --exclude-editable | sed 's/^\(torch==[^+]*\)+.*/\1/'; } >$(LOCK).new
	@mv $(LOCK).new $(LOCK)

clean: ## remove the environments, caches and scratch files
	@rm -rf $(VENV) $(BENCH) .testdata build dist
	@rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name .git -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

debian-packages:
	@scripts/debian-packages.sh rsync strace

$(READY): $(INPUTS)
	$(call prepare,$(VENV),blake3$(comma)cli$(comma)demo$(comma)dev)
	@test "$(TORCH_BUILD)" = any || $(VENV)/bin/python scripts/check_torch.py $(TORCH)
	@touch $@

$(BENCH_READY): $(INPUTS) requirements/bench.txt
	$(call prepare,$(BENCH),blake3)
	@$(BENCH)/bin/python $(PIP_INSTALL) --no-deps -r requirements/bench.txt
	@test "$(TORCH_BUILD)" = any || $(BENCH)/bin/python scripts/check_torch.py $(TORCH)
	@$(BENCH)/bin/python -W ignore -c 'import torchsnapshot'
	@touch $@

comma := ,

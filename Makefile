# kvtier's everyday commands; `make help` lists them.
#
# PYTHON=... chooses the interpreter (3.11 or later) that the virtual environment is made with.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?=
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

CANDIDATES := python3 python3.13 python3.12 python3.11 python3.14 python

.PHONY: help setup test test-all lint chaos aot demo serve bench profile figures clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)  ## make .venv and install kvtier into it, with the versions of constraints.txt

# The stamp is written last, so a setup that was cut short is done again.
$(STAMP): pyproject.toml constraints.txt
	@if ! $(PY) -c 'import pip' 2>/dev/null; then \
		python=""; \
		for candidate in $(if $(PYTHON),"$(PYTHON)",$(CANDIDATES)); do \
			if "$$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
				python="$$candidate"; break; \
			fi; \
		done; \
		if [ -z "$$python" ]; then \
			echo "kvtier needs Python 3.11 or later with its venv module$(if $(PYTHON), and $(PYTHON) is not one,)." \
				"Install one (python3.11 and python3.11-venv, say) or name one: make setup PYTHON=/path/to/python3.11" >&2; \
			exit 1; \
		fi; \
		echo "Making $(VENV) with $$("$$python" --version)"; \
		rm -rf $(VENV); \
		"$$python" -m venv $(VENV); \
	fi
	@echo "Installing kvtier and what it needs (some minutes the first time)"
	@$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)
	@echo "Installed: $(VENV)/bin/kvtier"

# A file's tests stay together, since they share what the file has started. Two at once need two cores and 8 GiB.
JOBS ?= 2

test: setup  ## what to run after each change: linters, types, and the tests that aren't marked slow
	@$(MAKE) lint
	@$(PY) -m pytest -n $(JOBS) --dist loadfile -m "not slow"

test-all: setup  ## everything that must pass: linters, types, all tests
	@$(MAKE) lint
	@$(PY) -m pytest -n $(JOBS) --dist loadfile

lint: setup  ## ruff (style, imports, format) and mypy (strict)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

PROFILE ?=
CHAOS_SEED ?=
CHAOS_ROUNDS ?= 3
CHAOS_MINUTES ?= 60
CHAOS_REPORT ?=

chaos: setup  ## every fault that one machine can show, at random moments; CHAOS_SEED=, CHAOS_ROUNDS=, CHAOS_MINUTES=, CHAOS_REPORT=docs/faults.md
	@$(PY) tests/chaos/chaos_run.py --rounds $(CHAOS_ROUNDS) --minutes $(CHAOS_MINUTES) \
		$(if $(CHAOS_SEED),--seed $(CHAOS_SEED)) $(if $(CHAOS_REPORT),--report $(CHAOS_REPORT))

aot: setup  ## compile every GPU kernel for sm_80 to sm_120 and gfx942, without a GPU; fails on spills and slower loops
	@$(PY) -m kvtier.kernels.aot

demo: setup  ## real chat requests through the tiers, with the table of hits
	@$(VENV)/bin/kvtier demo

serve: setup  ## the service in the foreground, until Ctrl-C
	@$(VENV)/bin/kvtier up

bench: setup  ## the benchmark scripts and what each measures
	@for script in $$(grep -l __main__ bench/*.py); do \
		printf '  $(PY) %-24s %s\n' "$$script" "$$(sed -nE '1,2s/^"""(.*[^"])("""|)$$/\1/p' "$$script")"; \
	done

profile: setup  ## where a worker's step loop spends its time; PROFILE="--streams 8 --sort cumulative"
	@$(PY) bench/profile_step.py $(PROFILE)

figures: setup  ## eviction on real traces, into docs/eviction.md; KVTIER_TRACES=FOLDER says where the traces are
	@$(PY) bench/figures.py

clean:  ## remove the virtual environment and all caches of tools
	@rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

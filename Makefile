# All commands for contributors. A fresh clone needs only git, make and Python 3.11 or later: PostgreSQL comes as a wheel.

PYTHON ?= python3
ARGS ?=

SHELL := /bin/sh
BIN := .venv/bin
MADE := .venv/.made-$(shell cat pyproject.toml deploy/constraints.txt 2>/dev/null | cksum | cut -d' ' -f1)
# Without HOME (CI, containers), caches go to .rota/home.
INSTALLING := HOME="$${HOME:-$(CURDIR)/.rota/home}"

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-fast test-system test-matrix lint type schema surface verify docs bench bench-peers chaos chaos-time fuzz constraints

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12  use this interpreter      ARGS='-k lease -x'  pass arguments to pytest or rota"

venv: $(MADE) ## Create or update .venv from pyproject.toml and deploy/constraints.txt

demo: $(MADE) ## Run the demo on a temporary PostgreSQL
	@$(BIN)/rota demo $(ARGS)

# Hundreds of tests kill processes and wait for leases to expire, so a busy machine may miss a deadline. Tests that fail in
# parallel run again alone, and both results are shown. A real fault fails twice.
test: $(MADE) ## Run all tests
	@$(BIN)/pytest -n auto --dist loadfile $(ARGS) || { \
	  [ $$? -eq 1 ] && printf '\n== run the failed tests again, alone\n' && \
	  $(BIN)/pytest --last-failed --last-failed-no-failures none $(ARGS); }

test-fast: $(MADE) ## Run the tests that need no database
	$(BIN)/pytest tests/unit $(ARGS)

test-system: $(MADE) ## Run the tests with real processes, signals and restarts
	$(BIN)/pytest -n auto --dist loadfile tests/system $(ARGS)

test-matrix: $(MADE) ## Run tests/sql against PostgreSQL 14 to 18
	$(BIN)/python tests/support/postgres_matrix.py $(ARGS)

lint: $(MADE) ## Check style, format and import layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache

type: $(MADE) ## Check types
	$(BIN)/mypy

schema: $(MADE) ## Rewrite sql/schema.sql from the migrations
	$(BIN)/python tests/support/schema_snapshot.py --write

surface: $(MADE) ## Rewrite tests/support/public_surface.txt from the code
	$(BIN)/python tests/support/public_surface.py --write

verify: lint type docs ## Run all checks except the tests
	$(BIN)/python tests/support/schema_snapshot.py
	$(BIN)/python tests/support/public_surface.py

docs: $(MADE) ## Build the documentation as a site in .rota/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --config-file .mkdocs.yml && echo "open .rota/site/index.html"

bench: $(MADE) ## Measure on this machine
	$(BIN)/rota bench $(ARGS)

bench-peers: $(MADE) ## Compare drains with other job queues on PostgreSQL
	@$(BIN)/python tests/support/bench_peers.py $(ARGS)

chaos: $(MADE) ## Kill, stop and disconnect daemons and servers, from a printed seed
	$(BIN)/python tests/support/chaos.py $(ARGS)

chaos-time: $(MADE) ## Kill daemons with skewed clocks while schedules fire each second, from a printed seed
	$(BIN)/python tests/support/chaos_time.py $(ARGS)

fuzz: $(MADE) ## Insert hostile rows, open hostile sessions and send hostile requests, from a printed seed
	$(BIN)/python tests/support/fuzz.py $(ARGS)

constraints: $(MADE) ## Rewrite deploy/constraints.txt from the packages in .venv
	@$(BIN)/python tests/support/constraints.py > .venv/constraints.new
	@mv .venv/constraints.new deploy/constraints.txt
	@touch .venv/.made-$$(cat pyproject.toml deploy/constraints.txt | cksum | cut -d' ' -f1)

# The stamp's name contains a checksum of pyproject.toml and constraints.txt, so a change of either rebuilds the environment.
$(MADE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is older than Python 3.11. Use another interpreter: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "installing rota and its dependencies into .venv. The first time, this takes a minute or two" >&2
	@set -e; if command -v uv >/dev/null; then \
		$(BIN)/python -c '' 2>/dev/null || $(INSTALLING) uv venv --quiet --clear --python "$$(command -v $(PYTHON))" .venv; \
		$(INSTALLING) uv pip install --quiet --python $(BIN)/python -c deploy/constraints.txt -e '.[dev]'; \
	else \
		$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(MAKE) --no-print-directory .ensurepip; \
		$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv; \
		$(INSTALLING) $(BIN)/python -m pip install --quiet --disable-pip-version-check \
			-c deploy/constraints.txt -e '.[dev]'; \
	fi
	@rm -f .venv/.made-* && touch $@

.PHONY: .ensurepip
.ensurepip:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing python3-venv, which Debian packages separately"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv; \
	else \
		echo "$(PYTHON) has no ensurepip. Install python3-venv (Debian, Ubuntu: sudo apt-get install python3-venv)," >&2; \
		echo "or install uv, or use another interpreter: make PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi

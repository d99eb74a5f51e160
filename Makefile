# Every target sets up what it needs. `make demo` and `make test` are the two to know; `make help` lists all.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# data sets beside the repository, unless told otherwise
ifeq ($(origin GOLINEAR_DATA),undefined)
ifneq ($(wildcard ../shared/data/*),)
export GOLINEAR_DATA := $(abspath ../shared/data)
endif
endif
# the programs of the virtual environment find each other, also in processes that Prefect and Ray start
export PATH := $(abspath $(BIN)):$(PATH)
export DO_NOT_TRACK := true
export NO_MKDOCS_2_WARNING := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false

.PHONY: help install up down demo test test-faults docs lint audit bench constraints clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  make \1\t/' | expand -t 22

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; name one with make PYTHON=python3.12 …")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing (about two minutes the first time) …"
	@$(BIN)/pip install -q --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]' 2> $(VENV)/install.log \
	  || { cat $(VENV)/install.log; exit 1; }
	@touch $@

install: $(STAMP)  ## virtual environment in .venv

up: $(STAMP)  ## Prefect server, pool and worker, MLflow page, SmolLM2-135M; prints the addresses
	@golinear up

down:  ## stop what `make up` started
	@test ! -x $(BIN)/golinear || golinear down

demo:  ## the whole path on a real model: up, a sweep, its table, down
	@bash scripts/demo.sh

test: $(STAMP)  ## the test suite, in two processes: what needs services (mostly waiting) beside all else
	@python -m pytest -n 2

test-faults: $(STAMP)  ## faults injected into real small sweeps
	@python -m pytest -m faults tests/sweeps tests/integration

docs: $(STAMP)  ## the documentation as a site in site/
	@mkdocs build && echo "site/index.html; with search: python -m http.server -d site"

lint: $(STAMP)  ## ruff, mypy, and a look at known vulnerabilities (which does not fail here)
	@ruff check . && mypy
	-@bash scripts/audit.sh

audit: $(STAMP)  ## known vulnerabilities of the installed packages, where their database can be reached
	@bash scripts/audit.sh

bench: $(STAMP)  ## speed of the mechanisms on this machine
	@golinear bench mechanisms

bench-gpu: $(STAMP)  ## every GPU measurement of results/, into bench-gpu/
	@bash scripts/bench_gpu.sh bench-gpu

constraints: $(STAMP)  ## write constraints.txt anew from what is installed
	@{ sed -n '/^#/p' constraints.txt; pip freeze --exclude-editable | grep -viE '^(torch|triton|nvidia[a-z0-9-]*)==|@ '; } > $(VENV)/constraints.txt
	@mv $(VENV)/constraints.txt constraints.txt

clean: down  ## remove the virtual environment and the working files of this checkout
	rm -rf $(VENV) .golinear prefect.toml

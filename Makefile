# Everything here makes its own environment in .venv when it is first needed; see `make help`.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin

# Which torch: cpu, cuda or existing. Without a word, what the environment was made with.
TORCH ?= $(or $(shell cat $(VENV)/diloco-torch 2>/dev/null),cpu)
ifeq ($(filter cpu cuda existing,$(TORCH)),)
$(error TORCH is '$(TORCH)'; one of cpu, cuda, existing)
endif

# Shortest inner step of `make run`, seconds: four learners share two cores at equal speeds with it.
PACE ?= 0.2

# More for the command: make run ARGS="--learners 2", make test ARGS="-k layout"
ARGS ?=

# The packages are installed without bytecode; every process of a fleet would compile torch anew where
# the surrounding shell forbids to write it. It lies in the environment, never beside the sources.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/bytecode

STAMP := $(VENV)/.installed-$(TORCH)
PROOFS := $(sort $(subst _,-,$(patsubst benchmarks/proofs/%.py,%,\
	$(filter-out %/__init__.py,$(wildcard benchmarks/proofs/*.py)))))
PROTOS := $(wildcard protos/decoupled_diloco/v1/*.proto)

$(STAMP): pyproject.toml requirements.lock scripts/setup.sh scripts/setup_environment.py
	@scripts/setup.sh --venv $(VENV) --torch $(TORCH) $(if $(filter undefined,$(origin TORCH_INDEX)),,--index '$(TORCH_INDEX)')
	@touch $@

.PHONY: help
help:
	@echo 'make run          train a small language model with a fleet on this machine (diloco run)'
	@echo 'make test         run the tests'
	@echo 'make chaos        break fleets on purpose, and see what holds (diloco chaos run all --short)'
	@echo 'make storm        kill learners at random for a minute, beside the same fleet left alone'
	@echo 'make lint         ruff, mypy and buf'
	@echo 'make images       build the container images of compose/ (decoupled-diloco/NAME:dev)'
	@echo 'make test-containers   run a fleet of containers and test it; starts an engine if need be'
	@echo 'make proof-NAME   the long form of a claim; output goes to benchmarks/proofs/NAME.txt'
	@echo '                  names: $(or $(PROOFS),none yet)'
	@echo 'make protos       regenerate the modules of protos/ after a change of a .proto'
	@echo 'make lock         resolve pyproject.toml anew and write requirements.lock'
	@echo 'make clean        remove the environment and all caches; runs/ stays'
	@echo
	@echo 'ARGS="..."        more arguments for run, test, test-containers and proof-NAME'
	@echo 'TORCH=cpu|cuda|existing   which torch .venv has; existing keeps the one of your Python'
	@echo 'TORCH_INDEX=URL   extra package index for torch; empty for none'
	@echo 'PYTHON=PATH       the Python that .venv is made with, 3.11 or later'

.PHONY: run
run: $(STAMP)
	@$(BIN)/diloco run --pace $(PACE) $(ARGS)

# Two workers at most: the tests start real processes. A file's tests stay together and in order, and
# files begin in the order that tests/conftest.py gives them: the long ones first.
# Plugins are named: with TORCH=existing, those of the surrounding Python would join in.
PYTEST_PLUGINS_USED := -p xdist -p asyncio -p timeout -p pytest_cov -p hypothesispytest
.PHONY: test
test: $(STAMP)
	@OMP_NUM_THREADS=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(BIN)/python -m pytest \
		$(PYTEST_PLUGINS_USED) -q -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

.PHONY: images
images:
	@scripts/build-images.sh

.PHONY: test-containers
test-containers: $(STAMP)
	@scripts/container-tests.sh $(ARGS)

.PHONY: lint
lint: $(STAMP)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/buf lint protos
	@$(BIN)/buf format --diff --exit-code protos

# Shipped scenarios on fleets of processes, in their short form, one after the other.
.PHONY: chaos
chaos: $(STAMP)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/diloco chaos run all --short $(ARGS)

# The short form of proof-storm.
.PHONY: storm
storm: $(STAMP)
	@$(BIN)/python -u -m benchmarks.proofs.storm --seconds 60 --plays 3 --no-write $(ARGS)

.PHONY: protos
protos: $(STAMP)
	@$(BIN)/buf format --write protos
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos \
		--python_out=protos --grpc_python_out=protos --mypy_out=protos --mypy_grpc_out=protos $(PROTOS)

proof-%: FORCE
	@if [[ ! -f benchmarks/proofs/$(subst -,_,$*).py ]]; then \
		echo "error: no proof is called $*; there are: $(or $(PROOFS),none yet)" >&2; exit 64; fi
	@$(MAKE) --silent --no-print-directory $(STAMP)
	@$(BIN)/python -u -m benchmarks.proofs.$(subst -,_,$*) $(ARGS) \
		| tee benchmarks/proofs/$*.txt

.PHONY: FORCE
FORCE:

.PHONY: lock
lock:
	@rm -rf .make/lock && mkdir -p .make
	@"$$(scripts/setup.sh --print-python)" -m venv .make/lock
	@.make/lock/bin/pip install -qq packaging
	@.make/lock/bin/python scripts/write_lock.py --wanted > .make/wanted.txt
	@grep '^torch==' requirements.lock >> .make/wanted.txt
	@.make/lock/bin/pip install -qq --requirement .make/wanted.txt
	@.make/lock/bin/python scripts/write_lock.py
	@rm -rf .make

.PHONY: clean
clean:
	@rm -rf $(VENV) .make artifacts build dist *.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +

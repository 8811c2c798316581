# SPDX-License-Identifier: Apache-2.0
# Everything runs in the virtual environment .venv, which the first target that needs it
# makes. What is installed is not installed again until setup.cfg changes, so that all
# targets work without a network from then on.

VENV ?= .venv
PEERS ?= .venv-peers
CLIENTS ?= .venv-clients
NIGHTLY ?= .venv-nightly
PROTO ?= .venv-proto
BIN := $(VENV)/bin
# A Python 3.11 or newer for which TensorFlow has wheels; override with PYTHON=...
CHECK := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c '$(CHECK)' >/dev/null 2>&1 && echo $$python && break; done)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

EXAMPLES := digits keras-fit torch-style strategies resnet gan language-model pipeline \
	tensor-parallel evolution learner

.PHONY: help $(EXAMPLES) test test-long coverage test-options test-plain test-v1 test-hosts test-clients test-nightly long mutants map lint format docs docs-serve docs-check proto wheel test-matrix gpu-check bench bench-peers bench-hosts clean

help:
	@echo "make digits   train a small network on handwritten digits, on two replicas"
	@echo "make keras-fit, resnet, gan, ...  run another example: docs/programs has them"
	@echo "make test     run all tests but the slow ones, and some of these"
	@echo "make test-long  run the slow tests; hours"
	@echo "make coverage  run all tests, with the coverage of replicator/"
	@echo "make test-options  run the suite again with each option of Replicator; hours"
	@echo "make test-plain  run the core of the suite without what is only for speed"
	@echo "make test-v1  run the tests in sessions as programs of TensorFlow 1"
	@echo "make test-hosts  run the core of the suite on two other processes, faults, and"
	@echo "                 what needs root: hosts that are network namespaces"
	@echo "make test-clients  train other libraries' models, in an environment of their own"
	@echo "make test-nightly  run the fast tests with pre-releases of TensorFlow and Keras"
	@echo "make long     run each of these long targets that has not run on this commit"
	@echo "make mutants  find which test of the gate finds each seeded bug; an hour"
	@echo "make map      print every file of replicator/ with its first line"
	@echo "make lint     check formatting, lint rules and types"
	@echo "make format   format the code and fix what ruff can fix"
	@echo "make docs     build the documentation site, and run the programs in it"
	@echo "make docs-check  look at all of its pages in a headless Chromium"
	@echo "make docs-serve  show it, at http://127.0.0.1:8000"
	@echo "make wheel    build sdist and wheel, and try the wheel in an empty environment"
	@echo "make test-matrix  run the fast tests with each Python and both ends of TensorFlow's range"
	@echo "make gpu-check  check and measure on the GPUs of this machine, if it has any"
	@echo "make proto    make strategy_pb2.py of strategy.proto, in .venv-proto"
	@echo "make bench    measure against one device and MirroredStrategy; 50 minutes"
	@echo "make bench-peers  measure torch and JAX, in an environment of their own"
	@echo "make bench-hosts  measure two hosts, network namespaces with 1 Gbit/s; root only"
	@echo "make clean    remove .venv, .venv-peers, ... and all caches"

$(EXAMPLES): $(VENV)/.examples
	$(BIN)/python examples/$(subst -,_,$@).py

PARALLEL := --numprocesses=auto --dist=worksteal

# Three processes read all tests, which takes each half as long where they are compiled.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.test
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow or gate"

# TESTS=tests/launch runs the slow tests there.
TESTS ?=
test-long: $(VENV)/.test
	$(BIN)/python -m pytest $(PARALLEL) --timeout=3600 --hypothesis-profile=default \
		-m slow $(TESTS)

coverage: $(VENV)/.test
	$(BIN)/python -m pytest $(PARALLEL) --cov --cov-report=term

# What Replicator computes does not depend on how; OPTIONS="build=clone" runs one only,
# PART=3/10 a tenth of the tests.
PART ?= 0/1
OPTIONS ?= variables=mirrored variables=sharded fusion=False factors=False kernels=False \
	build=clone algorithm=hub algorithm=shuffled algorithm=tree algorithm=ring steps_per_call=True
test-options: $(VENV)/.test
	for option in $(OPTIONS); do \
		$(BIN)/python -m pytest $(PARALLEL) --part $(PART) --with $$option || exit; done

# What a TensorFlow may lack, and only makes Replicator faster, is off.
test-plain: $(VENV)/.test
	REPLICATOR_FAST=0 $(BIN)/python -m pytest $(PARALLEL) -m "not slow" tests/_tf \
		tests/programs tests/primitives tests/graph tests/control_flow tests/variables tests/step \
		tests/test_failures.py

# What runs in sessions also runs in programs that disable TensorFlow 2's behavior.
test-v1: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses=auto --v1 -k "session and not eager"

# What a program computes does not depend on which process its devices are in.
test-hosts: $(VENV)/.test
	$(BIN)/python -m pytest $(PARALLEL) --hosts -m "not slow" tests/test_end_to_end.py \
		tests/programs tests/primitives tests/control_flow tests/optimizers tests/test_checkpoints.py \
		tests/test_savers.py tests/test_saved_model.py tests/keras/test_programs.py
	$(BIN)/python -m pytest --numprocesses=0 --timeout=0 --faults=10 tests/cluster/test_faults.py \
		tests/between/test_restarts.py
	$(BIN)/python -m pytest --numprocesses=0 -m root tests

# Some stand on Keras 3 and others on tf_keras, as tf.keras.
test-clients: $(CLIENTS)/.clients
	$(CLIENTS)/bin/python -m pytest tests/clients/keras3
	TF_USE_LEGACY_KERAS=1 $(CLIENTS)/bin/python -m pytest tests/clients/legacy

# The newest there are, looked up each time, in place of those that setup.cfg allows.
# NIGHTLY_TF=tf-nightly takes TensorFlow as it was last night. All packages of one name
# in Python go first: two of them would mix their files.
NIGHTLY_TF ?= tensorflow-cpu
NIGHTLY_PIP := $(NIGHTLY)/bin/python -m pip --quiet --disable-pip-version-check
test-nightly:
	$(MAKE) VENV=$(NIGHTLY) $(NIGHTLY)/.test
	$(NIGHTLY_PIP) uninstall --yes tensorflow tensorflow-cpu tf-nightly
	$(NIGHTLY_PIP) install --pre --upgrade $(NIGHTLY_TF)
	$(NIGHTLY_PIP) uninstall --yes keras keras-nightly
	$(NIGHTLY_PIP) install --pre --no-deps keras-nightly
	$(NIGHTLY)/bin/python -c 'import keras, tensorflow; \
		print("TensorFlow", tensorflow.__version__, "Keras", keras.__version__)'
	$(NIGHTLY)/bin/python -m pytest $(PARALLEL) -m "not slow"

# All of the long targets that have no row of this commit in tests/RUNS.md, one after
# another; can be interrupted. LONG="test-v1 docs-check" repeats these.
LONG ?=
long: $(VENV)/.test
	$(BIN)/python -m tools.long_runs $(LONG)

# tests/mutants/table.toml has the bugs; writes TABLE.md beside it. ONLY="a residual" tries
# those whose names begin so.
ONLY ?=
mutants: $(VENV)/.test
	nice -n 15 $(BIN)/python -m tests.mutants $(if $(ONLY),"$(ONLY)")

map: $(BIN)/python
	$(BIN)/python -m tools.map

lint: $(VENV)/.test
	$(BIN)/ruff format --check --quiet
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/typed/mypy.ini tests/typed/uses_all.py
	$(BIN)/python tools/links.py

format: $(VENV)/.test
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# Needs no network. A warning, a dead link or a public name without a page fails it. What
# cells of pages print is kept until replicator/, examples/ or docs/helpers/ changes.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going --quiet -b html docs docs/_build/html
	@echo "The site is docs/_build/html/index.html"

# Needs Chromium, Debian's say; CHROMIUM=... names another.
docs-check: docs
	$(BIN)/python -m docs.check_browser

DOCS_PORT ?= 8000
docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory docs/_build/html $(DOCS_PORT)

# Of the newest commit. Leaves both in dist/.
wheel: $(BIN)/python
	$(BIN)/python tools/wheel.py

# Each pair in an environment of its own; Pythons that are not there are named.
# MATRIX="--only=3.12-2.21 -- tests/plan" runs less.
test-matrix: $(BIN)/python
	$(BIN)/python tools/matrix.py $(MATRIX)

# Without a GPU it says so, and that is all. The report is gpu-report.md, the log gpu-report.log.
gpu-check: $(VENV)/.test
	$(BIN)/python -m tools.gpu_check $(GPU_CHECK)

# By a protoc whose Python code works with every protobuf of the supported TensorFlows,
# from 3.20.3 on: a newer one asks for a protobuf as new as itself. It is in wheels of
# grpcio-tools for Python 3.11 at most; PROTO_PYTHON=... names one.
PROTO_PYTHON ?= python3.11
PROTO_FILE := replicator/strategy/strategy.proto
proto: $(PROTO)/.proto
	$(PROTO)/bin/python -m grpc_tools.protoc --proto_path=. --python_out=. $(PROTO_FILE)

# Each writes benchmarks/RESULTS.md anew. BENCH=--quick only tries whether all runs.
bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks $(BENCH)

bench-peers: $(VENV)/.bench $(PEERS)/.peers
	$(PEERS)/bin/python -m benchmarks.peers $(BENCH)
	$(BIN)/python -m benchmarks.report $(BENCH)

# LINKS=--links=loopback needs no root.
bench-hosts: $(VENV)/.bench $(PEERS)/.peers
	$(BIN)/python -m benchmarks.hosts --torch=$(PEERS)/bin/python $(LINKS) $(BENCH)
	$(BIN)/python -m benchmarks.report $(BENCH)

clean:
	rm -rf $(VENV) $(PEERS) $(CLIENTS) $(NIGHTLY) $(PROTO) build dist .venv-matrix .long gpu-report.* docs/_build docs/reference/api *.egg-info htmlcov .coverage .coverage.*
	rm -rf .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python 3.11, 3.12 or 3.13 was found." \
		"Install one, or name it: make PYTHON=/path/to/python3" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# One stamp per extra says that it is installed, as setup.cfg has it.
$(VENV)/.examples: setup.cfg pyproject.toml | $(BIN)/python
	@echo "Installing replicator and what its examples need into $(VENV) ..."
	$(PIP_INSTALL) --editable '.[examples]'
	@touch $@

$(VENV)/.bench: setup.cfg pyproject.toml | $(BIN)/python
	@echo "Installing replicator and what its benchmarks need into $(VENV) ..."
	$(PIP_INSTALL) --editable '.[bench]'
	@touch $@

$(VENV)/.docs: setup.cfg pyproject.toml | $(BIN)/python
	@echo "Installing replicator and what its documentation needs into $(VENV) ..."
	$(PIP_INSTALL) --editable '.[docs]'
	@touch $@

$(PEERS)/.peers: benchmarks/peers/requirements.txt | $(BIN)/python
	@echo "Installing torch and JAX into $(PEERS) ..."
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check \
		--requirement $<
	@touch $@

$(CLIENTS)/.clients: setup.cfg pyproject.toml
	@echo "Installing replicator and libraries that use it into $(CLIENTS) ..."
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check \
		--editable '.[clients]'
	@touch $@

$(PROTO)/.proto: Makefile
	$(PROTO_PYTHON) -m venv $(PROTO)
	$(PROTO)/bin/python -m pip install --quiet --disable-pip-version-check \
		'grpcio-tools == 1.49.1' 'setuptools < 80'
	@touch $@

# The test extra holds the others.
$(VENV)/.test: setup.cfg pyproject.toml | $(BIN)/python
	@echo "Installing replicator and what its tests need into $(VENV) ..."
	$(PIP_INSTALL) --editable '.[test]'
	@touch $(VENV)/.examples $(VENV)/.bench $@

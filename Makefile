# Two commands set everything up: `make demo` and `make test`. Both need Python >= 3.11 and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# of 13,365 modules that pip would compile the tests and tools import some 3,600, and compile them then
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

# Waiting threads sleep instead of spinning: on a shared machine spinning ones take the cores from those at work.
export OMP_WAIT_POLICY ?= passive
# Modules are compiled once, by the first process of many that imports them.
export PYTHONDONTWRITEBYTECODE :=

# the oldest supported transformers, in an environment that shares everything else with .venv
OLDEST := .venv-oldest

.PHONY: demo test test-all oldest check lint sanitize sanitized arm fuzz soak mutations gate bench wheels matrix format docs clean help
.DEFAULT_GOAL := help

help:
	@echo "make demo    install into .venv (3 minutes) and run the main job (90 s): report in ringweave-demo.html"
	@echo "make test    install into .venv and run the tests: 12 to 30 minutes on two cores"
	@echo "make test-all  every case of them: half as long again"
	@echo "make oldest  tests of the integration and the audit with the oldest supported transformers"
	@echo "make check   lint, types, layers, docstrings, public names; make lint: without the last, which are tests"
	@echo "make sanitize  the native kernel's tests under AddressSanitizer and UBSan"
	@echo "make arm     the native kernel's tests on aarch64, run by an emulator: half an hour"
	@echo "make fuzz    random calls against the definition for SECONDS (60), of a SEED (a new one)"
	@echo "make soak    TABLES (10000) changed tables in threads and processes, SECONDS (60) of 32 threads on memory: nothing of another one"
	@echo "make mutations  the library broken in one line, many times: whether its tests notice"
	@echo "make gate    eight ratios of speed, held to those of lab/results/baseline.json, and cliffs, held to bounds"
	@echo "make bench   every goal of the design notes that this machine can measure: target and value; ringweave-bench.html"
	@echo "make wheels  what a release has, as far as this machine can, into dist/; tried in fresh environments"
	@echo "make matrix  tests that depend on versions, with each pair of Python, torch and transformers: 20 minutes or more, 5 GB each"
	@echo "make docs    build the documentation into site/"

$(BIN)/python:
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'ringweave needs Python 3.11 or newer: make PYTHON=...')"
	$(PYTHON) -m venv $(VENV)

# the stamps hold what is installed: they are made anew when the project's requirements change
NATIVE := CMakeLists.txt $(wildcard csrc/*)
REQUIREMENTS := pyproject.toml audit/pyproject.toml gpu/pyproject.toml lab/pyproject.toml constraints.txt
STEP := scripts/step.sh

# what builds the kernel: with it the sanitized one is compiled while the rest is being installed
$(VENV)/.build: constraints.txt | $(BIN)/python
	@$(STEP) "Installing what compiles the kernel (15 s)" $(PIP) cmake ninja nanobind scikit-build-core
	touch $@

# the folder of the build is kept, so that a change compiles only its own part anew
$(VENV)/.kernel: $(NATIVE) pyproject.toml | $(VENV)/.build
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(STEP) "Compiling the kernel (about 90 s of processor time, on all cores)" \
	  $(PIP) --no-deps --no-build-isolation --config-settings build-dir=build/editable --editable .
	touch $@

# ringweave itself is installed, so that pip adds what it needs, and compiles nothing
$(VENV)/.demo: $(VENV)/.kernel $(REQUIREMENTS)
	@$(STEP) "Installing PyTorch and other packages (1 minute)" \
	  $(PIP) 'ringweave[all]' --editable ./audit --editable ./gpu --editable ./lab
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	@$(STEP) "Installing the tools of the tests (1 minute)" $(PIP) 'ringweave[all,dev]'
	touch $@

demo: $(VENV)/.demo
	$(BIN)/ringweave demo --out ringweave-demo.html

# two processes, each a file at a time: a file's tests share what is made once, and a page's examples go on from each other
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --long

$(OLDEST)/.made: constraints-oldest.txt | $(VENV)/.dev
	$(BIN)/python -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -c "import sysconfig, pathlib; path = sysconfig.get_path('purelib'); \
	  pathlib.Path(path, 'shared.pth').write_text('import site; site.addsitedir(%r)' % path.replace('$(OLDEST)', '$(VENV)'))"
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  --constraint constraints-oldest.txt transformers
	touch $@

# a short suite: what differs between versions of transformers
oldest: $(OLDEST)/.made
	$(OLDEST)/bin/python -m pytest -p no:cacheprovider tests/integrations/test_every_version.py \
	  audit/tests/test_every_version.py \
	  tests/integrations/test_flash_attn_install.py \
	  tests/integrations/test_keywords.py::test_every_keyword_of_transformers_is_known

# what `make test` has no part of
lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint
	$(BIN)/python -m pytest tests/test_public.py

sanitized: $(VENV)/.build
	PYTHON=$(BIN)/python scripts/sanitize.sh --build

sanitize: $(VENV)/.dev sanitized
	PYTHON=$(BIN)/python scripts/sanitize.sh

# two processes; ARGS go to pytest
arm: $(VENV)/.dev
	$(BIN)/python -m tests.native.emulated build-arm -n 2 $(ARGS)

SECONDS ?= 60
fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

# the seed in the name, so that it goes with other targets
fuzz-%: $(VENV)/.dev
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) --seed $*

TABLES ?= 10000
soak: $(VENV)/.dev
	$(BIN)/python -m tests.adaptive.test_mutated_tables $(TABLES)
	$(BIN)/python -m tests.memory.test_threads $(SECONDS)

mutations: $(VENV)/.dev
	$(BIN)/python lab/scripts/mutations.py

gate: $(VENV)/.dev
	$(BIN)/ringweave bench --gate lab/results/baseline.json

# cases with goals, at their own sizes; of those that take half an hour each, what was kept of them; the page has all goals,
# and after it counts what failed
GOALS := kernels packed terms decode memory ring
KEPT := $(addprefix lab/results/cpu-,models.jsonl quality.jsonl tiles.jsonl)
bench: $(VENV)/.dev
	rm -f ringweave-bench.jsonl
	failed=0; \
	for case in $(GOALS); do $(BIN)/ringweave bench $$case --rounds 3 --out ringweave-bench.jsonl || failed=1; done; \
	$(BIN)/ringweave bench planning --threads 1 --rounds 3 --out ringweave-bench.jsonl || failed=1; \
	$(BIN)/ringweave bench module --out ringweave-bench.jsonl || failed=1; \
	$(BIN)/ringweave bench page ringweave-bench.jsonl $(KEPT) --out ringweave-bench.html && exit $$failed

wheels: $(VENV)/.dev
	PYTHON=$(BIN)/python scripts/wheels.sh

# ARGS choose versions: --torch 2.15.0
matrix: | $(BIN)/python
	$(BIN)/python scripts/matrix.py $(ARGS)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev
	$(BIN)/python docs/pictures.py
	$(BIN)/mkdocs build --strict

clean:
	rm -rf build build-sanitize build-arm dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

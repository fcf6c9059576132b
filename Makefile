# radixkv: `make run` serves, `make quick` checks an edit, `make test` tests. Each sets up .venv first, once, and again
# when pyproject.toml changes.
#
#   make run ARGS="--port 8500"        further options of `radixkv serve`
#   make test PYTEST="tests/index -q"   what pytest is told; quick takes it too
#   make test WORKERS=0                one test at a time; otherwise one more than cores (tests wait too), at most 4
#   make run RADIXKV_PURE=1            with index and policies as pure Python, though they are compiled
#   make test RADIXKV_COMPILE=1        fail if they can't be compiled; 0: don't compile them
#   make lives LIVES=20000             how many random lives
#   make fuzz SECONDS=600              how long each fuzz driver goes on
#   make faults MINUTES=60 SEED=7      how long faults happen to a fleet, and their first seed
#   make test-pure INTERRUPT_ALL=1     interrupt each call at each of its steps, under each policy, not at some: minutes
#   make … PYTHON=/path/to/python      the Python (3.11 or newer) that .venv is made of
#   make … VENV=/path/to/venv          another place than .venv

VENV   ?= .venv
PYTHON ?=
ARGS   ?=
PYTEST ?=
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PROGRESS_S ?= 30
LIVES ?= 2000
SECONDS ?= 60
MINUTES ?= 2
SEED ?= 1
SPREAD = -n $(WORKERS) --maxprocesses 4 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help run quick test test-all test-pure test-browser test-gpu lives compile fuzz faults lint format clean
MAKEFLAGS += --no-print-directory

help:
	@printf '%s\n' \
	  'make run           set up, and serve on http://127.0.0.1:8400 (ARGS="…" for options)' \
	  'make quick         lint, the fast tests on the build that is there, 100 random lives: for every edit' \
	  'make test          compile, and run the whole test suite once (PYTEST="…" for options)' \
	  'make test-all      test, test-pure, lives, test-browser, faults: what .ci/run runs after lint' \
	  'make test-pure     the tests that need the index as pure Python: they patch or trace it (INTERRUPT_ALL=1 for all steps)' \
	  'make test-browser  the tests that look at pages in a Chromium' \
	  'make test-gpu      the tests that need a GPU, then the benchmark of the kernels' \
	  'make lives         LIVES=2000 random lives of the cache' \
	  'make faults        let faults happen to a fleet over Redis for MINUTES=2' \
	  'make fuzz          let each fuzz driver (and each target of atheris) go on for SECONDS=60' \
	  'make compile       bring the compiled index and policies up to date with their sources' \
	  'make lint          ruff, mypy --strict, import contracts' \
	  'make format        let ruff format and mend what it can' \
	  'make clean         remove .venv, caches and builds'

run: $(VENV)/.installed-all
	@echo 'Loading the model: seconds, on a busy machine a minute or more ...'
	@exec $(VENV)/bin/radixkv serve $(ARGS)

quick: lint
	@HYPOTHESIS_PROFILE=quick RADIXKV_EXAMPLES=100 $(VENV)/bin/python -m pytest $(SPREAD) -q -m 'not slow and not pure' $(PYTEST)

test: compile
	@$(VENV)/bin/python -m pytest $(SPREAD) $(PYTEST)

test-all: test test-pure lives test-browser faults

# Where nothing is compiled, `make test` has run them.
test-pure: compile
	@RADIXKV_PURE=1 $(VENV)/bin/python -m pytest $(SPREAD) -m pure $(PYTEST)

# The whole cache, two worlds, outages of the store, snapshots of a cache that goes on.
lives: compile
	@RADIXKV_EXAMPLES=$(LIVES) $(VENV)/bin/python -m pytest $(SPREAD) tests/isolation/test_machine.py \
	  tests/isolation/test_non_interference.py tests/isolation/test_outages.py tests/index/test_snapshot.py

compile: $(VENV)/.installed-dev
	@$(VENV)/bin/python hatch_build.py

test-browser: $(VENV)/.installed-dev
	@exec $(VENV)/bin/python -m pytest -m browser $(PYTEST)

# Where torch sees no GPU, pytest finds nothing to run and says so (exit 5).
test-gpu: $(VENV)/.installed-dev
	@$(VENV)/bin/python -m pytest -m gpu tests/kernels tests/storage tests/engines $(PYTEST)
	@$(VENV)/bin/radixkv bench kernels --device cuda

fuzz: $(VENV)/.installed-dev
	@for driver in fuzz/*.py; do $(VENV)/bin/python $$driver --seconds $(SECONDS) || exit 1; done

faults: compile
	@$(VENV)/bin/python fuzz/faults.py --minutes $(MINUTES) --seed $(SEED)

lint: $(VENV)/.installed-dev
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --quiet --check . || { $(VENV)/bin/ruff format --check . ; exit 1; }
	@$(VENV)/bin/mypy --no-error-summary
	@found=$$($(VENV)/bin/lint-imports 2>&1) || { printf '%s\n' "$$found"; exit 1; }
	@echo 'lint: ruff, mypy --strict and the import contracts have nothing to say'

format: $(VENV)/.installed-dev
	@$(VENV)/bin/ruff format --quiet .
	@$(VENV)/bin/ruff check --quiet --fix .

clean:
	@rm -rf $(VENV) build dist radixkv/index/_native radixkv/coordination/_native policies/radixkv_policies/_native .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What runs the service is a part of what tests it: whoever has the second has the first.
$(VENV)/.installed-all: pyproject.toml
	@if [ -e $(VENV)/.installed-dev ]; then $(MAKE) $(VENV)/.installed-dev; else $(call install,all); fi
	@touch $@

$(VENV)/.installed-dev: pyproject.toml
	@$(call install,dev)
	@touch $@ $(VENV)/.installed-all

# $(call install,EXTRA): radixkv and an extra into $(VENV), editable. Says one line; on failure, what pip said.
define install
	set -e; \
	if ! $(VENV)/bin/python -c 'import pip' >/dev/null 2>&1; then \
	  python=$$(sh -c '$(find_python)') || exit 1; \
	  said=$$("$$python" -m venv --clear $(VENV) 2>&1) || { printf '%s\n' "$$said" \
	    "make: $$python could not create $(VENV). On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	fi; \
	echo 'Installing radixkv[$(1)] into $(VENV): the first time takes minutes, on a busy machine ten or more ...'; \
	$(call show_progress,$(VENV)/install.log) \
	$(VENV)/bin/python -m pip install --progress-bar off --disable-pip-version-check --no-input \
	  --editable '.[$(1)]' >$(VENV)/install.log 2>&1 || { end_progress; cat $(VENV)/install.log >&2; \
	  echo 'make: pip could not install radixkv[$(1)]; what it said stands above' >&2; exit 1; }; \
	end_progress; \
	$(VENV)/bin/python -c 'import radixkv, sys; sys.exit(not radixkv.COMPILED)' || \
	  echo 'The index runs as pure Python, at half the speed (RADIXKV_COMPILE=1 says why it is not compiled)'
endef

# $(call show_progress,LOG): until end_progress, says how long it takes and what LOG ends with: on a terminal in one line
# each second, elsewhere in a line each PROGRESS_S seconds.
define show_progress
	( seconds=0; while sleep 1 && kill -0 $$$$ 2>/dev/null; do \
	    seconds=$$((seconds + 1)); step=$$(tail -n 1 $(1) 2>/dev/null | tr -d '[:cntrl:]' || true); \
	    if [ -t 1 ]; then printf '\r\033[K  %d s  %.60s' "$$seconds" "$$step"; \
	    elif [ $$((seconds % $(PROGRESS_S))) -eq 0 ]; then printf '  %d s  %.100s\n' "$$seconds" "$$step"; fi; \
	  done ) & progress=$$!; \
	end_progress() { kill $$progress 2>/dev/null || true; if [ -t 1 ]; then printf '\r\033[K'; fi; }; \
	trap 'end_progress; exit 130' INT TERM;
endef

# Prints the first Python that is new enough: the one given as PYTHON, otherwise one on PATH.
define find_python
	for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	  if "$$python" -c "import sys; sys.exit(sys.version_info < (3, 11))" >/dev/null 2>&1; then \
	    echo "$$python"; exit 0; fi; \
	done; \
	echo "make: no Python 3.11 or newer: tried $(or $(PYTHON),python3 python3.13 python3.12 python3.11)." \
	  "Name one: make PYTHON=/path/to/python" >&2; exit 1
endef

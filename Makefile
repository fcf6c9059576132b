# radixkv: `make run` serves, `make quick` checks an edit, `make test` tests. Each first sets up .venv if needed, and
# again when pyproject.toml or requirements/lock.txt changes.
#
#   make run ARGS="--port 8500"        further options of `radixkv serve`
#   make test PYTEST="tests/index -q"   arguments for pytest; quick, timing, test-release and others take it too
#   make test WORKERS=0                one test at a time; default: two more than cores (tests also wait), at most 5
#   make run RADIXKV_PURE=1            index and policies as pure Python, even if they are compiled
#   make test RADIXKV_COMPILE=1        1: fail if they can't be compiled; 0: don't compile them
#   make lives LIVES=20000 LIVES_SEED=7   number of random lives, and their seed
#   make fuzz SECONDS=600              time for each fuzz driver
#   make docs-serve ADDRESS=0.0.0.0:8000   the address of the server of the docs
#   make faults MINUTES=60 SEED=7      time for faults in a fleet, and their first seed
#   make recordings CLIENTS="codex opencode"   the clients to record; default: all
#   make busy LOOPS=8 BUSY="make quick"   the number of busy loops, and what runs beside them
#   make test-pure INTERRUPT_ALL=1     interrupt each call at every step instead of some: minutes
#   make … PYTHON=/path/to/python      the Python (3.11 or newer) for .venv
#   make … VENV=/path/to/venv          a folder other than .venv
#   make … LOCKED=                     install the newest versions that pyproject.toml allows, not those of the lock file
#   make … LOCKED=lowest               or the lowest (needs uv)

VENV   ?= .venv
PYTHON ?=
ARGS   ?=
PYTEST ?=
CORES = $(shell getconf _NPROCESSORS_ONLN)
WORKERS ?= $(shell expr $(CORES) + 2)
LOCKED ?= 1
PROGRESS_S ?= 30
LIVES ?= 2000
LIVES_SEED ?= $(shell date +%s)
LOOPS ?= 4
BUSY ?= make test
UV ?= uv
SECONDS ?= 60
MINUTES ?= 2
SEED ?= 1
ADDRESS ?= 127.0.0.1:8000
CLIENTS ?=
ENGINES ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/radixkv-engines
SPREAD = -n $(WORKERS) --maxprocesses 5 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help run quick test test-all test-release test-vary test-latest test-lowest test-pure test-browser test-gpu timing busy upgrade lives compile fuzz faults engines recordings docs docs-serve lint format clean
MAKEFLAGS += --no-print-directory
# Many tests start processes, which would compile all modules again each time.
unexport PYTHONDONTWRITEBYTECODE

help:
	@printf '%s\n' \
	  'make run           set up, and serve on http://127.0.0.1:8400 (ARGS="…" for options)' \
	  'make quick         lint, the fast tests on the build that is there, few random lives: for every edit' \
  'make test          compile, and run the test suite once (PYTEST="…" for options)' \
  'make test-all      test, test-release, test-vary, test-pure, lives, docs, test-browser, faults: before a release' \
  'make test-release  the tests that are too dear for every change: documentation, extras, wheels, planted servers' \
  'make test-vary     the generated tests with other examples than those of `make test`' \
  'make test-pure     the tests that need the index as pure Python: they patch or trace it (INTERRUPT_ALL=1 for all steps)' \
  'make test-browser  build the docs, and run the tests that look at pages in a Chromium' \
  'make test-latest   make test in .venv-latest, with the newest versions instead of the locked ones' \
  'make test-lowest   the same in .venv-lowest with the lowest versions that pyproject.toml allows (needs uv)' \
  'make timing        the tests of wall-clock times: on a quiet machine' \
  'make busy          make test beside LOOPS=4 busy loops' \
  'make upgrade       renew requirements/lock.txt, with uv' \
  'make engines       install vLLM and SGLang for CPUs and clients (9 GB, once) in ENGINES=~/.cache/radixkv-engines, and test radixkv in them' \
	  'make recordings    record again what CLIENTS= (all) send, for tests/agents: needs Node.js, installs 2 GB' \
	  'make test-gpu      the tests that need a GPU, then the benchmark of the kernels' \
	  'make lives         LIVES=2000 random lives of the cache' \
	  'make faults        let faults happen to a fleet over Redis for MINUTES=2' \
	  'make fuzz          let each fuzz driver (and each target of atheris) go on for SECONDS=60' \
	  'make docs          build the documentation into site/; warnings are errors' \
	  'make docs-serve    serve it on http://127.0.0.1:8000, built again when a file changes' \
	  'make compile       bring the compiled index and policies up to date with their sources' \
	  'make lint          ruff, mypy --strict, import contracts' \
	  'make format        let ruff format and mend what it can' \
	  'make clean         remove .venv, caches and builds'

run: $(VENV)/.installed-all
	@echo 'Loading the model: seconds, on a busy machine a minute or more ...'
	@exec $(VENV)/bin/radixkv serve $(ARGS)

quick: lint
	@HYPOTHESIS_PROFILE=quick RADIXKV_EXAMPLES=20 $(VENV)/bin/python -m pytest $(SPREAD) -q -m 'not slow and not pure' $(PYTEST)

test: compile
	@$(VENV)/bin/python -m pytest $(SPREAD) $(PYTEST)

test-all: test test-release test-vary
	@$(MAKE) test-pure INTERRUPT_ALL=1
	@$(MAKE) lives docs test-browser faults

test-release: compile
	@$(VENV)/bin/python -m pytest $(SPREAD) -m release $(PYTEST)

test-vary: compile
	@HYPOTHESIS_PROFILE=vary $(VENV)/bin/python -m pytest $(SPREAD) -m hypothesis $(PYTEST)

test-latest:
	@$(MAKE) test VENV=.venv-latest LOCKED=

test-lowest:
	@$(MAKE) test VENV=.venv-lowest LOCKED=lowest

timing: compile
	@$(VENV)/bin/python -m pytest -m timing $(PYTEST)

busy: compile
	@$(VENV)/bin/python -m tests.busy --loops $(LOOPS) -- $(BUSY)

# If nothing is compiled, `make test` runs them already. They never wait, so there is a worker for each core.
test-pure: WORKERS = $(CORES)
test-pure: compile
	@RADIXKV_PURE=1 $(VENV)/bin/python -m pytest $(SPREAD) -m pure $(PYTEST)

# Random lives of the whole cache, of two systems side by side, of store outages, of snapshots during changes, and of
# tenants on two replicas that are purged, removed and revoked while their requests wait.
lives: compile
	@RADIXKV_EXAMPLES=$(LIVES) RADIXKV_SEED=$(LIVES_SEED) $(VENV)/bin/python -m pytest $(SPREAD) \
	  --cpu-limit-s 36000 --wall-limit-s 72000 tests/isolation tests/index/test_snapshot.py \
	  tests/index/test_changes.py tests/index/test_recovery.py tests/service/test_endings_machine.py $(PYTEST)

compile: $(VENV)/.installed-dev
	@$(VENV)/bin/python hatch_build.py

test-browser: $(VENV)/.installed-dev docs
	@exec $(VENV)/bin/python -m pytest -m browser $(PYTEST)

# Pins the newest versions for Python 3.11 to 3.14, with the hashes of all their files, except those held back.
upgrade:
	@$(UV) pip compile --universal --python-version 3.11 --all-extras --generate-hashes --upgrade --no-header --quiet \
	  --constraint requirements/held.txt --output-file requirements/lock.txt pyproject.toml

# Without a GPU for torch, pytest collects no test and exits with 5.
test-gpu: $(VENV)/.installed-dev
	@$(VENV)/bin/python -m pytest -m gpu tests/kernels tests/storage tests/engines $(PYTEST)
	@$(VENV)/bin/radixkv bench kernels --device cuda

# Engines pin their own torch, so each gets an environment of its own. Without a GPU, vLLM's torchvision can't be
# imported, and SGLang's kernels can't be installed: it comes without its dependencies, which are listed instead.
engines: $(ENGINES)/vllm/.installed $(ENGINES)/sglang/.installed $(ENGINES)/clients/.installed $(ENGINES)/guidellm/.installed compile
	@RADIXKV_VLLM=$(ENGINES)/vllm/bin/python RADIXKV_SGLANG=$(ENGINES)/sglang/bin/python \
	  RADIXKV_CLIENTS=$(ENGINES)/clients/bin/python RADIXKV_GUIDELLM=$(ENGINES)/guidellm/bin/python \
	  $(VENV)/bin/python -m pytest -m engines tests/engines tests/examples tests/benchmarks $(PYTEST)

$(ENGINES)/vllm/.installed: tests/engines/vllm_requirements.txt
	@$(call install_engine,vllm)
	@$(ENGINES)/vllm/bin/python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
	@touch $@

$(ENGINES)/sglang/.installed: tests/engines/sglang_requirements.txt
	@$(call install_engine,sglang)
	@$(ENGINES)/sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-deps sglang==0.5.23
	@touch $@

$(ENGINES)/clients/.installed $(ENGINES)/guidellm/.installed: $(ENGINES)/%/.installed: tests/engines/%_requirements.txt
	@$(call install_engine,$*)
	@touch $@

# Agents and SDKs come from npm and PyPI, into ~/.cache/radixkv-agents. Needs Node.js.
recordings: $(VENV)/.installed-dev
	@$(VENV)/bin/python -m tests.agents.record $(CLIENTS)

fuzz: $(VENV)/.installed-dev
	@for driver in fuzz/*.py; do $(VENV)/bin/python $$driver --seconds $(SECONDS) || exit 1; done

faults: compile
	@$(VENV)/bin/python fuzz/faults.py --minutes $(MINUTES) --seed $(SEED)

docs: $(VENV)/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --quiet --strict
	@echo 'docs: site/index.html'

docs-serve: $(VENV)/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs serve --dev-addr $(ADDRESS)

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
	@rm -rf $(VENV) .venv-latest .venv-lowest build dist site radixkv/_native radixkv/*/_native policies/radixkv_policies/_native .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The extra `dev` includes `all`, so installing `dev` also marks `all` as installed.
$(VENV)/.installed-all: pyproject.toml requirements/lock.txt
	@if [ -e $(VENV)/.installed-dev ]; then $(MAKE) $(VENV)/.installed-dev; else $(call install,all$(comma)build); fi
	@touch $@

$(VENV)/.installed-dev: pyproject.toml requirements/lock.txt
	@$(call install,dev)
	@touch $@ $(VENV)/.installed-all

# Installs into an existing .venv too. The docs alone need no torch and no compiled index.
$(VENV)/.installed-docs: pyproject.toml requirements/lock.txt
	@export RADIXKV_COMPILE=0; $(call install,docs$(comma)build)
	@touch $@

# $(call install_engine,NAME): install an engine into an environment of its own.
define install_engine
	set -e; mkdir -p $(ENGINES); python=$$(sh -c '$(find_python)'); "$$python" -m venv --clear $(ENGINES)/$(1); \
	echo 'Installing $(1) into $(ENGINES)/$(1): 5 to 15 minutes ...'; \
	$(call show_progress,$(ENGINES)/$(1)/install.log) \
	$(ENGINES)/$(1)/bin/python -m pip install --progress-bar off --disable-pip-version-check --no-input \
	  --requirement tests/engines/$(1)_requirements.txt >$(ENGINES)/$(1)/install.log 2>&1 || { end_progress; \
	  cat $(ENGINES)/$(1)/install.log >&2; exit 1; }; end_progress
endef

# $(call install,EXTRA): install radixkv with an extra into $(VENV), editable. Prints one line, and pip's output if it
# fails.
comma = ,
define install
	set -e; \
	if ! $(VENV)/bin/python -c 'import pip' >/dev/null 2>&1; then \
	  python=$$(sh -c '$(find_python)') || exit 1; \
	  said=$$("$$python" -m venv --clear $(VENV) 2>&1) || { printf '%s\n' "$$said" \
	    "make: $$python could not create $(VENV). On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	fi; \
	echo 'Installing radixkv[$(1)] into $(VENV): the first time takes minutes, on a busy machine ten or more ...'; \
	$(call show_progress,$(VENV)/install.log) \
	install_all() { \
	  pip="$(VENV)/bin/python -m pip install --progress-bar off --disable-pip-version-check --no-input"; \
	  if [ -z "$(LOCKED)" ]; then $$pip --upgrade --editable '.[$(1)]'; return; fi; \
	  if [ "$(LOCKED)" = lowest ]; then \
	    $(UV) pip compile --python $(VENV)/bin/python --all-extras --resolution lowest-direct --quiet \
	      --output-file $(VENV)/lowest.txt pyproject.toml >&2 && \
	    $$pip --requirement $(VENV)/lowest.txt && $$pip --no-deps --no-build-isolation --editable .; return; fi; \
	  $(VENV)/bin/python requirements/locked.py $(1) >$(VENV)/locked.txt && \
	  $$pip --no-deps --require-hashes --requirement $(VENV)/locked.txt && \
	  torch=$$($(VENV)/bin/python requirements/locked.py $(1) --torch) && \
	  { [ -z "$$torch" ] || $$pip "$$torch"; } && \
	  $$pip --no-deps --no-build-isolation --editable .; }; \
	install_all >$(VENV)/install.log 2>&1 || { end_progress; cat $(VENV)/install.log >&2; \
	  echo 'make: pip could not install radixkv[$(1)]; what it said stands above' >&2; exit 1; }; \
	end_progress; \
	$(VENV)/bin/python -c 'import radixkv, sys; sys.exit(not radixkv.COMPILED)' || \
	  echo 'The index runs as pure Python, at half the speed (RADIXKV_COMPILE=1 says why it is not compiled)'
endef

# $(call show_progress,LOG): print the elapsed time and the last line of LOG until end_progress is called. A terminal
# gets one line, updated every second. Other outputs get a line every PROGRESS_S seconds.
define show_progress
	( seconds=0; while sleep 1 && kill -0 $$$$ 2>/dev/null; do \
	    seconds=$$((seconds + 1)); step=$$(tail -n 1 $(1) 2>/dev/null | tr -d '[:cntrl:]' || true); \
	    if [ -t 1 ]; then printf '\r\033[K  %d s  %.60s' "$$seconds" "$$step"; \
	    elif [ $$((seconds % $(PROGRESS_S))) -eq 0 ]; then printf '  %d s  %.100s\n' "$$seconds" "$$step"; fi; \
	  done ) & progress=$$!; \
	end_progress() { kill $$progress 2>/dev/null && wait $$progress 2>/dev/null || true; if [ -t 1 ]; then printf '\r\033[K'; fi; }; \
	trap 'end_progress; exit 130' INT TERM;
endef

# Print the first Python that is new enough: the one given as PYTHON, otherwise one on PATH.
define find_python
	for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	  if "$$python" -c "import sys; sys.exit(sys.version_info < (3, 11))" >/dev/null 2>&1; then \
	    echo "$$python"; exit 0; fi; \
	done; \
	echo "make: no Python 3.11 or newer: tried $(or $(PYTHON),python3 python3.13 python3.12 python3.11)." \
	  "Name one: make PYTHON=/path/to/python" >&2; exit 1
endef

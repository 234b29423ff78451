# make demo   plan a small published model for this machine and train it with that plan
# make test   run the short tier of the test suite, in about a quarter of an hour on two cores
# make test-long  run the long tier, what begins within MINUTES of it; CI runs it after the short one
# make test-all   run all of it, with what is left to the night
# make test-failed  run what failed last time once more, one test at a time
# make check  lint, types, and words that the glossary replaces
# make site   write the documentation as a site to site/
# make docs   write the pages, the picture and the table that are made from the code
# Each works by itself from a clean checkout. Python 3.11 or newer is all it needs.

PYTHON ?= python3
# One torch that the runtime is tested on; elsewhere e.g. TORCH="torch==2.12.1".
TORCH ?= torch==2.13.0
# Of the long tier; what has not begun by then is skipped with this reason.
MINUTES ?= inf
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := pyproject.toml $(shell find api schema profilers cost_models solvers planner engines runtime cli validation fitting -type f ! -name '*.pyc')

DEMO_MODEL ?= smollm2-135m
DEMO_STEPS ?= 36

.PHONY: demo test test-long test-all test-failed check docs site clean

demo: $(VENV)/installed
	mkdir -p demo
	$(BIN)/meshwright plan $(DEMO_MODEL) --cluster local --global-batch-size 4 --seq-len 128 --out demo/plan.json
	$(BIN)/meshwright apply demo/plan.json --steps $(DEMO_STEPS) --metrics demo/metrics.jsonl

PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile tests

test: $(VENV)/installed-test
	$(PYTEST) -m "not long and not nightly"

test-long: $(VENV)/installed-test
	$(PYTEST) -m "long and not nightly" --minutes $(MINUTES)

test-all: $(VENV)/installed-test
	$(PYTEST) --hypothesis-profile default

test-failed: $(VENV)/installed-test
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none tests

check: $(VENV)/installed-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python docs/glossary_count.py
	$(BIN)/mypy $(foreach folder,schema cost_models solvers planner engines validation fitting,-p meshwright.$(folder))

docs: $(VENV)/installed
	$(BIN)/python docs/generate
	$(BIN)/python docs/generate picture

site: $(VENV)/installed
	$(PIP) ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) build *.egg-info demo site

$(VENV)/torch:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "meshwright needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	touch $@

$(VENV)/installed: $(VENV)/torch $(SOURCES)
	rm -rf build
	$(PIP) ".[run]"
	touch $@

$(VENV)/installed-test: $(VENV)/torch $(SOURCES)
	rm -rf build
	$(PIP) ".[test]"
	touch $@ $(VENV)/installed

$(VENV)/installed-check: $(VENV)/torch $(SOURCES)
	rm -rf build
	$(PIP) ".[check]"
	touch $@ $(VENV)/installed $(VENV)/installed-test

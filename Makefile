# make demo    set up, then train and compare the models on the standard library of this Python, and write a report
# make check   set up, then lint, check the types and run the quick tests (aim: two minutes on two cores)
# make test    set up, then run every test (aim: nine minutes on two cores)
# make docs    set up, then build the site in site/, strictly and without a network
# make bench   run every benchmark; each writes runs/bench/NAME.json

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The tests start many processes: each would compile the package anew where nothing compiled is kept. There are three
# workers for two cores, because many tests wait for other processes.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
BENCHMARKS := attach training neighbours spalm ray disk plan exact generation serving

.PHONY: setup demo lint quick-tests check test docs bench $(addprefix bench-,$(BENCHMARKS)) clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "spalm needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/spalm run demo --out runs/demo
	$(BIN)/spalm report runs/demo
	@echo "look into the memory: $(BIN)/spalm explore runs/demo"

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

quick-tests: $(READY)
	$(PYTEST) -m "not slow" $(ARGS)

check: $(READY)
	@$(MAKE) --no-print-directory -j2 lint quick-tests

test: $(READY)
	$(PYTEST) $(ARGS)

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(addprefix bench-,$(BENCHMARKS))

$(addprefix bench-,$(BENCHMARKS)): bench-%: $(READY)
	$(BIN)/python benchmarks/bench_$*.py --out runs/bench/$*.json $(ARGS)

clean:
	rm -rf $(VENV) runs site

# make demo    set up, then train and compare the models on the standard library of this Python, and write a report
# make check   set up, then lint, check the types and run the quick tests (aim: two minutes on two cores)
# make test    set up, then run every test (aim: nine minutes on two cores)
# make fuzz    set up, then try thousands of hostile files, requests, command lines and kills; writes runs/fuzz.json
#              (aim: ten minutes on two cores; SPALM_FUZZ_SEED=N tries others)
# make docs    set up, then build the site in site/, strictly and without a network
# make audit   look up known vulnerabilities of every package in locks/ (needs the index that pypi.org runs)
# make sbom    write dist/sbom.json, the list of these packages, in CycloneDX's form
# make release build the wheel and the source archive in dist/ with locked tools, and this list; after make audit, which
#              AUDIT= leaves out
# make lock    resolve the packages anew: locks/*.txt, with hashes; UPGRADE=1 takes the newest releases
# make soak    serve 32 clients, slow and broken ones among them, for ten minutes; writes runs/bench/soak.json
# make bench   run every benchmark; each writes runs/bench/NAME.json

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := -m pip install --quiet --disable-pip-version-check
# Packages come from a lock and are checked by their hashes where it was tried; elsewhere the index decides, within
# constraints.txt. `make setup LOCKED=1` takes the lock on other systems too, and nothing else; `LOCKED=` takes none.
TRIED := ("Linux", "x86_64", 3, 11)
LOCKED ?= $(shell $(PYTHON) -c 'import platform, sys; print("1" * ((platform.system(), platform.machine(), *sys.version_info[:2]) == $(TRIED)))')
INSISTED := $(if $(filter file,$(origin LOCKED)),,$(LOCKED))
LOCKS := locks/build.txt locks/dev.txt
HASHED := $(PIP) --no-deps --require-hashes
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
TOOLS := $(VENV)-release
AUDIT ?= audit
SBOM = $(TOOLS)/bin/cyclonedx-py environment --pyproject pyproject.toml -o dist/sbom.json $(BIN)/python
# The tests start many processes: each would compile the package anew where nothing compiled is kept. There are more
# workers than two cores, because many tests wait for other processes: the slow ones above all.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder
BENCHMARKS := proof attach training bases neighbours knn spalm ray disk plan exact generation answers serving keys

.PHONY: setup lock audit sbom release demo lint quick-tests check test fuzz docs soak bench $(addprefix bench-,$(BENCHMARKS)) clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt $(LOCKS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "spalm needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@sed -n '/^torch==/,/[^\\]$$/p' locks/dev.txt >$(VENV)/torch.txt
	@if [ -z "$(LOCKED)" ]; then why="locks/ was tried with Python 3.11 on x86-64 Linux"; \
	elif ! found=$$($(BIN)/python $(HASHED) --dry-run -r $(VENV)/torch.txt 2>&1); then \
	  case "$$found" in \
	    *"No matching distribution"*) why="the package index has no CPU build of torch $(TORCH)";; \
	    *) echo "$$found"; exit 1;; \
	  esac; \
	fi; \
	if [ -n "$$why" ] && [ -n "$(INSISTED)" ]; then echo "$$why; LOCKED=1 takes no other packages"; exit 1; fi; \
	if [ -n "$$why" ]; then \
	  echo "$$why: packages are installed by constraints.txt and NOT checked by hashes; make setup LOCKED=1 insists on locks/"; \
	  $(BIN)/python $(PIP) -c constraints.txt -e '.[dev]'; \
	else \
	  echo "installing from locks/, checked by hashes"; \
	  $(BIN)/python $(HASHED) -r locks/build.txt && \
	  $(BIN)/python $(HASHED) --no-build-isolation -r locks/dev.txt && \
	  $(BIN)/python $(PIP) --no-deps --no-build-isolation -e .; \
	fi
	@touch $@

$(TOOLS)/.ready: locks/release.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python $(HASHED) -r locks/release.txt
	@touch $@

# uv does not read pip's configuration; UV_FIND_LINKS and UV_INDEX name other places. One of them has torch's CPU build.
lock: export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
lock: COMPILE = $(TOOLS)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-strip-extras --no-annotate --no-header --no-emit-index-url --no-emit-find-links $(if $(UPGRADE),--upgrade)
lock: CPU = sys_platform == 'linux' and platform_machine == 'x86_64'
lock: ELSEWHERE = sys_platform != 'linux' or platform_machine != 'x86_64'
lock: $(TOOLS)/.ready
	$(COMPILE) --group build -o locks/build.txt
	$(COMPILE) --group release -o locks/release.txt
	printf '%s\n' "torch==$(TORCH)+cpu ; $(CPU)" "torch==$(TORCH) ; $(ELSEWHERE)" >$(TOOLS)/torch.txt
	$(COMPILE) --extra dev --override $(TOOLS)/torch.txt -o locks/dev.txt pyproject.toml

# Builds such as 2.13.0+cpu are looked up as 2.13.0. A list has a package once: of those with two versions, the second is
# in the next list. With --strict, a package that cannot be looked up is a failure.
audit: $(TOOLS)/.ready
	@rm -f $(TOOLS)/audit-*.txt
	@sed -n 's/^\([a-z][a-z0-9._-]*\)\(\[[^]]*\]\)*==\([^ +;]*\).*/\1==\3/p' locks/*.txt | sort -u | \
	  awk -F== '{ list = "$(TOOLS)/audit-" (seen[$$1]++) ".txt"; print >list }'
	@for list in $(TOOLS)/audit-*.txt; do \
	  $(TOOLS)/bin/pip-audit --strict --disable-pip --no-deps -r $$list $(ARGS) || exit 1; \
	done

sbom: $(READY) $(TOOLS)/.ready
	mkdir -p dist
	$(SBOM)

# uv builds apart from this checkout's packages, with those of the lock, checked by their hashes.
release: export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
release: $(READY) $(TOOLS)/.ready $(AUDIT)
	rm -rf dist
	$(TOOLS)/bin/uv build --quiet --python $(BIN)/python --build-constraints locks/build.txt --require-hashes --out-dir dist
	$(SBOM)

demo: $(READY)
	$(BIN)/spalm run demo --out runs/demo
	$(BIN)/spalm report runs/demo
	@echo "look into the memory: $(BIN)/spalm explore runs/demo"

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

quick-tests: $(READY)
	$(PYTEST) -n 3 -m "not slow" $(ARGS)

check: $(READY)
	@$(MAKE) --no-print-directory -j2 lint quick-tests

test: $(READY)
	$(PYTEST) -n 4 $(ARGS)

fuzz: $(READY)
	env -u PYTHONDONTWRITEBYTECODE timeout --signal=INT --kill-after=20 600 $(BIN)/python -m pytest -n 3 --dist load tests/fuzz \
	  --fuzz runs/fuzz.json $(ARGS)

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

soak: $(READY)
	PYTHONPATH=tests $(BIN)/python benchmarks/soak.py --out runs/bench/soak.json $(ARGS)

bench: $(addprefix bench-,$(BENCHMARKS))

$(addprefix bench-,$(BENCHMARKS)): bench-%: $(READY)
	$(BIN)/python benchmarks/bench_$*.py --out runs/bench/$*.json $(ARGS)

clean:
	rm -rf $(VENV) $(TOOLS) runs site

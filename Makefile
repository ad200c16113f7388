# `make run` and `make test` need Python 3.11+, git and make; everything else they install into .venv themselves.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
NEWEST_VENV := .venv-newest
OLDEST_VENV := .venv-oldest
BIN := $(VENV)/bin
# Stages run `python -m stages.<name>`: the environment's python must come first.
WITH_VENV := PATH="$(abspath $(BIN)):$$PATH"
PYTHON_FILES := cuda_memory lean_finetune stages data/synth benchmarks tests setup.py
# Each worker needs about 1 GB. Tests of one module share fixtures, so they run in the same worker.
PYTEST := python -m pytest --numprocesses 2 --dist loadscope --durations=20

.PHONY: run test test-all test-newest test-oldest format lint project bench-quick compare plots docs dist clean

run: $(VENV)/.installed
	$(WITH_VENV) dvc repro
	@echo "report: data/report/report.html; chat: $(BIN)/lean-finetune chat"
	@git config user.email >/dev/null || echo "note: \`dvc exp run\` commits to git; give it a name first:" \
		"git config user.name you && git config user.email you@example.org"

test: $(VENV)/.installed-test
	$(WITH_VENV) $(PYTEST) -m "not slow"

test-all: $(VENV)/.installed-test
	$(WITH_VENV) $(PYTEST)

# The fast tests on the newest releases, also newer than pyproject.toml allows: before a release, or to raise its bounds.
UNBOUNDED := import re, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	needed = project["dependencies"] + project["optional-dependencies"]["test"]; \
	print(*(re.sub(",<[^,]*", "", requirement) for requirement in needed), sep="\n")
test-newest: $(NEWEST_VENV)/bin/python
	$(NEWEST_VENV)/bin/python -c '$(UNBOUNDED)' > $(NEWEST_VENV)/requirements.txt
	$(NEWEST_VENV)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager -r $(NEWEST_VENV)/requirements.txt
	$(NEWEST_VENV)/bin/python -m pip install --quiet --no-deps -e .
	$(NEWEST_VENV)/bin/python -m pip freeze --exclude-editable
	PATH="$(abspath $(NEWEST_VENV)/bin):$$PATH" $(PYTEST) -m "not slow"

# The fast tests on the oldest release that pyproject.toml allows of each dependency: before a release, or to lower its
# bounds. pip cannot choose the oldest, so uv installs; torch comes with CUDA, 5 GB in all.
test-oldest: $(OLDEST_VENV)/bin/python
	$(OLDEST_VENV)/bin/python -m pip install --quiet uv
	$(OLDEST_VENV)/bin/python -m uv pip install --quiet --python $(OLDEST_VENV)/bin/python --resolution lowest-direct -e ".[test]"
	$(OLDEST_VENV)/bin/python -m pip freeze --exclude-editable
	PATH="$(abspath $(OLDEST_VENV)/bin):$$PATH" $(PYTEST) -m "not slow"

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix $(PYTHON_FILES)
	$(BIN)/ruff format $(PYTHON_FILES)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/ruff format --check $(PYTHON_FILES)
	$(BIN)/mypy $(PYTHON_FILES)

# A subset of the benchmarks in their smallest form, some minutes long; fails if a bar fails. Bars that few rows, few rounds
# or a busy machine would decide are judged in the full form only: python -m benchmarks.<name>.
QUICK_BENCHMARKS := data batching loader monitor estimate_speed
bench-quick: $(VENV)/.installed-test
	@failed=0; for name in $(QUICK_BENCHMARKS); do \
		echo "== benchmarks.$$name --quick"; \
		$(WITH_VENV) python -m benchmarks.$$name --quick || failed=1; \
	done; exit $$failed

# The files that new projects share with this repository: after a change of params.yaml or dvc.yaml.
project: $(VENV)/.installed-test
	$(WITH_VENV) python -m tests.project_template

# Experiments side by side: what changed, predicted and measured peak, speed, loss and its change from the baseline's.
compare: $(VENV)/.installed
	@$(WITH_VENV) dvc exp show --json | $(WITH_VENV) python -m lean_finetune.report.compare_experiments

# Drawn by scripts in the page: no network.
plots: $(VENV)/.installed
	@names=$$($(WITH_VENV) python -m lean_finetune.report.pages scratch/plots/template.html) && \
		$(WITH_VENV) dvc plots show $$names --out scratch/plots --html-template scratch/plots/template.html

# The documentation as a static site in build/site; fails at a broken link.
docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo build/site/index.html

# The wheel and the source distribution in build/dist, checked as a package index checks them.
dist: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e ".[release]"
	rm -rf build/dist
	$(BIN)/python -m build --outdir build/dist
	$(BIN)/twine check --strict build/dist/*

clean:
	rm -rf $(VENV) $(NEWEST_VENV) $(OLDEST_VENV) scratch

$(VENV)/bin/python $(NEWEST_VENV)/bin/python $(OLDEST_VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer is needed; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(@D:/bin=)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[plots]"
	touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[page,plots,test]"
	touch $@ $(VENV)/.installed

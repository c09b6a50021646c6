# Both commands do all the set-up on a fresh machine with Python >= 3.11.
PYTHON ?= python3
BIN := .venv/bin
# Two test processes, one for each file: its fixtures and compiled programs are made once. The largest files are not at
# the end. The slow tests run in .ci/run alone.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder
TESTS ?= $(WORKERS) -m 'not slow'

.PHONY: demo test test-slow docs lint clean

demo: .venv/installed
	@$(BIN)/flatout train digits --out runs/demo --overwrite
	@echo "The report of the run is runs/demo/report.html"

test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest $(TESTS)

test-slow: .venv/installed-dev
	$(BIN)/python -m pytest $(WORKERS) -m slow

# Warnings, such as those of dead links, are errors. The site is build/site.
docs: .venv/installed-dev
	$(BIN)/python .ci/pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

.venv/installed: EXTRA =
.venv/installed-dev: EXTRA = [dev]
.venv/installed .venv/installed-dev: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("flatout needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.$(EXTRA)'
	touch .venv/installed $@

lint: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/pyright

clean:
	rm -rf .venv build dist src/*.egg-info

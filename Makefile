# Each target sets up what it needs; the second call reuses it.
PYTHON ?= python3
WORKERS ?= 2
# sections and options of `pipeback bench`, say BENCH="table repeats=5"; none: all sections
BENCH ?=
BIN := .venv/bin
STAMP := .venv/.installed
# one intra-op thread a process: small layers gain nothing from more, and parallel processes would fight for cores
export OMP_NUM_THREADS = 1

.PHONY: setup demo test bench lint soak

setup: $(STAMP)

# torch and torchvision in one call, so that they are builds for each other
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch torchvision
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/pipeback compare experiment=digits

test: setup
	$(BIN)/python -m pytest -q -n $(WORKERS)

soak: setup
	$(BIN)/python -m pytest -q -m soak --timeout 3600

bench: setup
	$(BIN)/python recipes/bench.py $(BENCH)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Each target sets up what it needs; the second call reuses it.
PYTHON ?= python3
# another torch, in an environment of its own, say TORCH=2.12.1; and what else it shall have: WITH="lightning==2.6.0"
TORCH ?=
WITH ?=
# of the tests: two more than cores, since tests of several processes wait for each other
WORKERS ?= 4
# files and options for pytest, say TESTS="--device cuda tests/laws/test_vectorized.py"; none: all
TESTS ?=
# options of tests/soak.py, say SOAK="--only laws -- -n 2"; none: all files that have not passed at this commit
SOAK ?=
# sections and options of `pipeback bench`, say BENCH="table repeats=5"; none: all sections
BENCH ?=
NOTHING :=
ASKED := $(strip $(addprefix torch==,$(TORCH)) $(WITH))
VENV := .venv$(subst $(NOTHING) ,,$(addprefix -,$(subst ==,-,$(ASKED))))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# one intra-op thread a process: small layers gain nothing from more, and parallel processes would fight for cores
export OMP_NUM_THREADS = 1
# or each of the many processes that the tests start would compile the package anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test bench lint docs soak

setup: $(STAMP)

# torch and torchvision in one call, so that they are builds for each other, and with what is asked for, so that it stays
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch torchvision $(ASKED)
	$(BIN)/python -m pip install --quiet -e '.[dev]' $(ASKED)
	touch $(STAMP)

demo: setup
	$(BIN)/pipeback compare experiment=digits 'methods=[sgd,pb,sc,lwp,cerebras,pipedream,spectrain,pipemare,gpipe]'

test: setup
	$(BIN)/python -m pytest -q -n $(WORKERS) $(TESTS)

soak: setup
	$(BIN)/python -m tests.soak $(SOAK)

bench: setup
	$(BIN)/python recipes/bench.py $(BENCH)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# into docs/_build/index.html; INTERSPHINX=1 also links to the documentation of torch and Lightning, over the network
docs: setup
	$(BIN)/python -m sphinx -E -W --keep-going --quiet -b html docs docs/_build

# `make demo` and `make test` need nothing but Python 3.11 or newer: they set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Two versions of x-transformers cannot share an environment; only the old one has ResiDual.
OLD_X_TRANSFORMERS := $(VENV)/x-transformers-1.44.8
# One thread a process: the suite runs in as many processes as there are cores. Bytecode is kept, whatever the environment
# says: else every process of every run compiles the package again, and pytest rewrites every assertion.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# Work stealing keeps neighbours in one process, where they share fixtures, and no process idle at the end.
PYTEST := -m pytest -n auto --dist worksteal --durations 10

# The oldest transformers that works, with what it cannot share with the newest.
OLD_TRANSFORMERS := $(CURDIR)/$(VENV)/transformers-5.4.0

.PHONY: demo demo-ladder demo-encoder demo-vision test test-full test-alike coverage test-gpu test-oldest test-install test-install-base lint docs site figures notebook clean

# The main job at a size for two cores: 24 small runs on the standard library's own text, ending in demo/report.html.
DEMO := --schemes pre post peri geonorm --lrs 3e-3 6e-3 1.2e-2 --seeds 3 --depth 4 --dim 64 --heads 2 --length 128 --batch 16 \
        --tokens 150k --evals 8 --eval-tokens 50k --saves 0

demo: $(VENV)/.base
	$(BIN)/normlab compare $(DEMO) --out demo

# The same for an encoder on masked tokens of that text, and for a vision Transformer on handwritten digits.
DEMO_ENCODER := --task masked --schemes pre post peri geonorm --lrs 3e-3 6e-3 --seeds 2 --depth 3 --dim 64 --heads 2 --length 64 \
        --batch 16 --tokens 120k --evals 6 --eval-tokens 40k --saves 0
DEMO_VISION := --task images --preset digits --schemes pre post peri geonorm --lrs 2e-3 4e-3 --seeds 3 --depth 4 --dim 32 --heads 2 \
        --images 16k --batch 64 --evals 8 --saves 0

# A small ladder: three sizes, three budgets, the largest size forecast before it is trained. Under ten minutes.
DEMO_LADDER := --schemes pre peri geonorm --sizes 2x32 3x48 4x64 --budgets 150k 300k 600k --seeds 2 --lrs 4e-3 8e-3 1.6e-2 --rate-budgets 150k \
        --head-width 16 --length 64 --batch 16 --warmup-steps 20 --evals 1 --eval-tokens 50k --saves 0 --target 6x96:2M

demo-ladder: $(VENV)/.base
	$(BIN)/normlab ladder $(DEMO_LADDER) --out demo-ladder

demo-encoder: $(VENV)/.base
	$(BIN)/normlab compare $(DEMO_ENCODER) --out demo-encoder

demo-vision: $(VENV)/.vision
	$(BIN)/normlab compare $(DEMO_VISION) --out demo-vision

# Under 5 minutes on two cores; docs/testing.md says how the suites are cut.
test: $(VENV)/.test
	$(TEST_ENV) $(BIN)/python $(PYTEST) -m "not full and not alike"

test-full: $(VENV)/.test
	$(TEST_ENV) $(BIN)/python $(PYTEST) -m "full and not alike"

# Cases of schemes that take the same paths as another, outside of tests/schemes: not in CI.
test-alike: $(VENV)/.test
	$(TEST_ENV) $(BIN)/python $(PYTEST) -m alike

# Lines and branches of the package that the quick suite runs, subprocesses counted.
coverage: $(VENV)/.test
	$(BIN)/coverage erase
	$(TEST_ENV) $(BIN)/coverage run $(PYTEST) -m "not full and not alike"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered

# The same tests of the kernels on a GPU in place of Triton's interpreter.
test-gpu: $(VENV)/.test
	NORMLAB_TEST_DEVICE=cuda $(BIN)/python -m pytest -n 8 tests/kernels

test-oldest: $(VENV)/.test $(OLD_TRANSFORMERS)
	PYTHONPATH=$(OLD_TRANSFORMERS) $(TEST_ENV) $(BIN)/python $(PYTEST) -m "not full and not alike" tests/hf

# Source archive and wheel, installed in fresh environments; the README's commands run there, away from the checkout.
test-install:
	$(TEST_ENV) $(PYTHON) tests/documentation/install.py base hf cluster

test-install-base:
	$(TEST_ENV) $(PYTHON) tests/documentation/install.py base

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/pyright

docs: $(VENV)/.base
	$(BIN)/python docs/build.py

# The documentation as one folder, site/, that works from a disk. Strict: a broken link, in or between pages, is an error.
site: $(VENV)/.docs
	$(BIN)/python docs/website/assemble.py
	cd build/website && $(abspath $(BIN))/zensical build --strict
	rm -rf site && mv build/website/site site
	$(BIN)/python docs/website/verify.py site

figures: $(VENV)/.base
	$(PIP) --editable ".[plots]"
	$(BIN)/python docs/figures.py
	$(BIN)/python docs/animations.py

# examples/normlab_tour.ipynb, from the cells of docs/tour.py, executed.
notebook: $(VENV)/.base
	$(PIP) --editable ".[notebook]"
	$(BIN)/python docs/notebook.py

$(VENV)/.base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/.vision: $(VENV)/.base
	$(PIP) --editable ".[vision]"
	touch $@

$(VENV)/.docs: $(VENV)/.base
	$(PIP) --editable ".[docs]"
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) --editable ".[test,lint]"
	$(PIP) --no-deps --upgrade --target $(OLD_X_TRANSFORMERS) x-transformers==1.44.8
	touch $@

$(OLD_TRANSFORMERS): $(VENV)/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@ \
	  transformers==5.4.0 "huggingface-hub>=1.31,<2" "tokenizers>=0.22,<=0.23.0" "httpx<1" "httpcore<2"

clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .hypothesis .coverage*

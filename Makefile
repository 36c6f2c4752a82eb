# make demo    three GRPO jobs share one device; writes pymux-demo/
# make test    everything that runs without a GPU
# make flaky   the tests RUNS times (20) with every core loaded; lists what ever failed
# make lint    formats, types, stub
# make sanitize  the extension's tests under the address, undefined-behaviour and thread sanitizers
# make model-check  explores the scheduler's states far beyond what the tests do
# make format  rewrites Python and C++ in the project's style

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= $(shell echo $$(($$(nproc) + 1)))  # tests wait more than they compute
RUNS ?= 20
SOURCES := CMakeLists.txt pyproject.toml $(wildcard csrc/*.h csrc/*.cpp csrc/*.cu csrc/sim/*.h csrc/sim/*.cpp)
CXX_FILES := $(wildcard csrc/*.h csrc/*.cpp csrc/*.cu csrc/sim/*.h csrc/sim/*.cpp)

.PHONY: demo test flaky lint format stub docs model-check sanitize clean

demo: $(VENV)/built
	$(BIN)/pymux demo

test: $(VENV)/built
	$(BIN)/pytest -n $(WORKERS) --dist worksteal

flaky: $(VENV)/built
	bash tests/flaky.sh $(BIN)/python $(RUNS) -n $(WORKERS) --dist worksteal

lint: $(VENV)/built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: $(VENV)/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix-only .
	$(BIN)/clang-format -i $(CXX_FILES)

# pymux/_core.pyi is committed; tests/test_stub.py fails when it drifts.
stub: $(VENV)/built
	$(BIN)/python tests/make_stub.py pymux/_core.pyi

# docs/lease.md is committed too; tests/test_lease.py fails when it drifts.
docs: $(VENV)/built
	PYTHONPATH=. $(BIN)/python tests/make_lease_page.py docs/lease.md

# The scheduler's states with larger bounds than the tests have; hours.
model-check: $(VENV)/built
	PYTHONPATH=. $(BIN)/python tests/model_check.py

sanitize: $(VENV)/installed
	bash tests/sanitize.sh $(BIN)/python

$(VENV)/installed: requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -r requirements.txt
	touch $@

$(VENV)/built: $(VENV)/installed $(SOURCES)
	$(BIN)/python -m pip install -q --no-build-isolation --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis

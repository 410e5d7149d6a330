# Every command that a user or CI types. Installs are skipped while pyproject.toml is what it was when they were made.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := models/smollm2-135m
CONFIG ?= examples/smollm2_arithmetic.toml
ARGS ?=

.PHONY: run test test-all check proto clean

run: $(MODEL)/config.json  ## set up, get the model, run the demo job to its end
	$(BIN)/waypath run $(CONFIG) $(ARGS)

test: dev  ## the suite without its slow part
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: test test-slow  ## the whole suite

.PHONY: test-slow
test-slow: dev  ## what `make test` leaves out
	$(BIN)/python -m pytest -m slow $(ARGS)

check: dev  ## format, lint, types, generated stubs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict -p waypath
	$(BIN)/pyright waypath tests
	$(BIN)/python -m waypath.tools.stubs --check

proto: dev  ## write the stubs of proto/*.proto again
	$(BIN)/python -m waypath.tools.stubs

clean:  ## remove what can be made again; runs/ and models/ stay
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info

# -- installs

.PHONY: demo dev
demo:
	@sh tools/install.sh $(PYTHON) $(VENV) demo

dev:
	@sh tools/install.sh $(PYTHON) $(VENV) dev

$(MODEL)/config.json: | demo
	$(BIN)/python -m waypath.tools.smollm2 --out $(MODEL)

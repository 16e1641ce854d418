# `make demo` and `make test` do all the set-up on a machine with Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Test processes at once: two would leave two cores idle while tests wait, for leases, links and each other.
JOBS ?= 3

.PHONY: help demo test test-long lint types bench rehearse docs clean

help: ## What can be made
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 12

# -qq: without warnings, of which pip has one for each folder of PIP_FIND_LINKS that is not there, each time. Errors are shown.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Paceline needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY) ## LeNet on Fashion-MNIST with 4 workers, one killed on the way
	$(BIN)/paceline run -n 4 --fault 'kill worker:2 @step 300' examples/fashion_mnist.py
	@echo "The same weights, undisturbed and with other workers:  $(BIN)/paceline run -n 2 --slots 4 examples/fashion_mnist.py"

test: $(READY) ## All tests, but for more of the same (test-long)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'not long'

test-long: $(READY) ## More seeds, examples and messages of what some of the tests do with fewer
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m long

lint: $(READY) ## Style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## Strict type check
	$(BIN)/mypy

bench: $(READY) ## The committed benchmarks (long)
	$(BIN)/python -m benchmarks.same_bits
	$(BIN)/python -m benchmarks.reduce
	$(BIN)/python -m benchmarks.step

rehearse: $(READY) ## 200 random fault plans against a clean run, 80 of a script that leaves its loops, more seeds of the simulated one, and all runs of the tests from bare processes (long: about half a minute a plan on 2 cores)
	ROUNDS=3 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/worker/test_terms.py tests/worker/test_healing.py
	BARE=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/end_to_end tests/cli tests/faults
	$(BIN)/paceline rehearse --seeds 200 -n 4 --slots 12 --steps 420 benchmarks/rehearsed.py
	for each in allreduce local:7 streaming:8,2 gossip:6; do \
		$(BIN)/paceline rehearse --seeds 20 -n 3 --slots 3 --steps 200 --strategy $$each --kinds kill --most 3 benchmarks/rehearsed_habits.py || exit 1; \
	done

docs: $(READY) ## Check the documents: links, and the examples in them
	$(BIN)/python -m pytest tests/test_docs.py

clean: ## Forget the set-up
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

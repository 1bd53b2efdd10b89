# make demo   train on real grocery orders with both kernels; sets up .venv first
# make test   ruff, mypy and the tests; sets up .venv first
# A second run reuses .venv until requirements/ or pyproject.toml changes, or a GPU comes or goes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
INSTALLED := $(VENV)/.installed-$(GPU)
REQUIREMENTS := $(wildcard requirements/*.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-input

.PHONY: demo test lint test-cpu test-gpu setup clean

demo: setup
	$(BIN)/python examples/instacart.py --config configs/demo.yaml

test: lint test-cpu $(if $(filter cuda,$(GPU)),test-gpu)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

# The interpreter runs Triton kernels on CPU tensors; a GPU is hidden from it.
test-cpu: setup
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2

test-gpu: setup
	$(BIN)/python -m pytest -q -m gpu

setup: $(INSTALLED)

$(INSTALLED): $(REQUIREMENTS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, this is " + sys.version.split()[0] + "; name another: make PYTHON=...")'
	@$(PYTHON) -m venv --clear $(VENV) || { echo "The venv module is missing: install it (Debian: apt-get install python3-venv)"; exit 1; }
	@echo "Installing the tested set ($(GPU)) into $(VENV); the first time takes some minutes."
	$(PIP) -r requirements/$(GPU).txt
	$(PIP) --no-deps -r requirements/no-deps-$(GPU).txt
	$(PIP) --no-deps --editable .
	@touch $@

clean:
	rm -rf $(VENV) build

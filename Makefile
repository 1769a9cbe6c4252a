# Everything a fresh machine needs is a virtual environment, which these targets make themselves.
#   make train         train nano-1m on Shakespeare and print a sample
#   make test          the tests
#   make oracle        the tests against PyTorch, transformers and lm-evaluation-harness
#   make oracle-llama  the tests against llama.cpp, which is compiled first (C++, some 20 minutes)
#   make lint          ruff

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: train test oracle oracle-llama lint clean

train: $(VENV)/installed
	$(BIN)/python -m runtime.train

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -m "not oracle"

oracle: $(VENV)/installed-oracle
	$(BIN)/python -m pytest -m "oracle and not llama_cpp"

oracle-llama: $(VENV)/installed-llama-cpp
	$(BIN)/python -m pytest -m llama_cpp

lint: $(VENV)/installed-test
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml
	$(PIP) --editable .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP) --editable ".[test]"
	touch $@

$(VENV)/installed-oracle: $(VENV)/installed-test
	$(PIP) --editable ".[test,oracle]"
	touch $@

$(VENV)/installed-llama-cpp: $(VENV)/installed-test
	$(PIP) --editable ".[test,llama-cpp]"
	touch $@

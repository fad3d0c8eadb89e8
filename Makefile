# make demo | test | test-vllm | megatron-matrix | lint | bench | gpu | gpu-multi | fuzz | clean
#
# Each target but clean first makes its own environment (tools/setup.sh): .venv, or the active
# virtual environment. PYTHON=python3.12 names the Python that .venv is made from.
# SETUP=no runs with PYTHON as it is (default python3) and installs nothing.
# ARGS=... goes to the demo, to pytest or to the benchmarks.
# FAMILY=qwen3_moe|glm4_moe is the demo's model (default qwen3_moe), CAPTURE=FILE its trajectories;
# CAPTURE=fresh samples them anew from a real vLLM (tools/vllm.sh), of both families by default.

SETUP ?= yes
ifeq ($(SETUP),no)
RUN := $(or $(PYTHON),python3)
else
RUN := $(or $(VIRTUAL_ENV),$(CURDIR)/.venv)/bin/python
endif

.PHONY: help setup demo test test-vllm megatron-matrix lint bench gpu gpu-multi fuzz clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

setup:
ifneq ($(SETUP),no)
	@PYTHON='$(PYTHON)' tools/setup.sh
endif

demo: setup
ifeq ($(CAPTURE),fresh)
	@tools/fresh_demo.sh $(RUN) $(or $(FAMILY),all) $(ARGS)
else
	@$(RUN) -m packhorse demo $(addprefix --capture ,$(CAPTURE)) $(addprefix --family ,$(FAMILY)) $(ARGS)
endif

test: setup
	@tools/test.sh $(RUN) $(ARGS)

test-vllm: setup
	@tools/vllm.sh test $(ARGS)

megatron-matrix: setup
	@tools/megatron_matrix.sh $(RUN) $(ARGS)

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy -p packhorse

bench: setup
	@tools/gpu.sh $(RUN) bench $(ARGS)

gpu: setup
	@tools/gpu.sh $(RUN) all $(ARGS)

gpu-multi: setup
	@tools/gpu_multi.sh $(RUN) $(ARGS)

fuzz: setup
	@tests/fuzz/run.sh $(or $(SECONDS),60) $(RUN) $(ARGS)

clean:
	rm -rf .venv build dist packhorse.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

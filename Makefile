# make demo | test | check | lint | fuzz | bench | wheel | clean
#
# PYTHON   the interpreter that makes the environment (3.11 or newer)
# VENV     where it is made
# JAX      a minor version to pin, for example 0.12; the newest that fits otherwise
# PYTEST, DEMO, CHECK, BENCH   arguments for the programs
# UPDATE   1: `make check` writes what it finds into engines/images.json

PYTHON ?= python3
VENV ?= .venv
JAX ?=
PYTEST ?= -n 2 --dist loadgroup
DEMO ?=
CHECK ?=
BENCH ?=
UPDATE ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-jax$(JAX)
NATIVE := pyproject.toml constraints.txt CMakeLists.txt $(shell find ffi -type f)
CXX_FILES := $(shell find ffi tests -name third_party -prune -o \( -name '*.cc' -o -name '*.h' \) -print)
TYPED := build/typed

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# An isolated build reads these, not the command's own -c.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt

.PHONY: demo test check lint fuzz bench wheel clean

demo: $(STAMP)
	$(BIN)/python examples/train_lm.py $(DEMO)

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST)

check: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m support.images $(CHECK) $(if $(UPDATE),--update)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	@# The packages as they are imported: a tree of links in the shape that the wheel has.
	rm -rf $(TYPED)
	mkdir -p $(TYPED)/cudnn_jax
	ln -s $(CURDIR)/cudnn_jax/* $(CURDIR)/graph $(CURDIR)/engines $(CURDIR)/ffi/_ffi.pyi $(TYPED)/cudnn_jax/
	cd $(TYPED) && $(abspath $(BIN))/python -m mypy --config-file $(CURDIR)/pyproject.toml \
	    --python-executable $(abspath $(BIN))/python --follow-imports silent \
	    -p cudnn_jax.graph -p cudnn_jax.engines

# The reader of programs, for ten minutes.
fuzz: $(STAMP)
	$(BIN)/python tests/ffi/fuzzing.py 600

bench: $(STAMP)
	$(BIN)/python -m benchmarks sdpa $(BENCH)

wheel: $(STAMP)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(NATIVE) | $(BIN)/python
	rm -f $(VENV)/.installed-*
	$(BIN)/python -m pip install --quiet --editable '.[flax,test]' $(if $(JAX),'jax==$(JAX).*' 'jaxlib==$(JAX).*')
	touch $@

clean:
	rm -rf build dist out $(VENV) .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

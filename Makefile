# Needs Python 3.11 or newer and make; everything else goes into .venv.
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-full lint stubs clean

demo: $(VENV)/.installed
	@$(BIN)/latentpool demo

test: $(VENV)/.installed-dev
	@$(BIN)/pytest -q -m "not full"

test-full: $(VENV)/.installed-dev
	@$(BIN)/pytest -q

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/buf lint protos
	VENV=$(VENV) tools/generate_stubs.sh --check
	$(BIN)/python tools/check_imports.py

stubs: $(VENV)/.installed-dev
	VENV=$(VENV) tools/generate_stubs.sh

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/pyvenv.cfg:
	@python=$$(command -v python3.11 || command -v python3 || true); \
	if [ -z "$$python" ] || ! "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	  echo "latentpool needs Python 3.11 or newer as python3.11 or python3; found: $${python:-none}" >&2; exit 1; fi; \
	"$$python" -m venv $(VENV)

# Reinstalled when pyproject.toml changes. An editable install: the source tree is what runs.
$(VENV)/.installed: pyproject.toml $(VENV)/pyvenv.cfg
	@echo "installing latentpool into $(VENV) (about 480 MB the first time)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/pyvenv.cfg
	@echo "installing latentpool and its development tools into $(VENV)"
	@$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.installed

# `make demo` and `make test` work on a fresh clone; both reuse .venv until pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
INTEGRATIONS := .venv-integrations
KVPRESS := .venv-kvpress
PYTEST_ARGS ?=
# What the site shows or links to, as it lies in the repository.
PAGES := README.md CONTRIBUTING.md CHANGELOG.md LICENSE docs benchmarks examples training/recipes checkpoints/*/*.md checkpoints/*/*.png modeling/modeling_*.py modeling/parts/position_layout.py
PYTEST := $(VENV_PYTHON) -P -m pytest

.PHONY: demo test test-fast test-integrations lint docs dist format clean

demo: $(VENV)/.installed
	$(VENV_PYTHON) -P -m context_compressors.cli demo

test: $(VENV)/.installed-dev
	$(PYTEST) $(PYTEST_ARGS)

test-fast: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

# kvpress's releases need an older transformers; name another environment and source to make none.
ifndef KVPRESS_PYTHON
test-integrations: export KVPRESS_PYTHON := $(CURDIR)/$(KVPRESS)/bin/python
test-integrations: export KVPRESS_EVALUATION := $(CURDIR)/$(KVPRESS)/kvpress-0.5.5/evaluation
test-integrations: $(KVPRESS)/.installed
endif

# Before a release: other systems that this package works with, some of them large, transformers' own tests of models,
# and what takes minutes in other processes and compilers (FSDP, killed runs, pages that train, compiled methods).
test-integrations: $(INTEGRATIONS)/.installed $(VENV)/.installed-dev
	$(INTEGRATIONS)/bin/python -P -m pytest -n0 tests/integrations tests/suites $(PYTEST_ARGS)
	$(PYTEST) -m release $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(VENV_PYTHON) -P -m ruff check .
	$(VENV_PYTHON) -P -m ruff format --check .
	$(VENV_PYTHON) -P -m mypy -p context_compressors

# The site, in build/site; a link that leads nowhere fails.
docs: $(VENV)/.installed-docs
	rm -rf build/pages && mkdir -p build/pages
	git ls-files -z -- $(PAGES) | tar --null -T - -cf - | tar -xf - -C build/pages
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(VENV_PYTHON) -P -m mkdocs build --quiet

# What a release uploads, in dist/.
dist: $(VENV)/.installed-dev
	rm -rf dist
	$(VENV_PYTHON) -P -m build --outdir dist
	$(VENV_PYTHON) -P -m twine check --strict dist/*

format: $(VENV)/.installed-dev
	$(VENV_PYTHON) -P -m ruff check --fix .
	$(VENV_PYTHON) -P -m ruff format .

clean:
	rm -rf $(VENV) $(INTEGRATIONS) $(KVPRESS) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

# The stamp, not the interpreter, says that the environment is whole: an interrupted creation is started anew.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Python 3.11 or newer is needed, and $(PYTHON) is %d.%d: name another one, as in `make PYTHON=python3.12 demo`" % v[:2])'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.created
	$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.created
	$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/.created
	$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@

$(INTEGRATIONS)/.installed: pyproject.toml tests/integrations/requirements.txt
	$(PYTHON) -m venv --clear $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/integrations/requirements.txt -e .
	@touch $@

$(KVPRESS)/.installed:
	$(PYTHON) -m venv --clear $(KVPRESS)
	$(KVPRESS)/bin/python -m pip install --quiet --disable-pip-version-check 'kvpress[eval]==0.5.5' torch==2.13.0
	$(KVPRESS)/bin/python -m pip download --quiet --no-deps --no-binary kvpress --dest $(KVPRESS) kvpress==0.5.5
	tar -xf $(KVPRESS)/kvpress-0.5.5.tar.gz -C $(KVPRESS)
	@touch $@

# Thin: docs/_tools makes the environment and builds; this file names the targets.
BOOT := $(or $(PYTHON),python3)
SITE = py=$$($(BOOT) docs/_tools/venv.py site) &&
ALL = py=$$($(BOOT) docs/_tools/venv.py all) &&
OLDEST = py=$$($(BOOT) docs/_tools/venv.py oldest) &&
PYTEST = OPENBLAS_NUM_THREADS=1 "$$py" -m pytest -q
export PYTHON LESSON FORCE PORT

.PHONY: help html test test-full test-gpu serve record one gettext lint linkcheck clean
.SILENT:

help:  ## Show this help
	sed -n 's/^\([a-z-]*\): *## /  make \1\t/p' Makefile | expand -t 19
	echo
	echo 'LESSON="a b" picks lessons, FORCE=1 records them even when they are fresh,'
	echo 'PYTHON=… uses an interpreter that has the requirements instead of .venv,'
	echo 'SITE_URL=https://… makes canonical links absolute, PORT=… is for serve.'

html:  ## Build both languages into _build/html (with a GPU: run the lessons)
	$(SITE) "$$py" docs/_tools/build.py html

test:  ## Check everything that needs no GPU (about a quarter of an hour)
	$(ALL) $(PYTEST) -n 2 -m "not full and not gpu"

test-full:  ## The slow rest: all compile targets, the oldest supported versions
	$(ALL) $(PYTEST) -n 2 -m full
	$(OLDEST) $(PYTEST) -n 2 -m "not full and not gpu" tests/lessons tests/test_page_*.py

test-gpu:  ## Property tests and proofs of the kernels on this machine's GPU
	$(ALL) $(PYTEST) -m gpu tests/lessons && \
	$(PYTEST) -m gpu -n auto --maxprocesses 12 tests/proofs && \
	if command -v compute-sanitizer > /dev/null; then "$$py" tests/proofs/sanitize.py; fi

serve:  ## Show the built site at http://127.0.0.1:8000
	$(SITE) "$$py" docs/_tools/build.py serve

record:  ## Run lessons on this machine's GPU and keep what they show
	$(ALL) "$$py" docs/_tools/build.py record

one:  ## Build only the pages of LESSON="stem"
	$(SITE) "$$py" docs/_tools/build.py one

gettext:  ## Update the Chinese catalogs from the English pages
	$(SITE) "$$py" docs/_tools/build.py gettext

lint:  ## Check the style of code and workflows
	$(ALL) "$$py" -m ruff check . && "$$py" -m ruff format --check . && \
	"$$py" -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

linkcheck:  ## Check the links to other sites
	$(SITE) "$$py" -m sphinx -q -b linkcheck -c . docs _build/linkcheck

clean:  ## Remove everything that is built (not .venv)
	rm -rf _build docs/lessons

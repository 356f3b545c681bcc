# Everything a newcomer needs: `make demo` shows the whole pipeline, `make test` proves it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := .local/uv/bin/uv
UV_VERSION := 0.13.8
PYTEST := $(BIN)/python -m pytest
export UV_PYTHON_DOWNLOADS := never
# empty is unset: with it, as in many containers, pytest would rewrite the asserts of all files in each process of each run
export PYTHONDONTWRITEBYTECODE :=
export UV_LINK_MODE := copy

.DEFAULT_GOAL := help
.PHONY: help setup demo up down check docs lint lint-code page page-test warm wheel test test-unit test-integration test-system test-clusters test-long test-faults test-security test-mutants fuzz bench lock clean

help: ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 20

$(UV):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || { \
	  echo "Python 3.11, 3.12 or 3.13 is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1 || echo missing). Set PYTHON=/path/to/python." >&2; exit 1; }
	@command -v java >/dev/null || { echo "Java 17 is needed (apt-get install openjdk-17-jre-headless)." >&2; exit 1; }
	@java -version 2>&1 | grep -qE 'version "(17|21)' || { echo "Java 17 (or 21) is needed; this is: $$(java -version 2>&1 | head -1)." >&2; exit 1; }
	@$(PYTHON) -m venv .local/uv && .local/uv/bin/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

# compiled at once: with PYTHONDONTWRITEBYTECODE, as in many containers, each process would compile Airflow anew
$(VENV)/.ready: $(UV) requirements/lock.txt pyproject.toml
	@echo "Installing the pinned environment ..."
	@test -x $(BIN)/python || $(UV) venv --quiet --python $(PYTHON) $(VENV)
	@VIRTUAL_ENV=$(VENV) $(UV) pip sync --quiet --require-hashes --compile-bytecode requirements/lock.txt
	@VIRTUAL_ENV=$(VENV) $(UV) pip install --quiet --no-deps --editable .
	@touch $@

setup: $(VENV)/.ready ## the environment, from pinned dependencies

demo: setup ## the whole pipeline on real servers and real data, compared in the end
	@$(BIN)/bottledwater demo

up: setup ## start the stack and keep it running
	@$(BIN)/bottledwater up

down: ## stop what `make up` started
	@test ! -x $(BIN)/bottledwater || test ! -d "$${BOTTLEDWATER_CACHE:-.local/cache}/up" || $(BIN)/bottledwater down

check: lint-code ## after each change: format, lint, import directions, types, and the unit tests that are not slow
	@$(PYTEST) tests/unit -q -n 2 --dist worksteal -m "not slow and not long"

docs: setup ## the site of docs/, built strictly, in .local/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

lint: lint-code docs ## format, lint, import directions, types, spelling; the site; Dockerfile, Compose files, Kubernetes' manifests and the chart's values
	@$(BIN)/hadolint --ignore DL3066 docs/examples/Dockerfile  # the users of the base images have names
	@$(BIN)/yamllint --strict --config-data '{extends: relaxed, rules: {line-length: disable}}' docker-compose.yaml docs/examples
	@$(BIN)/kubernetes-validate --strict --quiet docs/examples/spark-on-kubernetes.yaml

lint-code: setup
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/codespell
	@$(BIN)/lint-imports > .local/lint-imports.log || { cat .local/lint-imports.log; exit 1; }
	@$(BIN)/mypy -p airflow_bottledwater -p tests.benchmarks  # those are run too seldom to show that they do not fit any more

# only who changes the page needs npm: what is built of it is part of the sources, and of wheel and sdist
PAGE := airflow_bottledwater/plugin/www
page: setup ## build the page in Airflow from its sources, with npm and the versions of its lock file
	@cd $(PAGE) && npm ci --silent --ignore-scripts && npm run --silent build
	@$(BIN)/python -m tests.support.page

page-test: page warm ## the page's own tests, and a browser in a real Airflow (Debian's chromium); IMAGES=1: its pictures for the docs
	@cd $(PAGE) && npm test
	@BOTTLEDWATER_IMAGES=$(if $(IMAGES),docs/images,.local/page) $(PYTEST) tests/system/test_page.py -q -m long

warm: setup
	@$(BIN)/python -m airflow_bottledwater.warm  # once, not in each of many processes at the same time

# each Python needs code of its own, which its numba makes; PYTHONS names those beside that of the environment
wheel: setup ## the wheel in dist/, with compiled code for this Python, and for PYTHONS="python3.12 python3.13"
	@rm -rf dist airflow_bottledwater/prebuilt_code
	@echo "Compiling the code that the wheel brings, for a minute or two for each Python ..."
	@$(BIN)/python -m airflow_bottledwater.prebuild
	@for python in $(PYTHONS); do \
	  $(UV) venv --quiet --clear --python $$python .local/wheel && \
	  VIRTUAL_ENV=.local/wheel $(UV) pip sync --quiet --require-hashes requirements/lock.txt && \
	  .local/wheel/bin/python -m airflow_bottledwater.prebuild || exit 1; done
	@$(UV) build --quiet --wheel

test-unit: warm
	@$(PYTEST) tests/unit -q -n 2 --dist worksteal

test-integration: warm
	@$(PYTEST) tests/integration -q

test-system: warm ## the DAG in a real Airflow: full run, mark failed, clear, restarted triggerer, teardown
	@$(PYTEST) tests/system -q --ignore=tests/system/clusters

test-clusters: warm ## YARN, Spark standalone and Celery workers on other hosts, and what is asked of Kubernetes; needs root
	@$(PYTEST) tests/system/clusters -q

test-long: warm ## the verification, partitioned tables, new keys, and live snapshots under writers
	@$(PYTEST) tests/integration -q -m long -n 2 --dist loadfile

test-faults: warm ## death, zombies and outages at every point FAULTS=10 times, SEEDS=300 hand-overs, from SEED=1; CLASS=zombies
	@BOTTLEDWATER_FAULTS=$(or $(FAULTS),10) BOTTLEDWATER_SEEDS=$(or $(SEEDS),300) BOTTLEDWATER_SEED=$(or $(SEED),1) \
	  $(PYTEST) tests/faults tests/integration/test_handover_random.py tests/integration/test_live_random.py tests/integration/test_new_key.py tests/system/clusters/test_pipeline_on_standalone.py -q -n 2 \
	  --dist loadgroup $(if $(CLASS),-k $(CLASS))

ifeq ($(T)$(K),)
test: ## all tests but the long ones, in five processes, the slowest first; or some: T=path, K=word (as pytest's -k)
	@$(MAKE) --no-print-directory --output-sync --jobs=2 lint warm
	@$(PYTEST) tests/system tests/faults tests/integration tests/unit -q -m "not long" -n 5 --dist worksteal
else
test: setup
	@$(PYTEST) $(or $(T),tests --ignore=tests/system/clusters) -q $(if $(K),-k "$(K)")
endif

test-security: warm ## TLS, SCRAM, ACLs and grants, nothing more than documented; no secret shown
	@$(PYTEST) tests/integration/test_security.py -q

test-mutants: setup ## each rule taken out once, to see that a test notices (MUTANT=word)
	@$(BIN)/python -m tests.mutants

fuzz: setup ## damaged rows, random tables and histories with new seeds for MINUTES=10
	@end=$$(( $$(date +%s) + 60 * $(or $(MINUTES),10) )); while [ $$(date +%s) -lt $$end ]; do \
	  seed=$$(od -An -N3 -tu4 /dev/urandom | tr -d ' '); echo "seed $$seed"; \
	  BOTTLEDWATER_EXAMPLES_FACTOR=8 $(PYTEST) tests/unit/encoding/test_fuzz.py tests/unit/stream/test_assembler.py \
	    tests/unit/publish/test_unchanged.py tests/unit/verify/test_scan.py tests/integration/test_types_against_postgres.py \
	    -q -n 2 -k "damaged or numeric or random or twin or assembler or hash" \
	    --hypothesis-seed=$$seed || exit 1; done

bench: setup ## all benchmarks, or one (BENCH=name); sizes times BENCH_SCALE
	@$(BIN)/python -m tests.benchmarks $(BENCH)

lock: $(UV) ## pin the dependencies anew
	@$(UV) pip compile pyproject.toml --extra local --extra openlineage --group dev --universal --generate-hashes --no-emit-index-url \
	  --no-header --no-annotate --quiet --output-file requirements/lock.txt

clean: down ## remove environment, servers' data and caches
	@rm -rf $(VENV) .local

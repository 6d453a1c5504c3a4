# People and CI use the same targets. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.DEFAULT_GOAL := help
TABLES := table1 table2 table3 table4 tau_sweep zero_one_adam figure1

.PHONY: help train test test-fast test-slow test-gpu check format docs bench report rehearse wandb-sync clean $(TABLES)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@for name in $(TABLES); do printf "  make %-13s run what is missing of it, collect, render (ARGS=\"--seeds 0\")\n" $$name; done

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one: make PYTHON=python3.12")'
	@echo "installing into $(VENV), once: some minutes, about 7 GB"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt -e ".[dev]"
	@# pip would compile on one core, for minutes. Some packages have templates that are no Python.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

train: $(VENV)/.ready ## the main job: GPT-2 under CO2 on embedded text, two workers (ARGS="co2.tau=24 …")
	$(BIN)/python train.py task=gpt2 method=co2 co2.tau=12 $(ARGS)

# Three processes of tests on two cores, because tests wait, too, for processes that start or end.
# One that has no test left takes over half of those that another still has. Threads that wait for
# each other sleep meanwhile; else they spin on a core that another process needs. Containers often
# forbid Python to keep compiled files, and each process would then rewrite all asserts: 4 s.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_WAIT_POLICY=PASSIVE \
	$(BIN)/python -m pytest -n 3 --dist worksteal

test: $(VENV)/.ready ## every test that needs no more than Python: a quarter of an hour on two cores (ARGS="-k comm" picks some)
	$(PYTEST) -m "not slow" $(ARGS)

test-fast: $(VENV)/.ready ## the quick ones of them, for every edit
	$(PYTEST) -m "not slow and not long" $(ARGS)

test-slow: $(VENV)/.ready ## the others: SLURM, the wheel, compilers, other trainers and peers, long trainings
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow $(ARGS)
	$(BIN)/python -m pytest -n 2 -m "not slow" tests/peers $(ARGS)

test-gpu: $(VENV)/.ready ## the tests that need a CUDA device
	$(BIN)/python -m pytest tests/gpu -m gpu -n 4 --dist worksteal $(ARGS)

check: $(VENV)/.ready ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.ready ## mend format, and lint where it can be
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.ready ## the documentation as a site, in site/index.html; built and read without a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build $(ARGS)
	@echo "open site/index.html; for its search: $(BIN)/python -m http.server -d site"

bench: $(VENV)/.ready ## the benchmarks; tables go to results/
	$(BIN)/python -m benchmarks.outer_step
	$(BIN)/python -m benchmarks.throughput

wandb-sync: $(VENV)/.ready ## sync every offline W&B run under results/runs (ARGS=--all: unfinished ones too)
	$(BIN)/python -m co2.record.wandb_sync $(ARGS)

$(TABLES): $(VENV)/.ready
ifneq (,$(filter --dry-run,$(ARGS)))
	$(BIN)/python -m recipes run $@ $(ARGS)
else
	@# Status 1: some run failed; the others are shown.
	$(BIN)/python -m recipes run $@ $(ARGS); status=$$?; [ $$status -le 1 ] || exit $$status; \
	$(BIN)/python -m recipes collect $@ && $(BIN)/python -m recipes render $@ && exit $$status
endif

report: $(VENV)/.ready ## tables, figures and results/report.html of all that has run
	$(BIN)/python -m recipes collect
	$(BIN)/python -m recipes render

rehearse: $(VENV)/.ready ## every published recipe for three steps here, on generated data: under an hour, 20 GB of memory (ARGS="task=vit")
	$(BIN)/python -m recipes.rehearse $(ARGS)

clean: ## forget the environment and the caches; runs and data stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

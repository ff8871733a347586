# `make report` and `make test` need Python 3.11 or newer, git and make; both set up .venv first.
PYTHON ?= python3
# The index for a CPU-only torch, where the default one would bring a CUDA build of several GB: make setup TORCH_INDEX=URL
TORCH_INDEX ?=
# The methods of the reference study's matrix; the first is the save of today.
METHODS := trainer dcp-async staged fast fast-async
LABS := hdd-nas-1gbe raid-nas-10gbe
LAB_PACKAGES := nbdkit nbdkit-plugin-python libnbd-bin fuse3 iproute2 fio
OUT ?= results/lab
# quick (about 3 minutes on 2 cores), default (9), full (an hour)
PROFILE ?= default

BIN := .venv/bin
READY := .venv/ready

.PHONY: help setup report lab-report test lint validate validate-48 sizes bench torture reference clean
.DEFAULT_GOAL := help

help:
	@echo "make report     run the study (PROFILE=$(PROFILE)) and render its report"
	@echo "make lab-report this disk against two emulated NASes on real kernel I/O (Linux, root; an hour)"
	@echo "make test       run the tests"
	@echo "make lint       check style, notebooks and the CI workflow"
	@echo "make validate   check the statistics on synthetic studies with a known truth"
	@echo "make validate-48 predict 48 saves from a few, and run them (20 minutes)"
	@echo "make sizes      save states from 10 MB to 4 GB (15 minutes)"
	@echo "make bench      measure the instrument itself, and race the methods side by side"
	@echo "make torture    kill saves and cut their power, and show that nothing is lost"
	@echo "make reference  measure and render results/reference again"
	@echo "make clean      remove .venv; results stay"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "stallbench needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install --quiet --constraint constraints.txt --index-url $(TORCH_INDEX) torch)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

report: $(READY)
	$(BIN)/stallbench run --profile $(PROFILE)

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/nbstripout --verify --keep-id notebooks/*.ipynb
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --offline --quiet .github/workflows

validate: $(READY)
	$(BIN)/stallbench validate

validate-48: $(READY)
	$(BIN)/stallbench validate48 --study results/$(PROFILE)

sizes: $(READY)
	$(BIN)/stallbench sizes results/$(PROFILE)

torture: $(READY)
	$(BIN)/stallbench torture

bench: $(READY)
	$(BIN)/stallbench run --profile default --no-report
	$(BIN)/stallbench bench results/default

lab-report: $(READY)
	@PATH=$$PATH:/usr/sbin; type nbdkit nbdfuse ip fio >/dev/null 2>&1 || \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends $(LAB_PACKAGES) >/dev/null; } || \
		echo "a lab needs Linux, root and these packages: $(LAB_PACKAGES)"
	mkdir -p .target
	$(BIN)/stallbench run --blocks 5 --target disk=.target $(foreach lab,$(LABS),--target $(lab)=lab:$(lab)) \
		$(addprefix --method ,$(METHODS)) --out $(OUT) --no-report
	for lab in $(LABS); do $(BIN)/stallbench lab check $$lab --study $(OUT) || exit; done
	$(BIN)/stallbench lab sweep $(OUT)
	$(BIN)/stallbench report $(OUT)

reference:
	rm -rf results/reference
	$(MAKE) lab-report OUT=results/reference
	$(BIN)/stallbench bench results/reference
	$(BIN)/stallbench validate --study results/reference
	$(BIN)/stallbench torture --study results/reference
	$(BIN)/stallbench run --experiment load --target disk=.target $(foreach lab,$(LABS),--target $(lab)=lab:$(lab)) --out results/reference/load
	$(BIN)/stallbench sizes results/reference --target disk=.target --target $(firstword $(LABS))=lab:$(firstword $(LABS))
	$(BIN)/stallbench validate48 --study results/reference
	$(BIN)/stallbench report results/reference

clean:
	rm -rf .venv

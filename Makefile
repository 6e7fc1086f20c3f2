# Everything needs Python 3.11 or newer, a C++ compiler and make; the rest is installed into .venv.
PYTHON ?= python3
DEMO_PROCESSES ?= 2
TEST_WORKERS ?= 2
TORCH ?= 2.14.1
PROGRAMS ?= 20000
SWEEP ?= --training --backend eager

VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
TORCH_VENV := .venv-torch-$(TORCH)
INSTALL := $(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-torch differential lint sweep launch-checks pipelines rank-failures test-gpu test-ranks \
	compile-time-growth minimized-faults doctor-programs random-programs private-parts clean python-version

demo: $(VENV)/installed
	$(VENV_PYTHON) -m gradsplit.launch --nproc-per-node $(DEMO_PROCESSES) examples/train_ddp.py

test: $(VENV)/installed
	$(VENV_PYTHON) -m pytest -n $(TEST_WORKERS) --dist loadgroup -m "not gpu"

# The same tests with another release of torch, in an environment of its own.
test-torch: $(TORCH_VENV)/installed
	$(TORCH_VENV)/bin/python -m pytest -n $(TEST_WORKERS) --dist loadgroup -m "not gpu"

# Random programs and the samples of torch's operator database, compiled and not.
differential: $(VENV)/installed
	$(VENV_PYTHON) -m tests.differential --count $(PROGRAMS) --workers $(TEST_WORKERS) --out out/differential
	$(VENV_PYTHON) -m tests.differential --operators --workers $(TEST_WORKERS) --out out/operators

# What is captured of the models of transformers, timm and torchvision, as far as they are installed, beside torch.compile.
sweep: $(VENV)/installed
	$(VENV_PYTHON) -m tests.sweeps $(SWEEP) --workers $(TEST_WORKERS)

lint: $(VENV)/installed-lint
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m pyright --pythonpath $(VENV_PYTHON)

# Every option and kind of failure beside torchrun, how fast each starts, and jobs that somebody disturbs: an hour.
launch-checks: $(VENV)/installed
	$(VENV_PYTHON) -m tests.launch.compare_with_torchrun
	$(VENV_PYTHON) -m tests.launch.start_up
	$(VENV_PYTHON) -m tests.launch.random_failures 500
	$(VENV_PYTHON) -m tests.launch.several_machines 50
	if command -v slurmctld; then $(VENV_PYTHON) -m tests.launch.under_slurm; fi

# A GPU machine brings a torch that fits its driver, so this runs on PYTHON itself and installs nothing.
# A rank is killed, stopped, raises or is slow, at each stage of a step: about an hour.
rank-failures: $(VENV)/installed
	$(VENV_PYTHON) -m tests.multi_process.rank_failures

test-gpu: python-version
	$(PYTHON) -m pytest -m gpu

# All kinds of rank differences on four ranks, and random pairs of forwards on two.
test-ranks: $(VENV)/installed
	mkdir -p out/rank_differences
	$(VENV_PYTHON) -m gradsplit.launch --nproc-per-node 4 -m tests.multi_process.rank_differences out/rank_differences
	$(VENV_PYTHON) -m gradsplit.launch --nproc-per-node 2 -m tests.multi_process.rank_differences pairs 300

# All schedules with all models on two and four ranks beside the unsplit models, some with other sizes in each step or
# with generated kernels, and the proof of all schedules: half an hour.
pipelines: $(VENV)/installed
	rm -rf out/pipelines
	$(VENV_PYTHON) -m tests.bucketing.prove_schedules
	for ranks in 2 4; do \
		$(VENV_PYTHON) -m gradsplit.launch --nproc-per-node $$ranks -m tests.distributed.pipeline.pipeline_cases \
			out/pipelines/$$ranks gpt2 bert llama t5 vit unet -- \
			GPipe 1F1B Interleaved1F1B LoopedBFS InterleavedZeroBubble ZBVZeroBubble DualPipeV || exit 1; done
	$(VENV_PYTHON) -m gradsplit.launch --nproc-per-node 2 -m tests.distributed.pipeline.pipeline_cases --own-kernels \
		out/pipelines/own gpt2 bert llama t5 vit unet -- 1F1B InterleavedZeroBubble ZBVZeroBubble
	$(VENV_PYTHON) -m gradsplit.launch --nproc-per-node 2 -m tests.distributed.pipeline.pipeline_cases --open \
		out/pipelines/open gpt2 bert llama t5_of_two_lengths -- 1F1B InterleavedZeroBubble ZBVZeroBubble

# Processor seconds of compiling programs of up to 20,000 operations: an hour or two.
compile-time-growth: $(VENV)/installed
	$(VENV_PYTHON) -m tests.bench.compile_growth

# Forty planted faults in programs of 200 and of 1,000 calls, each made smaller: half an hour.
minimized-faults: $(VENV)/installed
	$(VENV_PYTHON) -m tests.minimizer.planted_programs 200
	$(VENV_PYTHON) -m tests.minimizer.planted_programs 1000

# Twenty programs with one trouble each, and what gradsplit.doctor says of them: a quarter of an hour.
doctor-programs: $(VENV)/installed
	$(VENV_PYTHON) -m tests.observe.doctor_programs

# The random programs and expressions of which the tests run some, and more: ten minutes of a processor.
random-programs: $(VENV)/installed
	$(VENV_PYTHON) -m tests.programs.random_programs --count 1000 --processes $(TEST_WORKERS)
	$(VENV_PYTHON) -m tests.lowering.random_expressions --count 2000 --processes $(TEST_WORKERS)

# A torch that lacks each of the private parts, of which the tests miss one for each purpose: two minutes.
private-parts: $(VENV)/installed
	$(VENV_PYTHON) -m tests.torch_facts.without_each_part

python-version:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "gradsplit needs Python 3.11 or newer, and $(PYTHON) is %d.%d: run make PYTHON=/path/to/python3.11" % sys.version_info[:2])'

$(VENV)/installed: pyproject.toml constraints.txt | python-version
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[test]'
	@touch $@

# A release of torch asks for its own triton and setuptools.
$(TORCH_VENV)/installed: pyproject.toml constraints.txt | python-version
	$(PYTHON) -m venv $(TORCH_VENV)
	grep -vE '^(torch|triton|setuptools)==' constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(TORCH_VENV)/constraints.txt torch==$(TORCH) -e '.[test]'
	@touch $@

$(VENV)/installed-lint: $(VENV)/installed
	$(INSTALL) -e '.[lint]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-torch-* out build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

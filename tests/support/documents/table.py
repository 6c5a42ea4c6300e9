"""What the documentation's commands need to be run here, and why some are not run.

A command that cannot be run here, or that a test of its own runs, has a row in `NOT_RUN`; what
takes too long is in `SHORTER`, or in `BENCHMARKS` with all options of a short run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

TINY = "examples/tiny/checkpoints"
QUANTIZED = "examples/quantize/checkpoints"


class Row(NamedTuple):
    """What is said of the commands or blocks of a page that begin so; None means of any page."""

    page: str | None
    begins: str
    says: str

    def matches(self, page: str, text: str) -> bool:
        return self.page in (page, None) and text.lstrip().startswith(self.begins)


NETWORK = "needs the network"
GPU = "needs a GPU"
SYSTEM = "changes the user's system"
CLUSTER = "needs a cluster"

# Blocks without a language that are not commands.
OUTPUT = (
    Row("README.md", "user: ", "what the demo prints, see tests/serving/servers/test_demo.py"),
    Row("docs/attention.md", "window_symmetric(5), queries", "a picture of a mask"),
    Row("docs/structure.md", "prefill chunk(s) ->", "the life of a request"),
    Row("docs/upstream/compiled_models_on_the_cpu.md", "Compiling model again", "lines of a log"),
    Row("docs/upstream/numbers_beyond_their_types.md", "POST ", "a request that kills vLLM"),
)

NO_BUILDER = "needs a container engine"

NOT_RUN = (
    Row(None, "import os", NETWORK),
    Row("README.md", "pip install vllm-dllm", NETWORK),
    Row("docs/deployment.md", "docker ", NO_BUILDER),
    Row("docs/deployment.md", "kubectl ", CLUSTER),
    Row("docs/deployment.md", "helm ", CLUSTER),
    Row("docs/deployment.md", "make ray", NETWORK),
    Row(None, "make setup", SYSTEM),
    Row(None, "make test", "is this suite"),
    Row("docs/performance.md", "make bench-gpu", GPU),
    Row("docs/quantization.md", "python3.11 -m venv quantize-env", NETWORK),
    Row("docs/quantization.md", "quantize-env/bin/python", "needs that environment"),
    Row("docs/quantization.md", "QUANTIZED=...", "is to be filled in"),
    Row("docs/quantization.md", "python benchmarks/accuracy.py $QUANTIZED", GPU),
    Row("docs/attention.md", "python benchmarks/ops/", GPU),
    Row("docs/attention.md", "vllm serve MODEL --attention-backend CUSTOM", GPU),
    # What a test of its own runs.
    Row("docs/weights.md", "class Receiver:", "test_weight_updates"),
    Row("docs/settings.md", "vllm-dllm tune", "test_tune"),
    Row("docs/traces.md", "vllm-dllm watch", "test_live_page"),
    Row("docs/traces.md", "vllm serve MODEL --middleware", "test_live_page"),
    Row(None, ".venv-ray/bin/python examples/cluster/ray_", "test_ray"),
    Row("README.md", "pip install -r https://", "test_release"),
    Row("docs/clients.md", "", "test_against_servers"),  # every block of that page
    Row(None, "vllm-dllm selftest", "test_selftest"),
    Row("docs/adding_an_algorithm.md", "pip install ./half_at_a_time", "test_third_party"),
    Row("docs/adding_an_algorithm.md", "vllm serve MODEL", "test_third_party"),
    Row("docs/adding_an_algorithm.md", "curl", "test_third_party"),
    Row("docs/adding_a_family.md", "pip install ./block_qwen2", "test_third_party_family"),
    Row("docs/adding_a_family.md", "vllm serve MODEL", "test_third_party_family"),
)

BENCHMARK = re.compile(r"benchmarks/[\w/]+\.py")
# Script that the documentation names -> options with which it takes a minute or two.
BENCHMARKS = {
    "benchmarks/accuracy.py": f"{TINY}/tiny-llada2 --per-task 2 --json OUT",
    "benchmarks/constrained_steps.py": (
        '--eager --rounds 1 --steps 2 --vocabularies "272 tokens" --json OUT'
    ),
    "benchmarks/decisions.py": "--eager --systems sdar --at-once 1 --least 3 --turns 1 --json OUT",
    "benchmarks/fidelity.py": "--model tiny-llada2 --per-task 1 --json OUT",
    "benchmarks/fuzz.py": "--model sdar --bodies 250 --json OUT",
    "benchmarks/gemma.py": "--rounds 1 --json OUT",
    "benchmarks/levers.py": "--models tiny-llada2-blocks --per-task 1 --json OUT",
    "benchmarks/model_memory.py": "--check",
    "benchmarks/ops/attention.py": "--quick",
    "benchmarks/ops/best_path.py": "--quick",
    "benchmarks/ops/row_stats.py": "--quick",
    "benchmarks/real_size.py": (
        "--tiny --steps 5 --requests 1 --context 40 --systems LLaDA2.0-mini --json OUT --limit 240"
    ),
    "benchmarks/report.py": "--check",
    "benchmarks/sdar.py": "--at-once 1 --wide 1 --per-task 1 --repeats 1 --turns 1 --json OUT",
    "benchmarks/serve.py": "--eager --concurrency 1 --least 2 --rounds 1 --turns 1 --json OUT",
    "benchmarks/soak.py": "--model sdar --requests 250 --patience 600 --json OUT",
    "benchmarks/start_up.py": "--models tiny-sdar --eager --later 1 --json OUT",
    "benchmarks/step_time.py": "--requests 1 --steps 4 --json OUT",
}

# Commands that take seconds, and so are run by `make test`; the others by `make test-long`.
QUICK = (
    ".venv/bin/vllm-dllm check",
    """vllm-dllm show-config MODEL --additional-config '{"dllm": {"max_steps": 16}}'""",
    ".venv/bin/python -m vllm_dllm.ops.attention.masks",
)

# Script, module or target -> what makes it short. It follows what the documentation says,
# and the last of two options counts. What this does not name is run as it stands.
SHORTER = {
    "examples.rl.train": "--rounds 1 --problems 2 --answers 2",
    "examples.tiny.train_blocks": "--steps 2 --held-out 1",
    "examples.tiny.train_diffusion_gemma": "--steps 2 --held-out 1",
    "examples.tiny.train_llada2": "--steps 2 --held-out 1",
    "examples.tiny.train_sdar": "--steps 2 --held-out 1",
    "pytest": "--collect-only",  # the tests themselves run in this suite
}

# Expression for the name of a model -> the tiny checkpoint that stands for it.
TWINS = {
    r"MODEL": f"{TINY}/tiny-llada2",
    r"inclusionAI/LLaDA2[\w.-]*": f"{TINY}/tiny-llada2",
    r"Efficient-Large-Model/Fast_dLLM[\w.-]*": f"{TINY}/tiny-sdar",
    r"JetLM/SDAR[\w.-]*|Gen-Verse/TraDo[\w.-]*|OpenMOSS-Team/DiRL[\w.-]*": f"{TINY}/tiny-sdar",
    r"google/diffusiongemma[\w.-]*": f"{TINY}/tiny-diffusiongemma",
    r"/path/to/a-quantized-llada2": f"{QUANTIZED}/tiny-llada2-nvfp4",
    r"/path/to/an-unquantized-one": f"{TINY}/tiny-llada2",
}

# Other words that a reader fills in. The files are made in the folder where commands run.
PLACEHOLDERS = {
    "OUT": "out",
    "photo.jpg": "docs/photo.jpg",
}

# What the tests know how to run; anything else needs a row in `NOT_RUN`.
PROGRAMS = ("curl", "make", "python", "vllm", "vllm-dllm")

# Programs that ask a server at localhost:8000 without naming it.
CLIENTS = ("vllm chat", "vllm complete", "vllm bench serve")


def twin(name: str) -> str | None:
    """The tiny checkpoint for the name of a model, or None if it is not such a name."""
    return next((path for pattern, path in TWINS.items() if re.fullmatch(pattern, name)), None)


# Example -> an expression that its whole output matches somewhere (a dot matches line ends, too).
OUTCOMES = {
    "extract_records.py": r"name='.*' age=\d+ city=",
    "images.py": r"question alone: (\d+) tokens.*"
    r"with the picture: (?!\1 )\d\d+ tokens.*random weights",
    "offline.py": r"64 \+ 28 -> 92\nsort 61 35 88 14 -> 14 35 61 88\n"
    r"copy diffusion2026 -> diffusion2026\n",
    "offline_batch.py": r"140/140",
    "own_algorithm.py": r"width  1: '40 71 23 97 52' in (1\d|2\d) steps\n"
    r"width  4: '40 71 23 97 52' in [2-9] steps\nwidth 32: '.*' in [12] steps\n",
    "several_algorithms.py": r"(\w[\w ]+ .*40 71 23 97 52\n){6}",
    "stream_prefix.py": r"whole blocks:.* 1 pieces,.*prefix:.* (?!1 )\d+ pieces,",
    "structured_output.py": r"64 \+ 28 +92\nsort 61 35 88 14 +14 35 61 88\n"
    r'Describe .*\{.?"name".*\n.*sum of numbers\. +\d+(\+\d+)+\n',
    "tools.py": r"temperature\(\{.*\}\) -> .*time_of_day\(\{.*\}\) -> .*answer: ",
}


def check_outcome(words: list[str], output: str) -> None:
    """Compare what an example of the documentation prints, where it asks a tiny model."""
    names = [Path(word).name for word in words if word.startswith("examples/")]
    if names and "--model" not in words:
        assert re.search(OUTCOMES[names[0]], output, re.DOTALL), f"{names}\n{output[-2000:]}"

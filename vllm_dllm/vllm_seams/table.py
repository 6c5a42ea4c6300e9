"""List every place where this package changes vLLM: what, why, the symptom without it, its end.

`docs/seams.md` is made from this table:

    .venv/bin/python -m vllm_dllm.vllm_seams.table > docs/seams.md

``tests/vllm_seams/test_signatures.py`` fails if the table lacks a wrapped function, or lists one
that is not wrapped.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Seam:
    """A change that this package makes to vLLM from outside.

    Attributes:
        what: the functions of vLLM that are wrapped, each as ``module:qualified name``.
        where: the module of this room that wraps them.
        why: what the wrapper does.
        symptom: what a user would see without it.
        ends: the change in vLLM that would make it unnecessary.
    """

    what: tuple[str, ...]
    where: str
    why: str
    symptom: str
    ends: str


SEAMS = (
    Seam(
        what=("vllm.sampling_params:SamplingParams._verify_greedy_sampling",),
        where="request_entry",
        why="Several samples of a greedy request are allowed: canvases of noise differ by seed.",
        symptom="`n > 1` with temperature 0 is refused before the model is known.",
        ends="the check moves to where the model is known",
    ),
    Seam(
        what=(
            "vllm.v1.engine.input_processor:InputProcessor.__init__",
            "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        ),
        where="request_entry",
        why="A request's options are resolved, and an automaton takes the grammar's place.",
        symptom="Request options are ignored, and structured output does not work.",
        ends="a hook for request processing that a plugin registers",
    ),
    Seam(
        what=("vllm.v1.engine.async_llm:AsyncLLM.add_request",),
        where="request_entry",
        why="A request waits for its constraint without holding others up.",
        symptom="A constraint that takes a second to compile stops the whole server for a second.",
        ends="the same hook, if it may be asynchronous",
    ),
    Seam(
        what=("vllm.entrypoints.serve.engine.serving:BaseServing._check_model",),
        where="http_endpoints",
        why="Every HTTP handler begins with it, so fields that the endpoint ignores and beam "
        "searches are refused there.",
        symptom="An option at the wrong place is ignored with status 200.",
        ends="vLLM refuses unknown fields",
    ),
    Seam(
        what=("vllm.entrypoints.launchers.app:init_exception_handler",),
        where="http_endpoints",
        why="A middleware holds the beginning of a stream back until the engine has its request.",
        symptom="A streamed request that is refused gets status 200 and then an error.",
        ends="vLLM validates a streamed request before it answers",
    ),
    Seam(
        what=("vllm.entrypoints.generate.beam_search.offline:BeamSearchOfflineMixin.beam_search",),
        where="beam_search",
        why="`LLM.beam_search` is refused.",
        symptom="A beam search over canvases returns texts that mean nothing.",
        ends="vLLM refuses beam search for diffusion models",
    ),
    Seam(
        what=(
            "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
            "vllm.v1.engine.output_processor:RequestState._new_completion_output",
        ),
        where="traces",
        why="Records of steps become the trace of an output.",
        symptom="There are no traces, and the records appear among a request's logprobs.",
        ends="a dictionary of the worker's that vLLM passes through to an output",
    ),
    Seam(
        what=("vllm.v1.engine.detokenizer:FastIncrementalDetokenizer.__init__",),
        where="detokenizer",
        why="A prompt whose text ends in U+FFFD is kept out of its answer.",
        symptom="Such an answer begins with the text of its prompt.",
        ends="vLLM removes that text ([report](upstream/prompts_that_end_in_u_fffd.md))",
    ),
    Seam(
        what=("vllm.v1.metrics.loggers:StatLoggerManager.__init__",),
        where="metrics",
        why="Counters by decoding algorithm are added to vLLM's.",
        symptom="Prometheus has no counters by algorithm.",
        ends="loggers of `vllm.stat_logger_plugins` are made for `LLM`, too, and do not override "
        "`--disable-log-stats`",
    ),
    Seam(
        what=(
            "vllm.engine.arg_utils:EngineArgs._set_default_max_num_seqs_and_batched_tokens_args",
        ),
        where="default_limits",
        why="The default number of requests and token budget fit whole canvases.",
        symptom="A start with default flags takes too much memory, or has room for one canvas.",
        ends="a model's configuration hook is told which values a user gave",
    ),
    Seam(
        what=("vllm.v1.executor.multiproc_executor:MultiprocExecutor._init_executor",),
        where="worker_shutdown",
        why="An executor is shut down when its engine fails to start.",
        symptom="A start that fails hangs if a worker misses SIGTERM.",
        ends="vLLM shuts its executor down where the engine's constructor raises "
        "([report](upstream/process_supervision.md))",
    ),
    Seam(
        what=("vllm.v1.worker.gpu.model_runner:GPUModelRunner.finish_requests",),
        where="runner",
        why="The model state is told which requests are preempted.",
        symptom="A preempted request that has streamed a part of its canvas loses its place.",
        ends="`ModelState.remove_request` is told whether the request was preempted",
    ),
    Seam(
        what=("vllm.v1.worker.gpu.structured_outputs:StructuredOutputsWorker.__init__",),
        where="runner",
        why="No bitmask is allocated for vLLM's grammars, which automata replace.",
        symptom="0.6 to 2.1 GiB more memory at vLLM's default number of requests.",
        ends="the bitmask is allocated for the first grammar",
    ),
)


def page() -> str:
    """The page ``docs/seams.md``."""
    count = sum(len(seam.what) for seam in SEAMS)
    lines = [
        "# Seams to vLLM",
        "",
        f"This package wraps {count} functions of vLLM, all of them in `vllm_dllm/vllm_seams/`.",
        "Each wrapper does its work for the models of this package only, and passes every other",
        "model on to the original. This page is made from `vllm_dllm/vllm_seams/table.py`. What",
        "the package subclasses through vLLM's own extension points (model states, samplers,",
        "schedulers, attention backends) is recorded with its signatures in",
        "`tests/vllm_seams/signatures.json`. What vLLM's CPU build lacks is a plugin of its",
        "own, `packages/vllm-cpu-v2`.",
    ]
    for seam in SEAMS:
        lines += [
            "",
            "## " + ", ".join(f"`{name.partition(':')[2]}`" for name in seam.what),
            "",
            f"- **What it does** (`{seam.where}.py`): {seam.why}",
            f"- **Without it:** {seam.symptom}",
            f"- **What would end it:** {seam.ends}.",
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")

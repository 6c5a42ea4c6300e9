"""Admissions and steps of models at their published sizes, on the fake accelerator.

What runs is this package's code between two forward passes, by default as on a GPU: Triton kernels
count as one each, and compiled functions as the kernels that PyTorch's compiler generates.
"""

from __future__ import annotations

import linecache
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from canvas_grammar.decoding import paths_triton
from canvas_grammar.decoding.path_finder import warm_up as warm_up_paths
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch.utils import _triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm.config.compilation import CUDAGraphMode

from tests.support.fake_accelerator import Cost, FakeDevice, fake_accelerator
from vllm_dllm.attention.metadata import AttentionBatch
from vllm_dllm.engine import (
    constraints,
    logprobs,
    readout_masked,
    readout_noise,
    readout_triton,
    step,
    token_choice,
)
from vllm_dllm.engine.contracts import EXAMPLE_ROWS
from vllm_dllm.engine.further_passes import PreparedStep
from vllm_dllm.engine.input_ids import read_again
from vllm_dllm.engine.replayed_passes import ReplayedPasses
from vllm_dllm.engine.slots import AlgorithmBatch
from vllm_dllm.engine.warm_up import compile_updates
from vllm_dllm.families.anchored.attention import CausalUnlessDenoised
from vllm_dllm.families.block_causal.attention import BlockCausal
from vllm_dllm.ops.compiled import OF_BATCHES, OF_ROWS, any_size
from vllm_dllm.ops.statistics import (
    filters_triton,
    rows_triton,
    scores_triton,
    soft_embedding_triton,
)
from vllm_dllm.selftest.steps import MODELS, POSITIONS, PROMPT, BareModel, Published


class FakeModel(BareModel):
    """A model without its backbone, with its rule of attention."""

    def __init__(self, model: Published, device: torch.device, triton: bool = True) -> None:
        """Set up as on a GPU, with Triton kernels or compiled without them."""
        super().__init__(model, device, triton=triton, compile=True)
        update = self.sampler.canvas_update
        update.compiled_algorithm = model.served.choose().algorithm.name
        update.compiled_steps = set(model.served.algorithm_names)
        update.compiles = update.compiles_ahead = True
        self.parts.logprobs.compile()
        masked = model.kind.mask_token is not None
        self.attention: Any = (
            BlockCausal(model.kind.length, device) if masked else CausalUnlessDenoised(self.slots)
        )

    def step(self, batch: Any) -> None:
        """One step over a batch from `batch`: all that this package does but the forward pass."""
        self._prepare(batch)
        if batch.passes > 1:
            self._replay(batch)
        self.sampler(self._hidden(batch.num_draft_tokens), batch)

    def _replay(self, batch: Any) -> None:
        """Let further passes follow the first one, by replays of a graph that is not there."""
        state: Any = self.admission
        state.graphs = SimpleNamespace(
            dispatch=lambda *_, **__: None if batch.has_prefill else "graph",
            run_fullgraph=lambda _: self._hidden(batch.num_tokens),
        )
        state.model = SimpleNamespace(compute_logits=lambda hidden: hidden)
        state.policy = self.sampler.canvas_update.policy
        state.prepare_attn = state.prepare_inputs = lambda *_: None
        if not state.policy.in_place:
            state.prepare_attn = lambda *_: self._prepare(batch)
        mappings = self._zeros(torch.int64, 1, batch.num_tokens)
        state.prepared = PreparedStep(batch, CUDAGraphMode.FULL, (), mappings, [], None, {})
        self.sampler.further = ReplayedPasses(state, self.states, batch.passes)

    def _prepare(self, batch: Any) -> None:
        drafts = batch.num_draft_tokens_per_req
        if ((batch.num_scheduled_tokens > drafts) & (drafts > 0)).any():
            read_again(batch, self.states.all_token_ids.gpu)
        if self.conditioning is not None:
            self.conditioning.apply(self._hidden(batch.num_tokens), batch)
        nowhere = {"attn_groups": [], "kv_cache_config": SimpleNamespace(kv_cache_groups=[])}
        common = nowhere | {"slot_mappings": None, "num_tokens": batch.num_tokens}
        common |= {"max_seq_len": POSITIONS, "for_cudagraph_capture": False}
        self.attention.metadata(AttentionBatch(batch, False, (), common))

    def _hidden(self, rows: int) -> torch.Tensor:
        return torch.empty((rows, self.hidden), dtype=torch.bfloat16, device=self.device)

    def batch(
        self,
        canvases: int,
        prefills: int = 0,
        narrow: int = 0,
        committing: int = 0,
        passes: int = 1,
    ) -> Any:
        """What is read of vLLM's ``InputBatch``: canvases, and chunks that end their prompts.

        The last canvas lacks `narrow` positions, `committing` ones are read with the block before
        them, and the step has this number of passes.
        """
        rows, length, chunk = canvases + prefills, self.slots.length, 100
        widths = np.array([length] * canvases + [0] * prefills)
        widths[canvases - 1] -= narrow
        scheduled = widths + np.array([0] * canvases + [chunk] * prefills)
        scheduled[:committing] += length
        starts = np.concatenate([[0], np.cumsum(scheduled)]).astype(np.int32)
        tokens = int(scheduled.sum())
        return SimpleNamespace(
            passes=passes,
            has_prefill=prefills > 0,
            num_reqs=rows,
            idx_mapping=self._zeros(torch.int32, rows),
            idx_mapping_np=np.arange(rows),
            num_tokens=tokens,
            num_draft_tokens=int(widths.sum()),
            num_draft_tokens_per_req=widths,
            cu_num_logits_np=np.concatenate([[0], np.cumsum(widths)]),
            num_scheduled_tokens=scheduled,
            query_start_loc=self._zeros(torch.int32, rows + 1),
            query_start_loc_np=starts,
            max_query_len=int(scheduled.max()),
            seq_lens=self._zeros(torch.int32, rows),
            seq_lens_cpu_upper_bound=torch.zeros(rows, dtype=torch.int32),
            input_ids=self._zeros(torch.int32, tokens),
            positions=self._zeros(torch.int64, tokens),
            logits_indices=self._zeros(torch.int64, tokens),
            num_computed_prefill_tokens_np=np.array([PROMPT] * canvases + [0] * prefills),
            prefill_len_np=np.array([PROMPT] * canvases + [chunk] * prefills),
        )


# Lines of the generated code that launch something: our own kernels, and PyTorch's.
LAUNCHES = (".run(", "extern_kernels.", "torch.ops.", "aten.")


def generated_code(
    function: Callable[..., Any], *args: Any, dynamic: bool | None, options: Mapping[str, Any]
) -> str:
    """The code that PyTorch's compiler writes for a GPU when a function gets these arguments.

    Its Triton backend writes code for a CPU, too, and decides which operators share a kernel before
    anything is specific to the device. The code is not run.
    """
    codes: list[str] = []

    def write(graph: GraphLowering) -> None:
        codes.append(graph.codegen()[0].value)
        raise InterruptedError("the code is written")

    torch._dynamo.reset()
    with (
        config.patch(cpu_backend="triton", fx_graph_cache=False),
        mock.patch.object(_triton, "triton_hash_with_backend", lambda: "none"),
        mock.patch.object(GraphLowering, "compile_to_module", write),
    ):
        try:
            torch.compile(function, dynamic=dynamic, fullgraph=True, options=options)(*args)
        except Exception:
            if len(codes) != 1:
                raise
    torch._dynamo.reset()
    (code,) = codes
    return code


def generated_kernels(code: str) -> list[str]:
    lines = [line.strip() for line in code[code.index("def call(") :].splitlines()]
    return [
        line
        for line in lines
        if any(launch in line for launch in LAUNCHES)
        and not line.startswith(("#", "assert_", "del "))
    ]


def smaller(model: Published) -> Published:
    """A model of few ids, whose canvases have the published length."""
    vocabulary, kind = 320, model.kind
    mask = None if kind.mask_token is None else vocabulary - 1
    return replace(model, kind=replace(kind, vocabulary=vocabulary, mask_token=mask), hidden=64)


# The modules of Triton kernels, and those that compile functions.
KERNELS = (rows_triton, scores_triton, filters_triton, soft_embedding_triton, paths_triton)
COMPILING = (logprobs, step, token_choice, readout_triton, readout_masked, readout_noise)


class Launches:
    """Stands in for Triton kernels and compiled functions while it is entered.

    It counts launches of the former, and has the number of kernels of the latter (`generated`) and,
    if these were to be found out, their code.
    """

    def __init__(self, generated: dict[str, int] | None = None) -> None:
        """Count with these numbers, or find them out, which runs every compiled function."""
        self.counts: Counter[str] = Counter()
        self.forms: set[str] = set()  # for which kernels were compiled
        self.finds_out = generated is None
        self.codes: dict[str, str] = {}
        self.generated = {} if generated is None else generated
        self.stack = ExitStack()

    def __enter__(self) -> Launches:
        for module in KERNELS:
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                self._patch(module, name, _Kernel(name, getattr(module, name), self))
            if hasattr(module, "empty"):
                self._patch(module, "empty", _zeros)
        for module in COMPILING:
            for name, how in (("compiled", OF_ROWS), ("CompiledOnce", OF_BATCHES)):
                if hasattr(module, name):
                    self._patch(module, name, partial(self._compiled, how=how))
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def _patch(self, module: Any, name: str, stand_in: Any) -> None:
        self.stack.enter_context(mock.patch.object(module, name, stand_in))

    def _compiled(self, function: Callable[..., Any], how: Mapping[str, Any]) -> Callable[..., Any]:

        def run(*args: Any) -> Any:
            name = function.__name__
            if isinstance(args[0], AlgorithmBatch):  # the function is made for each algorithm
                name += f" {args[0].algorithm.name}"
            if self.finds_out and name not in self.generated:
                if how is OF_BATCHES:
                    any_size(args)
                self.codes[name] = generated_code(function, *args, **how)
                self.generated[name] = len(generated_kernels(self.codes[name]))
            cost = FakeDevice.cost
            before = cost and (cost.kernels.copy(), cost.written)
            result = function(*args)
            if cost is not None and before is not None:
                cost.kernels, written = before
                # Some of it stays in registers, and not even the rest has a size here.
                cost.written = written
                cost.kernels[f"compiled {name}"] += self.generated[name]
            return result

        return run


class _Kernel:
    """Stands in for a Triton kernel, which is launched and not run."""

    def __init__(self, name: str, kernel: Any, launches: Launches) -> None:
        self.name = name
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        self.launches.counts.update([self.name])
        given = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
        parameters = {parameter.name: parameter for parameter in self.kernel.params}
        form = sorted((name, _form(v, parameters.get(name))) for name, v in given.items())
        self.launches.forms.add(f"{self.name} {form}")


def _form(value: Any, parameter: Any) -> Any:
    """What Triton compiles a kernel for of an argument; `parameter` is None for an option."""
    if isinstance(value, tuple):
        return tuple(_form(each, parameter) for each in value)
    if isinstance(value, torch.Tensor):
        odd = value.storage_offset() * value.element_size() % 16 > 0
        return f"{value.dtype}{' anywhere' * (odd and _is_aligned(parameter))}"
    if not isinstance(value, int) or parameter is None or parameter.is_constexpr:
        return str(value)
    if parameter.do_not_specialize:
        return "int"
    kind = "1" if value == 1 else "int of 16" if value % 16 == 0 else "int"
    return kind if kind == "1" or _is_aligned(parameter) else "int"


def _is_aligned(parameter: Any) -> bool:
    return not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """In place of memory that a kernel would fill; it launches nothing."""
    made = torch.empty(tuple(shape), dtype=dtype, device=device)
    return made.zero_() if device.type == "cpu" else made


def steps_of_a_small_model(name: str, triton: bool = True, every: bool = True) -> Launches:
    """What steps of a model of `MODELS` compile, with our Triton kernels or without.

    The algorithms are the model's own, or every one that a request may choose.
    """
    with Launches() as found, torch.inference_mode():
        model = FakeModel(smaller(MODELS[name]), torch.device("cpu"), triton=triton)
        model.weight.zero_()
        compile_updates(model.admission, model.served.algorithm_names if every else ())
        for temperature in (0.0, 0.7):
            for slot in range(2):
                model.admit(slot, temperature=temperature)
            batch = model.batch(2)
            batch.idx_mapping = torch.arange(2)  # which is left empty for a fake step
            model.sampler(torch.zeros(batch.num_draft_tokens, model.hidden).bfloat16(), batch)
    return found


@cache
def generated(name: str) -> dict[str, int]:
    """The kernels of each function that is compiled for a model of `MODELS`."""
    return steps_of_a_small_model(name).generated


def _stepped(case: dict[str, Any], device: torch.device, launches: Launches) -> tuple[Cost, Cost]:
    """Run one step, see `costs`: what an admission and the step cost."""
    model, count = FakeModel(MODELS[case["model"]], device), case["canvases"]
    requests, beside = case.get("requests", [{}]), case.get("beside", {})
    for request in requests:
        if "logit_bias" in request:  # JSON's keys are strings
            biases = request["logit_bias"].items()
            request["logit_bias"] = {int(token): bias for token, bias in biases}
    model.admit(0, **requests[0])  # makes what the next one finds
    with Cost() as admission:
        model.admit(0, **requests[0])
    for slot in range(count + beside.get("prefills", 0)):
        model.admit(slot, **requests[slot % len(requests)])
    batch = model.batch(count, **beside)
    launches.counts.clear()
    with Cost() as step:
        model.step(batch)
    step.kernels.update(launches.counts)
    return admission, step


def costs(cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The costs of the first request's admission and of one step, for each case.

    A case has ``model`` (one of `MODELS`), ``canvases`` (how many), and possibly ``requests`` (the
    arguments of `FakeModel.admit` for each, in turns) and ``beside`` (more of `FakeModel.batch`).
    """
    for case in cases:
        name = case["model"]
        # Each admission unpacks its constraint.
        forgets = mock.patch.object(constraints, "MOST_BYTES_UNUSED", 0)
        with Launches(generated(name)) as launches, fake_accelerator() as device, forgets:
            admission, step = _stepped(case, device, launches)
        yield {"admission": admission.summary(), "step": step.summary()}


def forms(cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of each case the forms of Triton kernels that are not compiled when a server starts."""
    uncounted: dict[str, int] = defaultdict(int)
    for name in sorted({case["model"] for case in cases}):
        with Launches(uncounted) as launches, fake_accelerator() as device:
            model = FakeModel(MODELS[name], device)
            model.readout.warm_up(model._hidden(EXAMPLE_ROWS))
            warm_up_paths(device, model.slots.length)
            ahead = launches.forms.copy()
        assert ahead
        for case in cases:
            if case["model"] != name:
                continue
            with Launches(uncounted) as launches, fake_accelerator() as device:
                _stepped(case, device, launches)
            yield {"model": name, "case": case, "missing": sorted(launches.forms - ahead)}


TARGET = GPUTarget("cuda", 90, 32)
# The name and the source of a Triton kernel in a file that PyTorch's compiler wrote.
KERNEL_SOURCE = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.DOTALL)
# What PyTorch would tune; a kernel that compiles for one number of elements does for others.
BLOCK = 16


def error_of(name: str, source: str) -> str:
    found: list[Any] = []

    def template(*_: Any, triton_meta: Mapping[str, Any], **__: Any) -> Callable[[Any], Any]:
        return lambda function: found.append((function, triton_meta["signature"]))

    source = re.sub(r"@triton_heuristics\.\w+", "@template", source)
    source = source.replace("triton_helpers.set_driver_to_cpu()", "")
    # Triton reads the text of a function again.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), {"template": template, "__name__": name, "__file__": name})
    ((kernel, signature),) = found
    constants = {
        (kernel.arg_names.index(argument),): BLOCK
        for argument, kind in signature.items()
        if kind == "constexpr"
    }
    try:
        triton.compile(ASTSource(kernel, signature, constants), target=TARGET)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def errors(name: str, on_triton: bool, every: bool) -> Iterator[tuple[str, str, str]]:
    """Of each kernel of a model: the function, the kernel, and the compiler's error or "".

    See `steps_of_a_small_model`.
    """
    for function, code in steps_of_a_small_model(name, on_triton, every).codes.items():
        for kernel, source in KERNEL_SOURCE.findall(code):
            yield function, kernel, error_of(kernel, source)

"""What fuzzing may find, and what of it is vLLM's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tests.support.fuzz.client import Reply

# Seconds that no answer may take, alone on an idle machine.
SLOWEST = 40.0
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
RAISED = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Warning)\b.*$|^[A-Z]\w+Error: .*$")
HEADER = re.compile(r"^\([^)]* pid=\d+\) (?:[A-Z]+ \S+ \S+ \[[^\]]+\] ?)?")
# The last is what vLLM wraps its application in for SageMaker.
PACKAGES = re.compile(r"/(vllm|vllm_dllm|model_hosting_container_standards)/")
TRACEBACK = "Traceback (most recent call last):"
CAUSE = "The above exception was the direct cause of the following exception"
DEAD = re.compile(
    r"^(\([^)]*\) )?(.*\] )?vllm\.v1\.engine\.exceptions\.EngineDeadError", re.MULTILINE
)
# Where vLLM itself answers 500, by file and function; the lines are those of vLLM 0.32.
VLLMS_OWN: Mapping[tuple[str, str], str] = {
    ("vllm/entrypoints/openai/completion/protocol.py", "<genexpr>"): (
        "line 487: `structured_outputs` that is no object"
    ),
    ("vllm/entrypoints/openai/chat_completion/protocol.py", "<genexpr>"): (
        "line 911: `structured_outputs` that is no object"
    ),
    ("vllm/v1/engine/output_processor.py", "from_new_request"): (
        "line 246: `kv_transfer_params` in `vllm_xargs` that is no object"
    ),
    ("vllm/entrypoints/serve/exception_handling/handlers/vllm_error.py", "engine_error_handler"): (
        "line 54: a `request_id` that holds half of a surrogate pair"
    ),
    ("vllm/v1/serial_utils.py", "encode"): (
        "line 170: a `request_id` or `session_id` that holds half of a surrogate pair"
    ),
    ("vllm/sampling_params.py", "_validate_trace_replay"): (
        "line 1106: `trace_decode_token_ids`, which vLLM checks behind its own checks"
    ),
    ("vllm/entrypoints/scale_out/token_in_token_out/api_router.py", "abort_requests"): (
        "lines 84 and 90: a body that is no object, or is nested too deeply"
    ),
    ("model_hosting_container_standards/common/transforms/base_factory.py", "decorated_func"): (
        "line 96, around /invocations: JSON that is nested too deeply"
    ),
    ("model_hosting_container_standards/sagemaker/sessions/transform.py", "transform_request"): (
        "line 109, around /invocations: the same, where it is an object"
    ),
}
# Where vLLM fails only after other requests, so that plain vLLM does not fail for the body alone.
VLLMS_OWN_LATER: Mapping[tuple[str, str], str] = {
    (
        "vllm/entrypoints/openai/responses/serving.py",
        "responses_background_stream_generator",
    ): "line 1110: `?stream=true` of a stored answer that was not streamed breaks off",
}


@dataclass(frozen=True)
class Site:
    """Where an exception was raised, or where vLLM or this package called what raised it."""

    file: str
    line: int
    function: str
    error: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.error[:200]}"

    @property
    def key(self) -> tuple[str, str]:
        return self.file, self.function


@dataclass(frozen=True)
class Finding:
    """Something that should not be: the reply that showed it, and where the log says it arose."""

    what: str
    reply: Reply | None = None
    site: Site | None = None

    def lines(self) -> list[str]:
        found = [self.what if self.reply is None else f"{self.what}: {self.reply}"]
        return found + ([f"  raised at {self.site}"] if self.site else [])


def site_of(log: str) -> Site | None:
    """The innermost frame in vLLM or here of a log's last traceback, but for `DEAD` ones."""
    parts = [part for part in log.split(TRACEBACK)[1:] if not DEAD.search(part)]
    while len(parts) > 1 and CAUSE in parts[-2]:
        parts.pop()
    lines = [HEADER.sub("", line) for part in parts[-1:] for line in part.splitlines()]
    frames = [(n, found) for n, line in enumerate(lines) if (found := FRAME.search(line))]
    if not frames:
        return None
    ours = [found for _, found in frames if PACKAGES.search(found["file"])]
    inner = ours[-1] if ours else frames[-1][1]
    after = (line.strip() for line in lines[frames[-1][0] + 1 :])
    error = next((line for line in after if RAISED.match(line)), "")
    named = PACKAGES.search(inner["file"])
    file = inner["file"][named.start() + 1 :] if named else inner["file"]
    return Site(file, int(inner["line"]), inner["function"], error)


def unnamed(reply: Reply) -> bool:
    """Whether a refusal names nothing of what was given beside the prompt."""
    given = {part for name in reply.body.names for part in name.split(".")}
    if reply.body.how not in ("random", "contradiction") or given & READ_FIRST:
        return False
    known = given | {"context length"}
    for words, said in CALLED.items():
        if given & words:
            known |= said
    return 400 <= reply.status < 500 and not any(name in reply.text for name in known)


# What vLLM reads before anything else, and may refuse without its name.
READ_FIRST = frozenset({"messages", "prompt", "input", "token_ids", "tools"})
# Whose refusals have to name something.
NAMING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
# What vLLM calls a field otherwise.
CALLED: Mapping[frozenset[str], set[str]] = {
    frozenset({"vllm_xargs"}): {"extra_args", "diffusion"},
    frozenset({"response_format", "structured_outputs", "text"}): {"structured"},
    frozenset({"max_completion_tokens", "max_output_tokens"}): {"max_tokens"},
    frozenset({"previous_response_id"}): {"response_id"},
}

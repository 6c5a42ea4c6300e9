"""How each reasoning parser and each tool parser of vLLM wants its text written.

Read from vLLM's parsers and from its structural tags. A format that a parser gets wrong although
the text is as its source says names the fault.
"""

# ruff: noqa: RUF001 (the marks of some models have such characters)
from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

# A call's function and its arguments.
Call = tuple[str, dict[str, Any]]

VLLM = "https://github.com/vllm-project/vllm"
HARMONY = "`gpt_oss` only"
MELODY = "needs `cohere_melody`"
# The parsers that cannot be made for a model of ours, each with the reason.
IMPOSSIBLE = {
    "cohere_command3": MELODY,
    "cohere_command4": MELODY,
    "openai": HARMONY,
    "openai_gptoss": HARMONY,
}
# The parsers that came with vLLM 0.33.
NOT_TRIED = ("beam", "muse", "musespark1x", "step5")


@dataclass(frozen=True)
class Fault:
    """What a parser of vLLM gets wrong although the text is in its own format.

    Attributes:
        streamed: the stream is wrong, with single tokens as well.
        unstreamed: the answer that is not streamed is wrong.
        what: what goes wrong.
        report: where it is reported.
    """

    what: str
    streamed: bool = True
    unstreamed: bool = False
    report: str = ""


# What a table calls each combination of what is wrong: streamed, and unstreamed.
OUTCOMES = {
    "right unstreamed only": (True, False),
    "right streamed only": (False, True),
    "wrong": (True, True),
}


# By the reasoning parser and the tool parser, as one of them or both are used.
FAULTS: dict[tuple[str | None, str | None], Fault] = {
    ("granite", None): Fault("a colon of the heading may begin the thought"),
    ("hunyuan_a13b", None): Fault("`</answer>` stays in the text"),
    ("inkling", None): Fault("without its tool parser, a mark stays in the text"),
    (None, "functiongemma"): Fault("several arguments are no JSON"),
    ("granite", "granite"): Fault("calls stay in the text"),
    (None, "granite-20b-fc"): Fault("calls after a text stay in it"),
    (None, "hunyuan_a13b"): Fault("`<tool_calls>` stays in the text, an argument `name` is a call"),
    (None, "jamba"): Fault("several values or calls are no JSON", report=f"{VLLM}/pull/55669"),
    (None, "minicpm5"): Fault("a text before the calls is lost", streamed=False, unstreamed=True),
    (None, "olmo3"): Fault("518.25 may become 518.05"),
    (None, "phi4_mini_json"): Fault("no call is found", report=f"{VLLM}/issues/18257"),
    (None, "step3"): Fault("objects and lists are strings", unstreamed=True),
    ("step3", "step3"): Fault("objects and lists are strings", unstreamed=True),
    (None, "xlam"): Fault("a brace is doubled, an argument `name` is a call"),
}


@dataclass(frozen=True)
class Thoughts:
    """The format of a reasoning parser.

    Attributes:
        begin: what precedes a thought; a prompt may end with it.
        end: what follows a thought.
        markers: what the tokenizer has as one token; by default `begin` and `end`.
        begins: where a thought begins: in the answer, in the prompt, or both are right.
        answer: the text around what is not a thought.
        options: the request's ``chat_template_kwargs``.
        shown: what is expected of a thought: as ``reasoning``, or all text as content.
    """

    begin: str = "<think>"
    end: str = "</think>"
    markers: tuple[str, ...] | None = None
    begins: tuple[str, ...] = ("answer", "prompt")
    answer: tuple[str, str] = ("", "")
    options: dict[str, Any] = field(default_factory=dict)
    shown: bool = True

    def tokens(self) -> tuple[str, ...]:
        return (self.begin, self.end) if self.markers is None else self.markers


@dataclass(frozen=True)
class Tools:
    """The format of a tool parser.

    Attributes:
        block: writes calls that follow each other.
        markers: what the tokenizer has as one token.
        most: the most calls in a block.
        before, after: whether text may precede the calls, and follow them.
        again: whether another block of calls may follow that text.
        text: the text around what is no call.
        lists: whether a value may be a list.
        reasoning: the reasoning parser of the same models.
    """

    block: Callable[[Sequence[Call]], str]
    markers: tuple[str, ...] = ()
    most: int = 3
    before: bool = True
    after: bool = True
    again: bool = True
    text: tuple[str, str] = ("", "")
    lists: bool = True
    reasoning: str | None = None


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: Any) -> str:
    """A string as it is, anything else as JSON."""
    return value if isinstance(value, str) else as_json(value)


def objects(arguments: str = "arguments") -> Callable[[Sequence[Call]], list[str]]:
    return lambda calls: [as_json({"name": name, arguments: values}) for name, values in calls]


def each(begin: str, end: str, separator: str = "") -> Callable[[Sequence[Call]], str]:
    """A JSON object for each call, each within marks."""
    return lambda calls: separator.join(begin + one + end for one in objects()(calls))


def array(begin: str, end: str = "") -> Callable[[Sequence[Call]], str]:
    """A JSON array of the calls."""
    return lambda calls: begin + "[" + ", ".join(objects()(calls)) + "]" + end


def tagged(
    section: tuple[str, str],
    call: tuple[str, str],
    value: tuple[str, str, str],
    after_call: str = "",
) -> Callable[[Sequence[Call]], str]:
    """Calls whose arguments each have tags around their names and their values."""

    def block(calls: Sequence[Call]) -> str:
        parts = []
        for name, values in calls:
            pairs = "".join(
                value[0] + key + value[1] + bare(one) + value[2] for key, one in values.items()
            )
            parts.append(call[0].replace("NAME", name) + pairs + call[1])
        return section[0] + after_call.join(parts) + section[1]

    return block


def dsml(wrapper: str, space: str = "") -> Callable[[Sequence[Call]], str]:
    """DeepSeek's tags."""
    begin, end = f"<｜DSML｜{space}", f"</｜DSML｜{space}"

    def block(calls: Sequence[Call]) -> str:
        text = f"{begin}{wrapper}>\n"
        for name, values in calls:
            text += f'{begin}invoke name="{name}">\n'
            for key, value in values.items():
                is_text = as_json(isinstance(value, str))
                text += f'{begin}parameter name="{key}" string="{is_text}">{bare(value)}'
                text += f"{end}parameter>\n"
            text += f"{end}invoke>\n"
        return text + f"{end}{wrapper}>"

    return block


def dsml_markers(wrapper: str, space: str = "") -> tuple[str, ...]:
    return (f"<｜DSML｜{space}{wrapper}>", f"</｜DSML｜{space}{wrapper}>", "｜DSML｜")


def glm(calls: Sequence[Call]) -> str:
    return tagged(
        ("", ""),
        ("<tool_call>NAME\n", "</tool_call>"),
        ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        "\n",
    )(calls)


def coder(begin: str = "<tool_call>", end: str = "</tool_call>", line: str = "\n") -> Any:
    """Qwen's XML."""
    return tagged(
        ("", ""),
        (f"{begin}\n<function=NAME>\n", f"</function>\n{end}"),
        ("<parameter=", f">{line}", f"{line}</parameter>\n"),
        "\n",
    )


def python(value: Any) -> str:
    return repr(value)


def pythonic(separator: str, literal: Callable[[Any], str] = python) -> Any:
    def block(calls: Sequence[Call]) -> str:
        return separator.join(
            name + "(" + ", ".join(f"{k}={literal(v)}" for k, v in values.items()) + ")"
            for name, values in calls
        )

    return block


def python_list(begin: str = "", end: str = "") -> Callable[[Sequence[Call]], str]:
    return lambda calls: f"{begin}[{pythonic(', ')(calls)}]{end}"


def notation(value: Any) -> str:
    """Gemma's notation."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{notation(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(notation, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else as_json(value)


def gemma(calls: Sequence[Call]) -> str:
    return "".join(f"<|tool_call>call:{name}{notation(v)}<tool_call|>" for name, v in calls)


def function_gemma(calls: Sequence[Call]) -> str:
    parts = []
    for name, values in calls:
        pairs = ",".join(f"{key}:<escape>{bare(one)}<escape>" for key, one in values.items())
        parts.append(f"<start_function_call>call:{name}{{{pairs}}}<end_function_call>")
    return "".join(parts)


def deepseek(separator: str, end: str, between: str = "\n") -> Callable[[Sequence[Call]], str]:
    def block(calls: Sequence[Call]) -> str:
        parts = between.join(
            "<｜tool▁call▁begin｜>"
            + separator.replace("NAME", name)
            + as_json(values)
            + end
            + "<｜tool▁call▁end｜>"
            for name, values in calls
        )
        return f"<｜tool▁calls▁begin｜>{parts}<｜tool▁calls▁end｜>"

    return block


DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)


def apertus(calls: Sequence[Call]) -> str:
    inside = ", ".join(as_json({name: values}) for name, values in calls)
    return f"<|tools_prefix|>[{inside}]<|tools_suffix|>"


def kimi_k2(calls: Sequence[Call]) -> str:
    parts = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        f"{as_json(values)}<|tool_call_end|>"
        for number, (name, values) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{parts}<|tool_calls_section_end|>"


XTML = {str: "string", int: "number", float: "number", bool: "boolean", dict: "object"}


def kimi_k3(calls: Sequence[Call]) -> str:
    text = "<|open|>tools<|sep|>"
    for number, (name, values) in enumerate(calls, start=1):
        text += f'<|open|>call tool="{name}" index="{number}"<|sep|>'
        for key, value in values.items():
            kind = XTML.get(type(value), "array")
            text += f'<|open|>argument key="{key}" type="{kind}"<|sep|>{bare(value)}'
            text += "<|close|>argument<|sep|>"
        text += "<|close|>call<|sep|>"
    return text + "<|close|>tools<|sep|>"


MINIMAX = "]<]minimax[>["


def minimax_m3(calls: Sequence[Call]) -> str:
    def element(name: str, value: Any) -> str:
        if isinstance(value, dict):
            inner = "".join(element(key, one) for key, one in value.items())
        elif isinstance(value, list):
            inner = "".join(element("item", one) for one in value)
        else:
            inner = bare(value)
        return f"{MINIMAX}<{name}>{inner}{MINIMAX}</{name}>"

    text = f"{MINIMAX}<tool_call>\n"
    for name, values in calls:
        text += f'{MINIMAX}<invoke name="{name}">'
        text += "".join(element(key, value) for key, value in values.items())
        text += f"{MINIMAX}</invoke>\n"
    return text + f"{MINIMAX}</tool_call>"


def muse(calls: Sequence[Call]) -> str:
    text = f"<|start|>assistant to={calls[0][0]}<|message|><atem:function_calls>\n"
    for name, values in calls:
        text += f'<atem:invoke name="{name}">\n'
        for key, value in values.items():
            text += f'<atem:parameter name="{key}">{bare(value)}</atem:parameter>\n'
        text += "</atem:invoke>\n"
    return text + "</atem:function_calls><|eom|>"


PLAMO_BEGIN, PLAMO_END = "<|plamo:begin_", "<|plamo:end_"


def plamo(calls: Sequence[Call]) -> str:
    text = f"{PLAMO_BEGIN}tool_requests:plamo|>"
    for name, values in calls:
        text += f"{PLAMO_BEGIN}tool_request:plamo|>{PLAMO_BEGIN}tool_name:plamo|>{name}"
        text += f"{PLAMO_END}tool_name:plamo|>{PLAMO_BEGIN}tool_arguments:plamo|>"
        text += f"<|plamo:constrain|>json<|plamo:msg|>{as_json(values)}"
        text += f"{PLAMO_END}tool_arguments:plamo|>{PLAMO_END}tool_request:plamo|>"
    return text + f"{PLAMO_END}tool_requests:plamo|>"


PLAMO = (PLAMO_BEGIN, PLAMO_END, ":plamo|>", "<|plamo:constrain|>", "<|plamo:msg|>")


def inkling(calls: Sequence[Call]) -> str:
    return "".join(
        "<|message_model|><|content_invoke_tool_json|>"
        + as_json({"name": name, "args": values})
        + "<|end_message|>"
        for name, values in calls
    )


INKLING = (
    "<|message_model|>",
    "<|content_text|>",
    "<|content_thinking|>",
    "<|content_invoke_tool_json|>",
    "<|content_invoke_tool_text|>",
    "<|content_tool_error|>",
    "<|content_model_end_sampling|>",
    "<|end_message|>",
)


def mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{as_json(values)}" for name, values in calls)


THINK = ("<think>", "</think>")
CALL = ("<tool_call>", "</tool_call>")
ARGUMENT = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
KIMI_K3 = ("<|open|>", "<|close|>", "<|sep|>")
MUSE = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
ASKED = {"thinking": True, "enable_thinking": True}
INVOKE = ('<parameter name="', '">', "</parameter>\n")

# What writes the template of `hf`: the fields are those that vLLM's parser knows.
TEMPLATE = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
        "content": {},
    },
}

# The ids of its own tokenizer are written into this parser.
HUNYUAN = {
    "<think>\n": (14023, 771, 397),
    "\n</think>\n<answer>\n": (198, 524, 27963, 397, 27, 9399, 397),
    "\n</answer>": (198, 524, 9399, 29),
}

REASONING: dict[str, Thoughts] = {
    "deepseek_r1": Thoughts(),
    "deepseek_v3": Thoughts(options=ASKED),
    "deepseek_v4": Thoughts(options=ASKED),
    "deepseek_v41": Thoughts(options=ASKED),
    "ernie45": Thoughts(markers=(*THINK, "<response>", "</response>")),
    "gemma4": Thoughts(
        "<|channel>thought\n", "<channel|>", ("<|channel>", "<channel|>"), options=ASKED
    ),
    "glm45": Thoughts(),
    "glm47": Thoughts(),
    "granite": Thoughts(
        "Here is my thought process:", "Here is my response:", markers=(), begins=("answer",)
    ),
    "granite_thinking_parser": Thoughts(),
    "hf": Thoughts(markers=(*THINK, *CALL, "<|assistant|>")),
    "holo2": Thoughts(),
    "hunyuan_a13b": Thoughts(
        "<think>\n",
        "\n</think>\n<answer>\n",
        markers=(),
        begins=("answer",),
        answer=("", "\n</answer>"),
    ),
    "hy_v3": Thoughts(options={"reasoning_effort": "high"}),
    "hy_v4": Thoughts(),
    "inkling": Thoughts(
        "<|message_model|><|content_thinking|>",
        "<|end_message|>",
        INKLING,
        begins=("answer",),
        answer=("<|message_model|><|content_text|>", "<|end_message|>"),
    ),
    "k2_horizon": Thoughts("<ifm|think>", "</ifm|think>"),
    "kimi_k2": Thoughts(),
    "kimi_k3": Thoughts(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        KIMI_K3,
        answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    ),
    "ling3": Thoughts(),
    "mimo": Thoughts(),
    "minicpmv": Thoughts(options=ASKED),
    "minimax_m2": Thoughts(begins=("prompt",)),
    "minimax_m2_append_think": Thoughts(begins=("prompt",), shown=False),
    "minimax_m3": Thoughts("<mm:think>", "</mm:think>", begins=("answer",)),
    "mistral": Thoughts(
        "[THINK]", "[/THINK]", ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"), begins=("answer",)
    ),
    "muse_glimmer": Thoughts(
        " to=self<|message|>",
        "<|eom|>",
        MUSE,
        begins=("answer",),
        answer=("<|start|>assistant to=user<|message|>", "<|eot|>"),
    ),
    "nemotron_v3": Thoughts(),
    "olmo3": Thoughts(markers=("Ġ</", "</", "think", ">")),
    "plamo3": Thoughts(f"{PLAMO_BEGIN}think:plamo|>", f"{PLAMO_END}think:plamo|>", PLAMO),
    "poolside_v1": Thoughts(markers=(*THINK, "<assistant>"), options=ASKED),
    "qwen3": Thoughts(),
    "seed_oss": Thoughts("<seed:think>", "</seed:think>"),
    "step3": Thoughts(begins=("prompt",)),
    "step3p5": Thoughts(),
}

TOOLS: dict[str, Tools] = {
    "apertus": Tools(apertus, ("<|tools_prefix|>", "<|tools_suffix|>"), again=False),
    "deepseek_v3": Tools(
        deepseek("function<｜tool▁sep｜>NAME\n```json\n", "\n```"),
        DEEPSEEK,
        reasoning="deepseek_r1",
    ),
    "deepseek_v31": Tools(
        deepseek("NAME<｜tool▁sep｜>", "", ""), DEEPSEEK, reasoning="deepseek_v3"
    ),
    "deepseek_v32": Tools(dsml("function_calls"), dsml_markers("function_calls")),
    "deepseek_v4": Tools(dsml("tool_calls"), dsml_markers("tool_calls"), reasoning="deepseek_v4"),
    "deepseek_v41": Tools(dsml("calls", " "), dsml_markers("calls", " "), reasoning="deepseek_v41"),
    "dots": Tools(
        tagged(
            ("<dots_function_call>\n", "</dots_function_call>"),
            ('<invoke name="NAME">\n', "</invoke>\n"),
            INVOKE,
        ),
        ("<dots_function_call>", "</dots_function_call>"),
    ),
    "ernie45": Tools(
        each("<tool_call>\n", "\n</tool_call>\n"),
        (*CALL, *THINK, "<response>", "</response>"),
        reasoning="ernie45",
    ),
    "functiongemma": Tools(
        function_gemma, ("<start_function_call>", "<end_function_call>", "<escape>")
    ),
    "gemma4": Tools(gemma, ("<|tool_call>", "<tool_call|>", '<|"|>'), reasoning="gemma4"),
    "gigachat3": Tools(
        each("<|function_call|>", ""),
        ("<|function_call|>", "<|message_sep|>"),
        most=1,
        again=False,
        after=False,
    ),
    "glm45": Tools(glm, (*CALL, *ARGUMENT), reasoning="glm45"),
    "glm47": Tools(glm, (*CALL, *ARGUMENT), reasoning="glm47"),
    "granite": Tools(array("<|tool_call|> "), ("<|tool_call|>",), reasoning="granite"),
    "granite-20b-fc": Tools(
        each("<function_call> ", " "), ("<function_call>",), after=False, again=False
    ),
    "granite4": Tools(each("<tool_call>\n", "\n</tool_call>"), CALL),
    "hermes": Tools(each("<tool_call>\n", "\n</tool_call>", "\n"), CALL, reasoning="qwen3"),
    "hf": Tools(
        each("<tool_call>\n", "\n</tool_call>"), (*THINK, *CALL, "<|assistant|>"), reasoning="hf"
    ),
    "hunyuan_a13b": Tools(
        array("<tool_calls>", "</tool_calls>"), ("<tool_calls>", "</tool_calls>"), again=False
    ),
    "hy_v3": Tools(
        tagged(
            ("<tool_calls>\n", "</tool_calls>"),
            ("<tool_call>NAME<tool_sep>\n", "</tool_call>\n"),
            ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
        ("<tool_calls>", "</tool_calls>", "<tool_sep>", *CALL, *ARGUMENT),
        reasoning="hy_v3",
    ),
    "hy_v4": Tools(
        tagged(
            ("<tool_calls>", "</tool_calls>"),
            ("<tool_call>NAME", "</tool_call>"),
            ("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
        ),
        ("<tool_calls>", "</tool_calls>", *CALL, *ARGUMENT),
        again=False,
        reasoning="hy_v4",
    ),
    "inkling": Tools(
        inkling,
        INKLING,
        text=("<|message_model|><|content_text|>", "<|end_message|>"),
        reasoning="inkling",
    ),
    "internlm": Tools(
        lambda calls: (
            "<|action_start|><|plugin|>\n" + objects("parameters")(calls)[0] + "<|action_end|>\n"
        ),
        ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        most=1,
        again=False,
        after=False,
    ),
    "jamba": Tools(
        array("<tool_calls>", "</tool_calls>"), ("<tool_calls>", "</tool_calls>"), again=False
    ),
    "k2_horizon": Tools(
        tagged(
            ("<ifm|tool_calls>\n", "</ifm|tool_calls>"),
            ("<ifm|tool_call>NAME\n", "</ifm|tool_call>\n"),
            ("<ifm|arg_key>", "</ifm|arg_key>\n<ifm|arg_value>", "</ifm|arg_value>\n"),
        ),
        ("<ifm|tool_calls>", "</ifm|tool_calls>", "<ifm|tool_call>", "</ifm|tool_call>"),
        again=False,
        reasoning="k2_horizon",
    ),
    "kimi_k2": Tools(
        kimi_k2,
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        reasoning="kimi_k2",
    ),
    "kimi_k3": Tools(
        kimi_k3,
        KIMI_K3,
        text=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        after=False,
        again=False,
        reasoning="kimi_k3",
    ),
    "lfm2": Tools(
        python_list("<|tool_call_start|>", "<|tool_call_end|>"),
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        again=False,
    ),
    "ling3": Tools(glm, (*CALL, *ARGUMENT), reasoning="ling3"),
    "llama3_json": Tools(
        lambda calls: "<|python_tag|>" + "; ".join(objects("parameters")(calls)),
        ("<|python_tag|>",),
        before=False,
        after=False,
        again=False,
    ),
    "llama4_pythonic": Tools(python_list(), before=False, after=False, again=False),
    "longcat": Tools(
        each("<longcat_tool_call>\n", "\n</longcat_tool_call>", "\n"),
        ("<longcat_tool_call>", "</longcat_tool_call>"),
    ),
    "mimo": Tools(coder(line=""), CALL, reasoning="mimo"),
    "minicpm5": Tools(
        tagged(
            ("", ""), ('<function name="NAME">', "</function>"), ('<param name="', '">', "</param>")
        ),
        ("<function", "</function>", "<param", "</param>"),
    ),
    "minimax_m2": Tools(
        tagged(
            ("<minimax:tool_call>\n", "</minimax:tool_call>"),
            ('<invoke name="NAME">\n', "</invoke>\n"),
            INVOKE,
        ),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        reasoning="minimax_m2",
    ),
    "minimax_m3": Tools(minimax_m3, (MINIMAX,), reasoning="minimax_m3"),
    "mistral": Tools(
        mistral,
        ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
        after=False,
        again=False,
        reasoning="mistral",
    ),
    "muse_glimmer": Tools(
        muse,
        MUSE,
        text=("<|start|>assistant to=user<|message|>", "<|eom|>"),
        reasoning="muse_glimmer",
    ),
    "olmo3": Tools(
        lambda calls: f"<function_calls>{pythonic(chr(10), as_json)(calls)}</function_calls>",
        before=False,
        after=False,
        again=False,
    ),
    "phi4_mini_json": Tools(
        array("functools"), before=False, after=False, again=False, lists=False
    ),
    "plamo3": Tools(plamo, PLAMO, reasoning="plamo3"),
    "poolside_v1": Tools(glm, (*CALL, *ARGUMENT), reasoning="poolside_v1"),
    "pythonic": Tools(python_list(), before=False, after=False, again=False),
    "qwen3_coder": Tools(coder(), CALL, reasoning="qwen3"),
    "seed_oss": Tools(
        coder("<seed:tool_call>", "</seed:tool_call>"),
        ("<seed:tool_call>", "</seed:tool_call>"),
        reasoning="seed_oss",
    ),
    "step3": Tools(
        tagged(
            ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
            (
                '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">',
                "</steptml:invoke><｜tool_call_end｜>",
            ),
            ('<steptml:parameter name="', '">', "</steptml:parameter>"),
        ),
        (
            "<｜tool_calls_begin｜>",
            "<｜tool_calls_end｜>",
            "<｜tool_call_begin｜>",
            "<｜tool_call_end｜>",
            "<｜tool_sep｜>",
        ),
        again=False,
        reasoning="step3",
    ),
    "step3p5": Tools(coder(), CALL, reasoning="step3p5"),
    "xlam": Tools(array(""), before=False, after=False, again=False),
}
TOOLS["llama4_json"] = TOOLS["llama3_json"]
TOOLS["qwen3_json"] = TOOLS["hermes"]
TOOLS["qwen3_xml"] = TOOLS["qwen3_coder"]


def parser_table() -> str:
    """The table of `docs/agents.md`."""

    def those(which: int, streamed: bool, unstreamed: bool) -> str:
        found = [
            f"`{names[which]}`" + (f" ([report]({fault.report}))" if fault.report else "")
            for names, fault in sorted(FAULTS.items(), key=str)
            if not names[1 - which] and (fault.streamed, fault.unstreamed) == (streamed, unstreamed)
        ]
        return ", ".join(found) or "-"

    wrong = [sum(not names[1 - which] for names in FAULTS) for which in (0, 1)]
    right = [len(REASONING) - wrong[0], len(TOOLS) - wrong[1]]
    lines = [f"| right | {right[0]} others | {right[1]} others |"]
    for outcome, has in OUTCOMES.items():
        lines.append(f"| {outcome} | {those(0, *has)} | {those(1, *has)} |")
    for why in dict.fromkeys(IMPOSSIBLE.values()):
        names = [name for name, reason in IMPOSSIBLE.items() if reason == why]
        reasoning, tools = (
            ", ".join(f"`{name}`" for name in names if name != other)
            for other in ("openai", "openai_gptoss")
        )
        lines.append(f"| not tried: {why} | {reasoning} | {tools} |")
    later = ", ".join(f"`{name}`" for name in NOT_TRIED)
    lines.append(f"| not tried yet: new in vLLM 0.33 | {later} | {later} |")
    return "\n".join(["| | reasoning | tools |", "|---|---|---|", *lines])

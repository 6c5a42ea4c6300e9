"""Bad input: whatever is given is taken as it stands, or refused by its name.

Each test changes one field of something valid, or gives several at once; the ranges stand here
a second time. `VLLM_DLLM_FUZZ=50000` makes the long run of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.strategies import (
    ALWAYS,
    JSON,
    STEPS,
    WILD,
    Number,
    misspelt,
    same,
    share,
)
from vllm_dllm.families.diffusion_gemma.family import DiffusionGemma
from vllm_dllm.ranges import SettingsError
from vllm_dllm.settings.parsing import OPTIONS, parse_options, parse_settings
from vllm_dllm.settings.resolution import Served
from vllm_dllm.settings.server import DllmSettings
from vllm_dllm.settings.unknown_names import parameter_names

# Every setting of every algorithm: the algorithm, and what it takes.
MASKED = {
    "threshold": ("LowConfidence", Number()),
    "edit_threshold": ("JointThreshold", Number()),
    "max_post_edit_steps": ("JointThreshold", Number(most=STEPS, whole=True)),
    "penalty_lambda": ("JointThreshold", Number()),
    "steps": ("FixedSteps", Number(least=1, most=STEPS, whole=True)),
    "low": ("Hierarchical", Number()),
    "alpha": ("Credit", Number()),
    "gamma": ("Credit", Number()),
    "beta": ("Credit", Number(most=1)),
    "entropy_bound": ("EntropyBound", Number()),
    "sub_block_length": ("SubBlocks", Number(least=1, most=STEPS, whole=True)),
}
UNIFORM = {
    "entropy_bound": ("EntropyBound", Number(above=True)),
    "t_min": ("EntropyBound", Number(most=0.7)),  # below t_max, see BASE
    "t_max": ("EntropyBound", Number(least=0.1, above=True)),  # above t_min
    "stability_threshold": ("EntropyBound", Number(most=STEPS, whole=True)),
    "confidence_threshold": ("EntropyBound", Number(above=True)),
}
BASE = {"t_min": 0.1, "t_max": 0.7000000000000001}
# What a request may ask for, where that is less: four times the block length, which is 32 here.
OF_REQUEST = {"max_post_edit_steps": Number(most=4 * 32, whole=True)}
STEP = Number(least=1, most=STEPS, whole=True)
DEPTH = Number(least=16, most=1024, whole=True)
BOUND = Number(least=1, most=2**31 - 1, whole=True)
ONE, BLOCKS = (Number(least=1, most=most, whole=True) for most in (1, 64))
WORDS = {
    "window": ("symmetric", "reference"),
    "execution": ("fdfo", "sync"),
    "kernels": ("auto", "torch", "triton"),
}
ALGORITHMS = {
    "mask": {name for name, _ in MASKED.values()} | {"JointThreshold-S", "JointThreshold-Q"},
    "uniform": {"EntropyBound"},
}
OWN = {"mask": "LowConfidence", "uniform": "EntropyBound"}
TABLES = {"mask": MASKED, "uniform": UNIFORM}


def test_every_option_is_fuzzed() -> None:
    """Who adds an option adds it here."""
    assert set(MASKED) == parameter_names("mask")
    assert set(UNIFORM) == parameter_names("uniform")
    assert {f.name for f in fields(DllmSettings)} == own_options("mask").keys() | {"parameters"}
    assert OPTIONS.keys() == REQUEST.keys()


def refusal(call: Callable[[], object]) -> str | None:
    """The message of a refusal, or None; any other exception passes on and fails the test."""
    try:
        call()
    except SettingsError as error:
        assert len(str(error)) < 2000
        return str(error)
    return None


def judge(call: Callable[[], object], taken: bool, name: str, value: object) -> None:
    """What is taken is got as it was given, what is not is refused by its name."""
    said = refusal(call)
    assert (said is None) == taken, said
    if said is None:
        assert same(value, call())
    else:
        assert name in said


def chosen(choice: Any, name: str) -> object:
    return choice.max_steps if name == "max_denoising_steps" else choice.settings.values()[name]


def served(corruption: Any, section: object) -> Served:
    """What the server's start-up makes of its settings."""
    parsed = parse_settings({"dllm": section}, corruption, OWN[corruption])
    made = Served(corruption, OWN[corruption], parsed, max_steps=parsed.max_steps)
    made.choose()
    return made


# ---- one field, everything else right

KINDS = st.sampled_from(["mask", "uniform"])


@st.composite
def setting_and_value(draw: Any, wild: Any) -> tuple[str, str, object]:
    kind = draw(KINDS)
    name = draw(st.sampled_from(sorted(TABLES[kind])))
    number = TABLES[kind][name][1]
    return kind, name, draw(wild | number.edges())


def company(kind: str, name: str) -> dict[str, Any]:
    algorithm = TABLES[kind][name][0]
    return {"algorithm": algorithm} | ({} if kind == "mask" else BASE)


@settings(max_examples=share(0.15))
@given(setting_and_value(WILD))
def test_a_setting_of_the_server(case: tuple[str, str, Any]) -> None:
    kind, name, value = case
    section = company(kind, name) | {name: value}
    taken = TABLES[kind][name][1].takes(value)
    judge(lambda: chosen(served(kind, section).choose(), name), taken, name, value)


@settings(max_examples=share(0.15))
@given(setting_and_value(WILD))
def test_a_setting_of_a_request(case: tuple[str, str, Any]) -> None:
    kind, name, value = case
    asked = {f"diffusion_{n}": v for n, v in (company(kind, name) | {name: value}).items()}
    server, number = served(kind, {}), OF_REQUEST.get(name, TABLES[kind][name][1])
    judge(
        lambda: chosen(server.choose(parse_options(asked, server)), name),
        *(number.takes(value), name, value),
    )


def own_options(kind: str) -> dict[str, Callable[[Any], bool]]:
    """The options of the server that belong to no algorithm, and what they take."""

    def flag(value: Any) -> bool:
        return isinstance(value, bool)

    taken: dict[str, Callable[[Any], bool]] = {
        "algorithm": lambda v: v is None or (isinstance(v, str) and v in ALGORITHMS[kind]),
        "max_steps": lambda v: v is None or STEP.takes(v),
        "request_step_limit": lambda v: v is None or STEP.takes(v),
        "passes_per_step": lambda v: v is None or v == "auto" or BLOCKS.takes(v),
        "eos_early_stop": lambda v: v is None or flag(v),
        "skip_last_commit": flag,
        "fused_commit": lambda v: v is None or flag(v) or v in ("auto", "on", "off"),
        "constraint_depth": lambda v: v is None or DEPTH.takes(v),
        "constraint_tokens": BOUND.takes,
        # Mappings that are taken are in test_parsing.py.
        "threshold_under_load": lambda v: v is None,
        "blocks_open_at": lambda v: v is None,  # with one block
        "blocks": (BLOCKS if kind == "mask" else ONE).takes,
    }
    for name, words in WORDS.items():
        taken[name] = lambda v, words=words: isinstance(v, str) and v in words
    return taken


EDGES = BLOCKS.edges() | STEP.edges() | DEPTH.edges() | BOUND.edges()
NAMES = st.sampled_from(sorted(set().union(*ALGORITHMS.values(), *WORDS.values())))


@settings(max_examples=share(0.1))
@given(KINDS, st.sampled_from(sorted(own_options("mask"))), WILD | EDGES | NAMES)
@example("mask", "algorithm", "")
@example("mask", "algorithm", "nobody:Nothing")
def test_an_option_of_the_server(kind: str, name: str, value: Any) -> None:
    taken, got = own_options(kind)[name](value), value
    if name == "fused_commit" and taken and not isinstance(value, str):
        got = {True: "on", False: "off", None: "auto"}[value]
    judge(lambda: getattr(served(kind, {name: value}).settings, name), taken, name, got)


def whole_numbers(value: Any) -> bool:
    number = Number(most=2**31 - 1, whole=True)
    return (
        isinstance(value, (list, tuple)) and len(value) <= STEPS and all(map(number.takes, value))
    )


def bit(value: Any) -> bool:
    return value is None or (isinstance(value, int) and value in (0, 1))


REQUEST: dict[str, Callable[[Any], bool]] = {
    "algorithm": lambda v: v is None or (isinstance(v, str) and v in ALGORITHMS["uniform"]),
    "max_steps": lambda v: v is None or STEP.takes(v),
    # The server's canvases hold one block.
    "blocks": lambda v: v is None or ONE.takes(v),
    "canvas_length": lambda v: v is None or STEP.takes(v),
    "seed_canvas": lambda v: v is None or whole_numbers(v),
    # In the company of a seed canvas of three tokens.
    "pinned": lambda v: v is None or (whole_numbers(v) and len(v) <= 3),
    "read_only": bit,
    "constrained": bit,
    "stream_prefix": bit,
    "return_step_maps": bit,
    "trace": bit,
    "replay": bit,
    "constraint_depth": lambda v: v is None or DEPTH.takes(v),
    "constraint_tokens": lambda v: v is None or BOUND.takes(v),
}
LISTS = st.lists(st.integers(0, 9), max_size=5) | st.sampled_from(
    [[1] * STEPS, [1] * (STEPS + 1), [0, -1], [True], [0.0], ["0"], [[0]], (0, 1), [2**31]]
)


@settings(max_examples=share(0.1))
@given(st.sampled_from(sorted(REQUEST)), WILD | EDGES | LISTS | NAMES)
def test_an_option_of_a_request(name: str, value: Any) -> None:
    asked = {f"diffusion_{name}": value}
    if name == "pinned":
        asked["diffusion_seed_canvas"] = [1, 2, 3]
    server = served("uniform", {})

    def option() -> object:
        made = parse_options(asked, server)
        server.choose(made)
        return made.get(name)

    judge(option, REQUEST[name](value), f"diffusion_{name}", value)


# ---- a checkpoint's generation_config.json

STATED = {
    "max_denoising_steps": 8,
    "t_min": 0.1,
    "t_max": 0.7000000000000001,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
}
CHECKPOINT = {"max_denoising_steps": STEP} | {name: number for name, (_, number) in UNIFORM.items()}
OF_MASKED = {"max_denoising_steps": STEP, "threshold": Number()}


@settings(max_examples=share(0.1))
@given(st.sampled_from(sorted(CHECKPOINT)), WILD | STEP.edges() | UNIFORM["t_max"][1].edges())
def test_the_sampler_of_a_checkpoint(name: str, value: Any) -> None:
    changed = STATED | {name: value}
    if name == "entropy_bound":
        changed = STATED | {"sampler_config": {**STATED["sampler_config"], name: value}}

    def choose() -> object:
        stated = DiffusionGemma().checkpoint_settings(changed)
        return chosen(Served("uniform", OWN["uniform"], DllmSettings(), stated).choose(), name)

    judge(choose, CHECKPOINT[name].takes(value), name, value)


@settings(max_examples=share(0.03))
@given(st.sampled_from(sorted(STATED)), JSON, st.booleans())
def test_a_sampler_that_is_incomplete(name: str, value: Any, leave_out: bool) -> None:
    stated: dict[str, Any] = {k: v for k, v in STATED.items() if k != name}
    if not leave_out:
        stated["sampler_config"] = value
    said = refusal(lambda: DiffusionGemma().checkpoint_settings(stated))
    assert said is not None
    assert name in said or "sampler_config" in said


@settings(max_examples=share(0.05))
@given(st.sampled_from(sorted(OF_MASKED)), WILD | STEP.edges())
def test_what_a_masked_checkpoint_states(name: str, value: Any) -> None:
    def choose() -> object:
        stated = {name: value, "top_p": 0.5}
        return chosen(Served("mask", OWN["mask"], DllmSettings(), stated).choose(), name)

    judge(choose, OF_MASKED[name].takes(value), name, value)


@pytest.mark.parametrize("kind", TABLES)
def test_each_setting_is_given_each_oddity(kind: str) -> None:
    for name in TABLES[kind]:
        for value in ALWAYS:
            test_a_setting_of_the_server.hypothesis.inner_test((kind, name, value))
            test_a_setting_of_a_request.hypothesis.inner_test((kind, name, value))


def test_each_option_is_given_each_oddity() -> None:
    for value in ALWAYS:
        for name in own_options("mask"):
            for kind in TABLES:
                test_an_option_of_the_server.hypothesis.inner_test(kind, name, value)
        for names, test in (
            (REQUEST, test_an_option_of_a_request),
            (CHECKPOINT, test_the_sampler_of_a_checkpoint),
            (OF_MASKED, test_what_a_masked_checkpoint_states),
        ):
            for name in names:
                test.hypothesis.inner_test(name, value)


# ---- names


@settings(max_examples=share(0.05))
@given(KINDS, st.data())
def test_a_misspelt_name_is_named_with_its_neighbour(kind: str, data: Any) -> None:
    taken = [f.name for f in fields(DllmSettings)] + [*TABLES[kind]]
    name = data.draw(misspelt(sorted(TABLES[kind])).filter(lambda wrong: wrong not in taken))
    for given_name, call in (
        (name, lambda: served(kind, {name: 0.5})),
        (f"diffusion_{name}", lambda: parse_options({f"diffusion_{name}": 0.5}, served(kind, {}))),
    ):
        said = refusal(call)
        assert said is not None
        assert repr(given_name) in said
        assert any(hint in said for hint in ("did you mean", "known: ", "is not a setting of"))


@settings(max_examples=share(0.05))
@given(JSON.filter(lambda section: section is not None and not isinstance(section, dict)))
def test_a_section_that_is_none(section: Any) -> None:
    said = refusal(lambda: served("mask", section))
    assert said is not None
    assert "dllm" in said


@settings(max_examples=share(0.05))
@given(st.dictionaries(st.sampled_from([*MASKED, "max_steps", "window", "zzz"]) | st.text(), WILD))
def test_several_settings_at_once(section: dict[str, Any]) -> None:
    said = refusal(lambda: served("mask", section))
    if said is None:
        assert set(section) <= {"threshold", "max_steps", "window"}
    else:
        assert any(name in said or repr(name)[1:40] in said for name in section)

"""How our models are asked for decisions: typed questions that are answered with probabilities.

VLLM asks each question in a request of its own, by the strategy that it has under the model's
architecture, and reads the answer from the logprobs of the labels' tokens at the first position
after the prompt. A masked model has a mask there, and one pass over its first canvas reads it.

Where vLLM cannot make a strategy, its endpoint answers that the model does not support it. Ours
answer with the reason.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args

from vllm.config.model import LogprobsMode
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams

from vllm_dllm.families.registry import GEMMA
from vllm_dllm.settings.resolution import REQUEST_PREFIX

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = init_logger("vllm.dllm")

# Where releases of vLLM have their strategies, the newest place first.
PACKAGES = ("vllm.entrypoints.openai.decisions", "vllm.entrypoints.generate.structured_decisions")
PACKAGE = next(package for package in PACKAGES if find_spec(package))
strategies: Any = import_module(f"{PACKAGE}.strategies")
questions: Any = import_module(f"{PACKAGE}.question_types")

LOGPROBS = strategies.LOGPROBS_MODES  # the modes in which vLLM reads decisions
# One pass by a rule that changes no logits, whatever the server's own algorithm is.
ONE_PASS = {"algorithm": "LowConfidence", "max_steps": 1, "read_only": True}


def register(model_config: ModelConfig) -> None:
    """Make vLLM's server ask one of our models by our strategy."""
    if model_config.dllm.corruption == "mask":
        strategies.READ_STRATEGIES[model_config.architecture] = FirstPositionStrategy
    elif model_config.architecture == GEMMA:
        strategies.READ_STRATEGIES[GEMMA] = CanvasStrategy
    # VLLM would not make a strategy in other modes; ours say why they do not answer.
    strategies.LOGPROBS_MODES = frozenset(get_args(LogprobsMode))


class NamedRefusal(strategies.NextTokenStrategy):
    """Answers with the reason if the strategy, the next base class, cannot be made."""

    problem = ""

    def __init__(self, context: Any) -> None:
        """Make the strategy, or note why it cannot be made."""
        mode = context.engine_client.model_config.logprobs_mode
        try:
            self.prepare(context)
            if mode not in LOGPROBS:
                raise ValueError(
                    f"--logprobs-mode {mode} reports logits, and decisions are probabilities; "
                    f"serve with {' or '.join(sorted(LOGPROBS))}"
                )
        except Exception as error:  # a chat template may raise anything; all else is still served
            self.problem = f"this server answers no decisions: {error}"
            logger.warning("dllm: %s", self.problem)

    def prepare(self, context: Any) -> None:
        """Make the strategy; raises an error if it cannot be made."""
        super().__init__(context)

    async def read(self, *args: Any, **kwargs: Any) -> Any:
        """See vLLM's ``ReadStrategy``; status 501 if the strategy could not be made."""
        if self.problem:
            raise NotImplementedError(self.problem)
        return await super().read(*args, **kwargs)


class FirstPositionStrategy(NamedRefusal):
    """Masked models: the first position after the generation prompt, in one pass.

    A type of questions whose labels are not one distinct token each is refused for itself.
    """

    def prepare(self, context: Any) -> None:
        """See `NamedRefusal`."""
        strategies.ReadStrategy.__init__(self, context)
        tokenizer, prompt = self._tokenizer(), self._generation_prompt()
        self.tail = strategies.prompt_tail(tokenizer, prompt)
        self.label_ids: dict[str, int] = {}
        self.unlabelled: dict[str, str] = {}  # why a type of questions is refused, by its name
        for kind in questions.QUESTION_TYPES.values():
            try:
                _, ids = strategies.reply_label_ids(tokenizer, prompt, kind.label_set)
                self.label_ids |= zip(kind.label_set, ids, strict=True)
            except ValueError as error:
                self.unlabelled[kind.name] = str(error)

    def _label_groups(self, question: Any) -> list[list[int]]:
        if question.type.name in self.unlabelled:
            reason = self.unlabelled[question.type.name]
            raise questions.StructuredDecisionError(
                f"question {question.id!r} of type {question.type.name}: {reason}"
            )
        groups: list[list[int]] = super()._label_groups(question)
        return groups

    def _sampling_params(self, label_ids: list[int], prompt_ids: list[int]) -> SamplingParams:
        options = {REQUEST_PREFIX + name: value for name, value in ONE_PASS.items()}
        return SamplingParams(
            max_tokens=1, temperature=0.0, logprob_token_ids=label_ids, extra_args=options
        )


class CanvasStrategy(NamedRefusal, strategies.DiffusionGemmaCanvasStrategy):
    """DiffusionGemma: vLLM's own strategy, also about pictures, which some releases leave out."""

    def prepare(self, context: Any) -> None:
        """See `NamedRefusal`."""
        super().prepare(context)
        if context.engine_client.model_config.supports_multimodal_inputs:
            self.modalities = frozenset({"image"})

    def _read_input(self, engine_input: Any, prompt_ids: list[int], *width: int) -> Any:
        read = super()._read_input(engine_input, prompt_ids, *width)
        if read["type"] == engine_input["type"]:
            return read
        # The pictures come before what the strategy appends, so their places hold.
        return {**engine_input, "prompt_token_ids": read["prompt_token_ids"]}

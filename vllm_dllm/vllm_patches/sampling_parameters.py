"""vLLM's validation of sampling parameters: ours in its place, for our models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_dllm.vllm_patches.registration import is_ours
from vllm_dllm.vllm_patches.wrapping import wrap

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# Whether this process takes requests for one of our models. Sampling parameters are constructed
# without a model at hand, so a process has to remember whom they are for.
_serves_our_model = False


def note_that_our_model_is_served() -> None:
    """From now on this process takes requests for one of our models."""
    global _serves_our_model
    _serves_our_model = True


def apply() -> None:
    """Validate the requests of our models by the rules of `frontend.admission`.

    vLLM refuses every temperature but 1.0 for a diffusion model. It refuses several samples of a
    greedy request, too, and does so before the model is known. For our models the first rule is
    wrong; the second is checked for all others as soon as their model is known.
    """
    from vllm.sampling_params import SamplingParams

    from vllm_dllm.frontend.admission import validate_sampling_params
    from vllm_dllm.settings.resolved import GREEDY_EPSILON

    refuse_greedy_samples = SamplingParams._verify_greedy_sampling

    def validate_by_our_rules(original: Callable[..., None]) -> Callable[..., None]:
        def validate_diffusion(self: Any, model_config: ModelConfig) -> None:
            if is_ours(model_config):
                validate_sampling_params(self, model_config.dllm)
                return
            if self.n > 1 and self.temperature < GREEDY_EPSILON:
                refuse_greedy_samples(self)
            original(self, model_config)

        return validate_diffusion

    wrap(SamplingParams, "_validate_diffusion", validate_by_our_rules)
    wrap(SamplingParams, "_verify_greedy_sampling", _skip_for_our_models)


def _skip_for_our_models(original: Callable[..., None]) -> Callable[..., None]:
    def verify_greedy_sampling(self: Any) -> None:
        # The model is not known here; `_validate_diffusion` repeats this check for a model that
        # is not ours.
        if not _serves_our_model:
            original(self)

    return verify_greedy_sampling

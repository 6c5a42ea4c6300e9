"""A request's resolved settings, as the front end sends them to the workers.

The process that receives the request parses its options once. From then on the result is one of the
request's extra arguments, next to those that vLLM itself reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_dllm.decoding import Corruption, get_algorithm
from vllm_dllm.settings.request import Asked, RequestOptions
from vllm_dllm.settings.resolution import Choice

# Keys of a request's extra arguments. Users cannot set them, because they are not request options.
RESOLVED = "diffusion_resolved"
AUTOMATON = "diffusion_automaton"
# vLLM treats temperatures below this as greedy.
GREEDY_EPSILON = 1e-5


@dataclass(frozen=True)
class ResolvedRequest:
    """The settings with which a request is decoded.

    Messages between vLLM's processes carry the fields, so all of them are plain values.

    Attributes:
        algorithm: the algorithm's registered name.
        settings: the algorithm's settings, by name.
        max_steps: cap on the denoise steps of a canvas.
        schedule_steps: number of steps that a temperature schedule is spread over.
        seed_canvas: token ids that the first canvas starts from, or None.
        pinned: positions of the seed canvas that keep their token.
        read_only: a single canvas is the whole answer and leaves without a commit.
        constrained: only the request's ``logprob_token_ids`` may be chosen.
        stream_prefix: output the decided beginning of an unfinished canvas.
        constraint_depth: as in `DllmSettings`.
        constraint_tokens: as in `DllmSettings`; None if the request sets ``max_tokens``.
        asked: what the request wants to know of its steps, an `Asked`.
    """

    algorithm: str
    settings: Mapping[str, float]
    max_steps: int
    schedule_steps: int
    seed_canvas: Sequence[int] | None = None
    pinned: Sequence[int] = ()
    read_only: bool = False
    constrained: bool = False
    stream_prefix: bool = False
    constraint_depth: int | None = None
    constraint_tokens: int | None = None
    asked: int = Asked.NOTHING

    @classmethod
    def of(cls, choice: Choice, options: RequestOptions) -> ResolvedRequest:
        """Combine the resolved choice for a request with the request's other options."""
        return cls(
            algorithm=choice.algorithm.name,
            settings=choice.settings.values(),
            max_steps=choice.max_steps,
            schedule_steps=choice.schedule_steps,
            seed_canvas=options.seed_canvas,
            pinned=options.pinned or (),
            read_only=bool(options.read_only),
            constrained=bool(options.constrained),
            stream_prefix=bool(options.stream_prefix),
            asked=int(
                (Asked.STEP_MAPS if options.return_step_maps else 0)
                | (Asked.TRACE if options.trace else 0)
                | (Asked.REPLAY if options.replay else 0)
            ),
        )

    @classmethod
    def given(cls, extra_args: Mapping[str, Any] | None) -> ResolvedRequest | None:
        """Read it from extra arguments in the process that added it; None if it is missing.

        A value from a user never has this type, over HTTP or offline.
        """
        value = (extra_args or {}).get(RESOLVED)
        return value if isinstance(value, cls) else None

    @classmethod
    def received(cls, extra_args: Mapping[str, Any]) -> ResolvedRequest:
        """Read it from extra arguments in a worker, where a message may have made it a mapping.

        Raises:
            KeyError: this package did not admit the request.
        """
        value = extra_args[RESOLVED]
        return value if isinstance(value, cls) else cls(**value)

    def choice(self, corruption: Corruption) -> Choice:
        """The algorithm and its settings as objects, for a worker; nothing is parsed."""
        algorithm, _ = get_algorithm(self.algorithm, corruption)
        settings = algorithm.config(**self.settings)
        return Choice(algorithm, settings, self.max_steps, self.schedule_steps, {})

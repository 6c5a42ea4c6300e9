"""What a request gets, as it travels from the process that takes it to the workers.

Options are parsed once, where the request is taken. What they come to stands among the request's
extra arguments from then on, beside what vLLM itself reads there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_dllm.decoding import Corruption, get_algorithm
from vllm_dllm.settings.request import RequestOptions
from vllm_dllm.settings.resolution import Choice

# Names among a request's extra arguments. Users cannot give them: they are no request options.
RESOLVED = "diffusion_resolved"
AUTOMATON = "diffusion_automaton"
# Below this vLLM takes a temperature for greedy.
GREEDY_EPSILON = 1e-5


@dataclass(frozen=True)
class ResolvedRequest:
    """A request's options over the server's settings over the checkpoint's.

    Messages between vLLM's processes carry the fields, all of them plain values.

    Attributes:
        algorithm: its registered name.
        settings: its settings.
        max_steps: cap on the denoise steps of a canvas.
        schedule_steps: steps that a temperature schedule is spread over.
        seed_canvas: token ids that the first canvas starts from, or None.
        pinned: positions of the seed canvas that keep their token.
        read_only: one canvas is the whole answer; it leaves without a commit.
        constrained: only the request's ``logprob_token_ids`` may be chosen.
        stream_prefix: put out the decided beginning of an unfinished canvas.
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

    @classmethod
    def of(cls, choice: Choice, options: RequestOptions) -> ResolvedRequest:
        """From what was chosen for a request, and its own options."""
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
        )

    @classmethod
    def given(cls, extra_args: Mapping[str, Any] | None) -> ResolvedRequest | None:
        """What stands among extra arguments in the process that has put it there, or None.

        A user's value is never of this type, over HTTP or offline.
        """
        found = (extra_args or {}).get(RESOLVED)
        return found if isinstance(found, cls) else None

    @classmethod
    def received(cls, extra_args: Mapping[str, Any]) -> ResolvedRequest:
        """What a worker received; a message between processes has made a mapping of it.

        Raises:
            KeyError: the request was not admitted by this package.
        """
        found = extra_args[RESOLVED]
        return found if isinstance(found, cls) else cls(**found)

    def choice(self, corruption: Corruption) -> Choice:
        """The algorithm itself and its settings, for a worker; nothing is parsed."""
        algorithm, _ = get_algorithm(self.algorithm, corruption)
        settings = algorithm.config(**self.settings)
        return Choice(algorithm, settings, self.max_steps, self.schedule_steps, {})

"""The trace of an answer: the record of its steps that a user gets."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

VERSION = 1
# The contract for replaying rollouts between a trainer and an engine comes from DARE (yjyddq/DARE,
# cj_trajectory.py), whose fields `Replay` has.
REPLAY_CONTRACT_VERSION = 1


@dataclass
class Event:
    """A position was decided, or its token was withdrawn.

    Attributes:
        step: the denoise step of the block, from 1.
        position: the position in the block, from 0.
        token: the token's id; None if the position is open again.
        probability: the confidence that the decoding algorithm had in the token.
        logprob: the value that the request would get as the token's logprob.
    """

    step: int
    position: int
    token: int | None
    probability: float | None
    logprob: float | None


@dataclass
class Pass:
    """A forward pass over a block.

    Attributes:
        kind: "denoise", "commit" or "wait" (for other canvases, or for a constraint).
        step: number of denoise steps of the block so far, including this pass.
        engine_step: the engine's step; it is the same for requests that share a batch.
        milliseconds: when the result arrived, since the engine's first traced request.
        threshold: the threshold of the step, if it follows the load.
    """

    kind: str
    step: int
    engine_step: int
    milliseconds: int
    threshold: float | None = None


@dataclass
class Block:
    """A canvas from its first step on.

    Attributes:
        start: its first position, counted from the beginning of the prompt.
        width: number of its positions.
        given: positions that the request gave: its prompt's last tokens, and pinned ones.
        passes: the passes, in order.
        events: the events, in order.
        tokens: ids on the canvas after the last pass; undecided positions hold what the model
            reads there.
    """

    start: int
    width: int
    given: list[int] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The position after its last one, counted like `start`."""
        return self.start + self.width

    def deciding(self) -> dict[int, Event]:
        """The last event of each position that is decided, by position."""
        last = {event.position: event for event in self.events}
        return {position: event for position, event in last.items() if event.token is not None}


@dataclass
class Trace:
    """The steps of an answer. Lists with a value for each output token have the output's length.

    Attributes:
        prompt_length: number of prompt tokens, at which the output begins.
        step_maps: for each token the denoise step of its block that decided it, from 1; 0 for a
            pinned token.
        block_indices: for each token the index of its block in `blocks`.
        probabilities: for each token the `Event.probability` of its decision.
        logprobs: for each token the `Event.logprob` of its decision.
        blocks: all blocks that tokens have left from.
    """

    prompt_length: int
    step_maps: list[int] = field(default_factory=list)
    block_indices: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The trace as plain values."""
        return {"version": VERSION, **asdict(self)}


@dataclass(frozen=True)
class Replay:
    """The data to replay a rollout to the end of its last block, which extends past the answer.

    Attributes:
        dllm_replay_token_ids: the answer and the rest of the last canvas.
        dllm_replay_step_maps: the deciding step of each, from 1.
        dllm_stop_length: how many of them are the answer.
        dllm_replay_contract_version: see `REPLAY_CONTRACT_VERSION`.
    """

    dllm_replay_token_ids: list[int]
    dllm_replay_step_maps: list[int]
    dllm_stop_length: int
    dllm_replay_contract_version: int = REPLAY_CONTRACT_VERSION

    @classmethod
    def of(cls, trace: Trace, token_ids: list[int]) -> Replay:
        """Make the replay of a finished answer.

        Raises:
            ValueError: positions after the answer were never decided.
        """
        ids, steps = list(token_ids), list(trace.step_maps)
        if trace.blocks:
            block = trace.blocks[-1]
            behind = trace.prompt_length + len(ids) - block.start
            deciding = block.deciding()
            for position in range(behind, block.width):
                if position not in deciding:
                    raise ValueError(f"position {position} of the last block was never decided")
                token = deciding[position].token
                assert token is not None
                ids.append(token)
                steps.append(deciding[position].step)
        return cls(ids, steps, len(token_ids))

from dataclasses import dataclass

from vllm_dllm.decoding import Algorithm, confidence, reveal
from vllm_dllm.ranges import AlgorithmConfig, setting


@dataclass(frozen=True)
class HalfAtATimeConfig(AlgorithmConfig):
    share: float = setting(0.5, "share of the open positions to decide", above=True, most=1.0)


class HalfAtATime(Algorithm):
    """Decide the surest `share` of the open positions at every step, rounded up."""

    name = "HalfAtATime"
    config = HalfAtATimeConfig

    def step(self, canvas, context):
        sureness = confidence(canvas, context.statistics.probability)  # [slots, L]
        rank = sureness.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        count = (canvas.masked.sum(1) * context.parameters["share"]).ceil()  # [slots]
        return reveal(canvas, context, rank < count[:, None])

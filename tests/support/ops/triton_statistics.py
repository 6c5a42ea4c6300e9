"""What the tests of the row-statistics kernels share: their modules, inputs, and the checks.

The kernels are interpreted where there is no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tests.support.ops.interpreter import interpreted
from vllm_dllm.ops.noise import keyed
from vllm_dllm.ops.noise.keyed import row_keys
from vllm_dllm.ops.statistics.groups import GROUP, group_starts, grouped, take_group
from vllm_dllm.ops.statistics.head import Head
from vllm_dllm.ops.statistics.rows import SampledStatistics
from vllm_dllm.ops.statistics.sampled import draw, group_noise

rows_triton = interpreted("vllm_dllm.ops.statistics.rows_triton")
soft_embedding = interpreted("vllm_dllm.ops.statistics.soft_embedding_triton")
NATIVE = torch.cuda.is_available()
DEVICE = torch.device("cuda" if NATIVE else "cpu")
# Scores are sums of a few float32 numbers below 100; what is closer than this may swap.
CLOSE = 1e-4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Many rows a program, because the interpreter pays for programs; natively the defaults.
ROW_TILE = replace(rows_triton.IN_MEMORY, rows=32, ids=256, merged_rows=64)
TILE = rows_triton.Tile(
    rows=32, ids=128, depth=32, warps=4, stages=2, resident=1, merged_rows=1 if NATIVE else 64
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def draws(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Temperatures, every fifth 0, and keys."""
    temperature = torch.rand(rows, generator=torch.Generator().manual_seed(rows)) * 1.2 + 0.1
    temperature[::5] = 0
    return temperature.to(DEVICE), row_keys(torch.arange(rows, device=DEVICE), 7)


def decided(scaled: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Rows whose draw is not within rounding: both stages' winners are ahead by `CLOSE`."""
    groups = grouped(scaled)
    score = groups.logsumexp(-1) + group_noise(keys, group_starts(0, scaled.shape[1], keys.device))
    chosen = score.argmax(-1)
    ids = chosen[:, None] * GROUP + torch.arange(GROUP, device=keys.device)
    inside = take_group(groups, chosen) + keyed.gumbel(keys, ids)
    sure = torch.ones_like(keys, dtype=torch.bool)
    for values in (score, inside):
        if values.shape[1] > 1:
            best = values.topk(2, -1).values
            sure &= best[:, 0] - best[:, 1] > CLOSE
    return sure


def check(
    name: str, got: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor, slack: float = 4e-6
) -> None:
    """No further from float64 than three times what eager float32 is, and a few last bits."""
    budget = 3 * float((eager.double() - exact).abs().max()) + slack
    error = float((got.double() - exact).abs().max())
    assert error <= budget, (name, error, budget)


def check_all(
    got: SampledStatistics,
    exact: torch.Tensor,
    eager: torch.Tensor,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    cap: float | None = None,
) -> None:
    """Statistics against those of logits in float64 and of logits in eager float32."""
    greedy = temperature == 0
    divisor = torch.where(greedy, 1.0, temperature)[:, None]
    # A capped logit is off by as much as `rows_triton.capped` states, and so are two.
    slack = 4e-6 + 4e-7 * (cap or 0.0) / float(divisor.min())
    exact, eager = exact / divisor.double(), eager / divisor
    best = exact.max(-1).values
    short = best - exact.gather(1, got.token[:, None])[:, 0]
    assert (short <= 2e-6 * (1 + best.abs())).all()
    clear = (exact >= best[:, None] - CLOSE).sum(-1) == 1
    assert torch.equal(got.token[clear], exact.argmax(-1)[clear])
    sure = decided(eager, keys) & ~greedy
    assert (sure | greedy).float().mean() > 0.9
    assert torch.equal(got.sample[sure], draw(eager, keys)[sure])
    assert torch.equal(got.sample[greedy], got.token[greedy])
    certain = torch.nn.functional.one_hot(got.token, exact.shape[1])
    p, rough = (torch.where(greedy[:, None], certain.to(s), s.softmax(-1)) for s in (exact, eager))
    for field, at in (("probability", got.token), ("sample_probability", got.sample)):
        chosen = (t.gather(1, at[:, None])[:, 0] for t in (p, rough))
        check(field, getattr(got, field), *chosen, slack)
    check("entropy", got.entropy, *(-torch.xlogy(t, t).sum(-1) for t in (p, rough)), slack)


def unread(*_: object) -> torch.Tensor:
    raise AssertionError("the reference ran")


@dataclass(frozen=True)
class Product:
    """A head and hidden states, with the logits that they have in float64 and eager float32."""

    hidden: torch.Tensor
    head: Head
    exact: torch.Tensor
    eager: torch.Tensor

    @classmethod
    def make(
        cls,
        sizes: tuple[int, int, int],
        dtype: torch.dtype = torch.float32,
        cap: float | None = None,
    ) -> Product:
        rows, vocabulary, width = sizes
        hidden = random(rows, width, seed=1)
        weight = random(vocabulary, width, seed=2) * 5 / width**0.5
        if dtype != torch.float32:
            # Sums that are exact in any order: else they might be rounded to `dtype` differently.
            hidden, weight = (x.mul(32).round().div(32) for x in (hidden, weight))
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        embedding = random(vocabulary, 40, seed=3).to(dtype)
        exact, eager = hidden.double() @ weight.double().T, hidden.float() @ weight.float().T
        if dtype != torch.float32:
            exact, eager = exact.to(dtype).double(), eager.to(dtype).float()
        if cap is not None:
            exact, eager = (x.div(cap).tanh() * cap for x in (exact, eager))
        return cls(hidden, Head(unread, vocabulary, embedding, None, weight, cap), exact, eager)

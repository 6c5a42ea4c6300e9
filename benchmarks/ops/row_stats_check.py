"""The check of the row-statistics kernels against float64, on some rows of a shape."""

from __future__ import annotations

import torch

from benchmarks.ops.row_stats_batch import Batch, capped
from vllm_dllm.ops.statistics.sampled import draw

# Rows of a shape that are checked.
CHECKED = 24


class WrongKernelError(Exception):
    """A kernel's answer is too far from float64."""


def check(batch: Batch) -> dict[str, float]:
    """Errors on some rows, as multiples of their budgets.

    A budget is three times the error of eager float32. For the soft embedding, eager has
    probabilities in the embedding's dtype.

    Raises:
        WrongKernelError: an error is more than 1.
    """
    shape, device = batch.shape, batch.hidden.device
    statistics, soft = batch.ours()
    rows = torch.linspace(0, shape.rows - 1, min(CHECKED, shape.rows), device=device).long()
    statistics = statistics.take(rows)
    weight, hidden = batch.head.weight, batch.hidden[rows]
    exact = capped(hidden.double() @ weight.double().T, shape.cap)
    eager = capped(hidden.float() @ weight.float().T, shape.cap)
    greedy = batch.temperature[rows] == 0 if shape.soft else torch.zeros_like(rows).bool()
    errors: dict[str, float] = {}

    def compare(name: str, value: torch.Tensor, true: torch.Tensor, rough: torch.Tensor) -> None:
        budget = 3 * (rough.double() - true).abs().max() + 2e-5
        errors[name] = float((value.double() - true).abs().max() / budget)

    if shape.soft:
        divisor = torch.where(greedy, 1.0, batch.temperature[rows])[:, None]
        exact, eager = exact / divisor.double(), eager / divisor
        drawn = draw(eager, batch.keys[rows])
        different = (drawn != statistics.sample) & ~greedy
        # Two scores within rounding are rare, two such rows of a few dozens all but impossible.
        errors["sample"] = float(different.sum()) / 2
    p, rough = exact.softmax(-1), eager.softmax(-1)
    allowed = exact.clone()
    if not shape.soft:
        allowed[:, 0] = -torch.inf
    best = allowed.max(-1).values
    errors["token"] = float(
        (best - allowed.gather(1, statistics.token[:, None])[:, 0]).max() / 1e-4
    )
    sure = ~greedy
    top = [t.gather(1, statistics.token[:, None])[sure, 0] for t in (p, rough)]
    compare("probability", statistics.probability[sure], *top)
    compare(
        "entropy", statistics.entropy[sure], *(-torch.xlogy(t, t).sum(-1)[sure] for t in (p, rough))
    )
    compare("log_sum_exp", statistics.log_sum_exp, exact.logsumexp(-1), eager.logsumexp(-1))
    if soft is not None:
        table = batch.head.embedding
        rounded = rough.to(table.dtype).float() @ table.float()
        certain = greedy[:, None]
        compare(
            "soft",
            soft[rows],
            torch.where(certain, table[statistics.token].double(), p @ table.double()),
            torch.where(certain, table[statistics.token].float(), rounded),
        )
    wrong = {name: error for name, error in errors.items() if not error <= 1}
    if wrong:
        raise WrongKernelError(f"{shape.name}: {wrong}")
    return errors

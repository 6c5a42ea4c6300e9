"""RMSNorm by vLLM's CPU kernels: what vLLM's own operators compute."""

from __future__ import annotations

import pytest
import torch
from vllm_cpu_v2 import norms

EPSILON = 1e-6


@pytest.fixture(autouse=True)
def kernels() -> None:
    """A worker has loaded them."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(1, 128), (33, 128), (5, 4, 32), (7, 2816)])
def test_against_float64(shape: tuple[int, ...], weighted: bool) -> None:
    """Within twice the error of vLLM's own float32 operators, or a unit of the last place."""
    from vllm import ir

    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(shape, generator=generator) for _ in range(2))
    weight = torch.randn(shape[-1], generator=generator) if weighted else None

    def exact(value: torch.Tensor) -> torch.Tensor:
        scale = 1.0 if weight is None else weight.double()
        return value / (value.square().mean(-1, keepdim=True) + EPSILON).sqrt() * scale

    def budget(theirs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        unit = wanted.abs().amax() * torch.finfo(torch.float32).eps
        return torch.maximum(2 * (theirs.double() - wanted).abs().amax(), unit)

    native = ir.ops.rms_norm.impls["native"].impl_fn(x, weight, EPSILON)
    wanted = exact(x.double())
    assert (norms._norm(x, weight, EPSILON) - wanted).abs().amax() <= budget(native, wanted)

    native_add = ir.ops.fused_add_rms_norm.impls["native"].impl_fn
    theirs, their_sum = native_add(x.clone(), residual.clone(), weight, EPSILON)
    ours, our_sum = norms._add_norm(x.clone(), residual.clone(), weight, EPSILON)
    wanted = exact(x.double() + residual.double())
    assert torch.equal(our_sum, their_sum)
    assert (ours - wanted).abs().amax() <= budget(theirs, wanted)


def test_strided_views_of_a_projection() -> None:
    """Queries and keys are slices: their rows do not lie one behind the other."""
    whole = torch.randn(9, 8, 32, generator=torch.Generator().manual_seed(1))
    weight = torch.ones(32)
    for view in (whole[:, 2:5], whole.transpose(0, 1), whole[:, :, :16]):
        got = norms._norm(view, weight[: view.shape[-1]], EPSILON)
        assert torch.equal(got, norms._norm(view.contiguous(), weight[: view.shape[-1]], EPSILON))


def test_other_precisions_are_left_to_vllm() -> None:
    x, half = torch.ones(2, 32), torch.ones(2, 32, dtype=torch.bfloat16)
    assert norms._norm_supports(x, x[0], EPSILON)
    assert not norms._norm_supports(half, half[0], EPSILON)
    assert not norms._norm_supports(x, half[0], EPSILON)
    assert not norms._norm_supports(x, x[0], EPSILON, 16)
    assert not norms._add_norm_supports(x.T, x.T, None, EPSILON)

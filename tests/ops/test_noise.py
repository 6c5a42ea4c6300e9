"""Counter-based noise: uniform, independent across rows and ids, the same in any tile."""

from __future__ import annotations

import torch
from canvas_grammar.decoding import cpu_paths
from canvas_grammar.decoding.best_path import FIRST_RANGE_INDEX

from tests.support.ops.chi_square import Z, follows
from vllm_dllm.ops.noise.keyed import (
    Stream,
    gumbel,
    row_keys,
    uniform,
    uniform_bits,
    uniform_tokens,
)
from vllm_dllm.ops.statistics.sampled import FIRST_GROUP_INDEX


def even(count: int) -> torch.Tensor:
    return torch.full((count,), 1 / count)


def test_every_bit_is_fair() -> None:
    bits = uniform_bits(row_keys(torch.arange(64)), torch.arange(4096))
    for bit in range(32):
        share = ((bits >> bit) & 1).double().mean()
        assert abs(share - 0.5) < 0.5 * Z * 2 / (64 * 4096) ** 0.5


def test_neighbours_are_independent() -> None:
    """Neighbouring seeds, steps, positions and ids, as they occur, fall into a fair 8 x 8 grid."""

    def drawn(seed: int = 7, position: int = 0, step: int = 3, first: int = 0) -> torch.Tensor:
        keys = row_keys(torch.tensor(seed), torch.arange(64) + position, step)
        return uniform(keys, torch.arange(2048) + first)

    for beside in (drawn(first=1), drawn(position=1), drawn(step=4), drawn(seed=8)):
        assert follows((drawn() * 8).long() * 8 + (beside * 8).long(), even(64))


def test_tiles_and_batches_do_not_matter() -> None:
    keys = row_keys(torch.arange(20), torch.arange(20), Stream.CANDIDATE)
    whole = gumbel(keys, torch.arange(1000))
    tiles = [gumbel(keys[5:6], torch.arange(a, a + 100)) for a in range(0, 1000, 100)]
    assert torch.equal(torch.cat(tiles, 1)[0], whole[5])


def test_uniform_stays_inside_and_is_fine_grained() -> None:
    """24 bits would cut the Gumbel tail; the smallest of 4 million draws must be below 2^-20."""
    values = uniform(row_keys(torch.arange(1024)), torch.arange(4096))
    assert 0 < values.min() < 2**-20
    assert values.max() < 1
    assert len(values[values < 2**-12].unique()) > 900


def test_gumbel_draws_from_the_softmax() -> None:
    logits = torch.linspace(-4, 2, 50)
    noise = gumbel(row_keys(torch.arange(100_000), 1), torch.arange(50))
    assert follows((logits + noise).argmax(-1), logits.softmax(-1))


def test_uniform_tokens() -> None:
    tokens = uniform_tokens(row_keys(torch.arange(3000), Stream.CANVAS), torch.arange(32), 271)
    assert tokens.min() == 0
    assert tokens.max() == 270
    assert follows(tokens, even(271))


def test_streams_differ() -> None:
    keys = [row_keys(torch.tensor([3]), stream) for stream in Stream]
    assert len({int(key) for key in keys}) == len(Stream)


def test_paths_and_free_tokens_have_one_function_at_different_indices() -> None:
    """So a token that was drawn without a constraint is independent of the path."""
    keys, index = row_keys(torch.arange(8), 3), torch.tensor([0, 7, FIRST_RANGE_INDEX, 2**31 - 1])
    got = [[float(cpu_paths.gumbel(key, n)) for n in index.tolist()] for key in keys.tolist()]
    torch.testing.assert_close(torch.tensor(got), gumbel(keys, index), rtol=1e-6, atol=1e-6)
    # A group stands at the index of its first id, and ids are fewer than that.
    assert FIRST_RANGE_INDEX - FIRST_GROUP_INDEX >= 1 << 28

"""The training scripts: the loss hides nothing from the model, and a short run serves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.tiny import train_diffusion_gemma, train_llada2
from examples.tiny.llada2 import LLaDA2, Shape, load, save
from examples.tiny.muon import orthogonal
from examples.tiny.tokens import gemma_processor, llada2_tokenizer
from examples.tiny.training import Encoder, training_examples
from tests.support.reference_llada2 import Reference

ROOT = Path(__file__).resolve().parents[2]


def test_llada2_batches() -> None:
    """The current block is the last one, and only what is not prompt may be masked or edited."""
    tokenizer = llada2_tokenizer()
    mask = tokenizer.mask_token_id
    stream = train_llada2.batches(training_examples(Encoder(tokenizer), 0), 32, 0)
    generator = torch.Generator().manual_seed(0)
    edited = 0
    for _, batch in zip(range(8), stream, strict=False):
        assert batch.tokens.shape[1] % 32 == 0
        clean = batch.tokens[:, -32:]
        seen, weight = train_llada2.corrupt(batch, mask, generator)
        assert torch.equal(seen[~batch.free], clean[~batch.free])
        assert (weight[~batch.free] == 0).all()
        hidden = (seen == mask) | (seen != clean)
        assert (weight[hidden] > 0).all()
        edited += int(((seen != clean) & (seen != mask)).sum())
    assert edited > 20


def test_gemma_batches() -> None:
    """Left padding only, and the canvas continues exactly where the context ends."""
    tokenizer = gemma_processor().tokenizer
    encoder = Encoder(tokenizer)
    stream = train_diffusion_gemma.batches(training_examples(encoder, 0), 600, 0, 0)
    for _, batch in zip(range(8), stream, strict=False):
        for context, present, canvas in zip(
            batch.context, batch.present, batch.canvas, strict=True
        ):
            text = tokenizer.decode(torch.cat([context[present], canvas[canvas != 0]]))
            question, answer = text.split("<turn|><|turn>model")
            # A canvas that does not end the answer is full.
            assert answer.endswith("<eos>") or (canvas != 0).all()
            assert question.startswith("<bos><|turn>user")
            assert (context[~present] == 0).all()
            assert (present.int().diff() >= 0).all()


def test_muon_steps_are_orthogonal() -> None:
    """Singular values end near 1, for wide and tall matrices and for stacks of them."""
    g = torch.Generator().manual_seed(0)
    for shape in ((1, 24, 24), (3, 16, 40), (2, 40, 16)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape, generator=g)))
        assert values.min() > 0.5
        assert values.max() < 1.3


def test_llada2_module_is_the_reference(tmp_path: Path) -> None:
    """The module that trains computes what the tests' own reference computes from its file."""
    torch.manual_seed(0)
    model = LLaDA2(Shape(num_hidden_layers=3))
    for layer in model.model.layers[1:]:
        layer.mlp.gate.expert_bias.normal_(std=0.3)
    tokenizer = llada2_tokenizer()
    save(model, tokenizer, tmp_path)
    reference = Reference.load(tmp_path, 32, tokenizer.mask_token_id)
    ids = torch.randint(0, 272, (50,)).tolist()
    with torch.no_grad():
        got = load(tmp_path)(torch.tensor([ids]))[0]
    torch.testing.assert_close(got, reference.logits(ids), atol=1e-4, rtol=0)


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.parametrize("family", ["llada2", "diffusion_gemma"])
def test_twenty_steps_make_a_checkpoint_that_serves(family: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"examples.tiny.train_{family}", str(tmp_path)]
    options = ["--steps", "20", "--held-out", "1", "--threads", "1"]
    done = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "of 1 held-out problems" in done.stdout
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["steps"] == 20
    assert set(record["exact_match"]) >= {"add", "copy"}
    served_in_small(tmp_path)


def served_in_small(checkpoint: Path) -> None:
    """A checkpoint answers through the engine."""
    from tests.support.engine import engine

    with engine(checkpoint, 32, limit_mm_per_prompt={"image": 0, "video": 0}) as running:
        params = running.llm.get_default_sampling_params()
        params.max_tokens = 20
        message = [{"role": "user", "content": "3 + 4"}]
        (output,) = running.llm.chat(message, params, use_tqdm=False)
        assert 1 <= len(output.outputs[0].token_ids) <= 20

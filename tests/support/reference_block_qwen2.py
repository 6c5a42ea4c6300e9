"""A block-causal Qwen2: `transformers`' own class under a mask of its own, recomputing everything.

No cache, no batching, no vLLM. `random_checkpoint` writes a tiny model to disk.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY, BLOCK, MASK = 300, 8, 299


@dataclass
class Answer:
    """What the reference makes of one request.

    Attributes:
        tokens: the output.
        decided: how many positions each step decided.
        margin: the smallest distance of any decision from going the other way, as a probability
            or a logit.
    """

    tokens: list[int] = field(default_factory=list)
    decided: list[int] = field(default_factory=list)
    margin: float = float("inf")


class Reference:
    """Low-confidence decoding with a checkpoint, one request at a time."""

    def __init__(self, path: Path) -> None:
        self.model = Qwen2ForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def logits(self, tokens: list[int], block: int = BLOCK) -> torch.Tensor:
        """``[tokens, vocabulary]``; position i sees j where j's block is not behind i's."""
        of = torch.arange(len(tokens)) // block
        hidden = of[None, :] > of[:, None]  # [queries, keys]
        mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
        with torch.no_grad():
            found = self.model(
                torch.tensor([tokens]), attention_mask=mask[None, None], use_cache=False
            )
        return found.logits[0]

    def generate(
        self, prompt: list[int], max_tokens: int, threshold: float, stop: tuple[int, ...] = ()
    ) -> Answer:
        """Fill block after block; the first one begins with the prompt's tail."""
        whole = len(prompt) - len(prompt) % BLOCK
        context, tail, answer = prompt[:whole], prompt[whole:], Answer()
        while len(answer.tokens) < max_tokens:
            canvas = tail + [MASK] * (BLOCK - len(tail))
            while MASK in canvas:
                self._step(context, canvas, threshold, answer)
            for token in canvas[len(tail) :]:
                answer.tokens.append(token)
                if token in stop or len(answer.tokens) == max_tokens:
                    return answer
            context, tail = context + canvas, []
        return answer

    def _step(
        self, context: list[int], canvas: list[int], threshold: float, answer: Answer
    ) -> None:
        """Decide every open position that is surer than the threshold, or the surest one."""
        logits = self.logits(context + canvas)[len(context) :]
        probability = logits.softmax(-1)
        logits[:, MASK] = -torch.inf
        top = logits.topk(2, dim=-1)
        sure = {
            n: float(probability[n, top.indices[n, 0]]) for n in range(BLOCK) if canvas[n] == MASK
        }
        accepted = [n for n, p in sure.items() if p > threshold]
        margins = [abs(p - threshold) for p in sure.values()]
        if not accepted:
            best, *rest = sorted(sure, key=lambda n: (-sure[n], n))
            margins += [sure[best] - sure[other] for other in rest[:1]]
            accepted = [best]
        margins += [float(top.values[n, 0] - top.values[n, 1]) for n in accepted]
        for n in accepted:
            canvas[n] = int(top.indices[n, 0])
        answer.decided.append(len(accepted))
        answer.margin = min(answer.margin, *margins)


def random_checkpoint(path: Path, tied: bool) -> Path:
    """Write a Qwen2 of random weights, whose probabilities are spread as a trained model's are."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config).float()
    generator = torch.Generator().manual_seed(7)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            continue  # ones
        gain = 1.6 * weight.shape[-1] ** -0.5
        if "embed_tokens" in name:
            gain = 0.5 if tied else 1.6
        elif "lm_head" in name:
            gain *= 2.5
        weight.data = torch.randn(weight.shape, generator=generator) * gain
    model.save_pretrained(path)
    stated = json.loads((path / "config.json").read_text())
    stated |= {"architectures": ["BlockQwen2ForCausalLM"]}
    stated |= {"canvas_length": BLOCK, "mask_token_id": MASK}
    (path / "config.json").write_text(json.dumps(stated))
    words = WordLevel({f"t{n}": n for n in range(VOCABULARY)}, unk_token="t0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="t1").save_pretrained(path)
    return path

"""Improve tiny-sdar at one task by its reward alone: vLLM rolls out, this script learns.

    .venv/bin/python -m examples.rl.train --rounds 60 --plot reward.svg

In each round the engine answers every problem several times, with the record that replays how each
token was decided (`diffusion_replay`). The gradient is REINFORCE's, with the mean reward of a
problem's answers as its baseline: the log probability of an answer is the sum over its tokens, each
from the canvas of the step that decided it. Then the engine gets the new weights and goes on.
"""

import argparse
import itertools
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams

from examples.tiny.tasks import Problem, problems
from examples.tiny.train_sdar import BLOCK, DEFAULT_OUT, SIZES, read, seen_twice

HELD_OUT = 200
AT_ONCE = 8  # problems whose answers are in memory together
SMALL = {"enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 1 << 28}


def roll_out(llm: LLM, asked: list[Problem], params: SamplingParams) -> list:
    """The outputs of each problem, one after the other."""
    messages = [[{"role": "user", "content": problem.prompt}] for problem in asked]
    return llm.chat(messages, params, use_tqdm=False)


def rewards(asked: list[Problem], outputs: list) -> torch.Tensor:
    """1 for a right answer, else 0: ``[problems, answers]``."""
    return torch.tensor(
        [
            [float(completion.text == problem.answer) for completion in output.outputs]
            for problem, output in zip(asked, outputs, strict=True)
        ]
    )


def log_probabilities(model: Qwen3ForCausalLM, outputs: list, mask: int) -> torch.Tensor:
    """Of each answer, ``[answers]``, from its tokens and the steps that decided them."""
    ids, steps = [], []
    for output in outputs:
        for replay in (completion.diffusion_replay for completion in output.outputs):
            ids.append([*output.prompt_token_ids, *replay.dllm_replay_token_ids])
            steps.append([0] * len(output.prompt_token_ids) + replay.dllm_replay_step_maps)
    length = max(map(len, ids))
    tokens = torch.tensor([row + [mask] * (length - len(row)) for row in ids])
    decided = torch.tensor([row + [0] * (length - len(row)) for row in steps])
    total = torch.zeros(len(ids))
    for step in range(1, BLOCK + 1):
        rows = (decided == step).any(1).nonzero()[:, 0]
        if len(rows):
            # Every block as it was before this step, beside the finished ones before it.
            canvas = tokens[rows].masked_fill(decided[rows] >= step, mask)
            both = torch.cat([tokens[rows], canvas], 1)
            logits = read(model, both, seen_twice(length), length)[:, length:]
            found = logits.log_softmax(-1).gather(2, tokens[rows, :, None])[..., 0]
            total = total.index_add(0, rows, (found * (decided[rows] == step)).sum(1))
    return total


def send(llm: LLM, model: Qwen3ForCausalLM, folder: str) -> None:
    """Give the engine the model's weights; what it has cached is of the old ones."""
    save_file(model.state_dict(), f"{folder}/model.safetensors")
    llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    llm.reset_prefix_cache()


def main(args: argparse.Namespace) -> list[float]:
    """Train, and return the share of held-out problems that were right before each tenth round."""
    torch.manual_seed(0)
    llm = LLM(str(DEFAULT_OUT), dtype="float32", max_num_seqs=64, **SMALL)
    model = Qwen3ForCausalLM.from_pretrained(
        DEFAULT_OUT, config=Qwen3Config(**SIZES), dtype=torch.float32
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0)
    mask, stream = llm.get_tokenizer().mask_token_id, problems(args.task, 1, test=False)
    held_out = list(itertools.islice(problems(args.task, 0, test=True), HELD_OUT))
    greedy, means, shares = SamplingParams(temperature=0, max_tokens=64), [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds + 1):
            if number % 10 == 0 or number == args.rounds:
                shares.append(float(rewards(held_out, roll_out(llm, held_out, greedy)).mean()))
                print(f"round {number}: {shares[-1]:.0%} of the held-out problems")
            asked = list(itertools.islice(stream, args.problems))
            drawn = SamplingParams(temperature=1, max_tokens=64, n=args.answers, seed=number)
            drawn.extra_args = {"diffusion_replay": True}
            outputs = roll_out(llm, asked, drawn)
            reward = rewards(asked, outputs)
            means.append(float(reward.mean()))
            advantage = reward - reward.mean(1, keepdim=True)
            optimizer.zero_grad()
            for first in range(0, args.problems, AT_ONCE):
                few = slice(first, first + AT_ONCE)
                found = log_probabilities(model, outputs[few], mask)
                (-(advantage[few].flatten() * found).sum() / reward.numel()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            send(llm, model, folder)
    seen = [*range(0, args.rounds, 10), args.rounds]
    plt.plot(means, label="reward of a round, at temperature 1")
    plt.plot(seen, shares, "o", label=f"{HELD_OUT} held-out problems, greedy")
    plt.xlabel("round")
    plt.ylabel(f"share of right answers, {args.task}")
    plt.legend()
    plt.savefig(args.plot)
    return shares


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--task", default="count", help="see examples/tiny/tasks.py")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--problems", type=int, default=48, help="of a round")
    parser.add_argument("--answers", type=int, default=8, help="to each problem")
    parser.add_argument("--rate", type=float, default=1e-4, help="of learning")
    parser.add_argument("--plot", type=Path, default=Path("reward.svg"))
    main(parser.parse_args())

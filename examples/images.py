"""A picture and a question about it, for DiffusionGemma.

    .venv/bin/python examples/images.py

The default, tiny-diffusiongemma, has a vision tower with random weights: it shows the way of a
picture through the engine, and what it says of one means nothing. With a model that sees:

    .venv/bin/python examples/images.py --model google/diffusiongemma-26B-A4B-it --image photo.jpg
"""

import argparse
from pathlib import Path

from PIL import Image, ImageDraw
from vllm import LLM

TINY = Path(__file__).resolve().parent / "tiny" / "checkpoints" / "tiny-diffusiongemma"
# For a laptop; leave them out on a GPU.
SMALL = {"enforce_eager": True, "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28}
BLIND = "(tiny-diffusiongemma's vision tower has random weights: this answer means nothing)"


def drawn() -> Image.Image:
    """A red disc on white, where no picture is given."""
    picture = Image.new("RGB", (224, 224), "white")
    ImageDraw.Draw(picture).ellipse((60, 60, 164, 164), fill="red")
    return picture


def main(llm: LLM, picture: Image.Image, question: str) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens = 128
    text = {"type": "text", "text": question}
    image = {"type": "image_pil", "image_pil": picture}  # over HTTP: "image_url"
    for content in ([text], [image, text]):
        (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
        kind = "with the picture" if image in content else "question alone"
        tokens = len(output.prompt_token_ids or ())
        print(f"{kind}: {tokens} tokens of prompt, answer {output.outputs[0].text!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a DiffusionGemma; default: tiny-diffusiongemma")
    parser.add_argument("--image", type=Path, help="a file; default: a red disc")
    parser.add_argument("--question", default="What is in the picture?")
    args = parser.parse_args()
    picture = Image.open(args.image).convert("RGB") if args.image else drawn()
    main(LLM(args.model) if args.model else LLM(str(TINY), **SMALL), picture, args.question)
    if not args.model:
        print(BLIND)

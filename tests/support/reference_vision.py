"""References of the masked models that read pictures, and their checkpoints of random weights.

The text is read by `transformers`' Ministral 3 or Qwen3 in float64, a picture by its Pixtral or
SigLIP. What happens to a picture before, and what stands for it in a prompt, is written down here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionModel,
    Ministral3Config,
    Ministral3ForCausalLM,
    PixtralVisionConfig,
    PixtralVisionModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipVisionConfig,
)
from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector

from tests.support import reference, reference_nemotron
from tests.support.published import nemotron_config
from tests.support.random_weights import SIZES, spread, write_tokenizer

END = 2
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
START, PAD, BREAK, STOP = 18, 19, 20, 21  # of Nemotron's pictures
SHOWN, MASK = 290, 299  # SDAR's
SQUARE, PATCH = 24, 8  # pixels, of SDAR's encoder
PINPOINTS = [[SQUARE * a, SQUARE * b] for a in range(1, 5) for b in range(1, 5)]


Size = tuple[int, int, int]  # a seed, width and height


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Noise, which no two pictures have in common."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


class Pictured(reference.Reference):
    """A reference whose prompts have pictures, each a `placeholder` before `shown` expands it."""

    placeholder: int
    model: Any
    rows: Sequence[torch.Tensor] = ()  # features by position, of the prompt that was shown last

    def with_pictures(self, n: int, prompt: Sequence[int]) -> tuple[list[int], list[Size]]:
        """Replace a part of the prompt by pictures that are as long; at its end, or elsewhere."""
        sizes, room = list[Size](), len(prompt)
        for k in range(1 + n % 2):
            # Every fourth is one that others show, too.
            seed = (n + k) % 4 and 40 * k + n
            size = (seed, 6 + 37 * seed % 110, 6 + 53 * seed % 90)
            length = len(self.expanded(picture(*size))[0])
            if length <= room:
                sizes.append(size)
                room -= length
        text = [token if token != self.placeholder else 3 for token in prompt[:room]]
        at = (room, 0, room // 2, max(0, room - 1))[n % 4]
        return text[:at] + [self.placeholder] * len(sizes) + text[at:], sizes

    def features(self, picture: Image.Image) -> torch.Tensor:
        """``[features, hidden]``, float64."""
        raise NotImplementedError

    def expanded(self, picture: Image.Image) -> tuple[list[int], torch.Tensor]:
        """The tokens of a picture, and which of them are features."""
        raise NotImplementedError

    def shown(self, prompt: Sequence[int], sizes: Sequence[Size]) -> list[int]:
        """The prompt with the tokens of its pictures, which the next `generate` is to see."""
        found, left = list[int](), [picture(*size) for size in sizes]
        rows, where = [], []
        for token in prompt:
            if token != self.placeholder or not left:
                found.append(token)
                continue
            tokens, places = self.expanded(left[0])
            where += [len(found) + n for n in places.nonzero()[:, 0].tolist()]
            found += tokens
            rows.append(self.features(left.pop(0)))
        self.where, self.rows = torch.tensor(where, dtype=torch.int64), rows
        return found

    def logits(self, tokens: list[int], start: int | None = None) -> torch.Tensor:
        """See `Reference.logits`."""
        sees = self.sees(len(tokens), len(tokens) if start is None else start)
        mask = torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, -1e30)
        with torch.no_grad():
            read = self.model.get_input_embeddings()(torch.tensor(tokens))
            if self.rows:
                read[self.where] = torch.cat(list(self.rows))
            found = self.model(
                inputs_embeds=read[None], attention_mask=mask[None, None], use_cache=False
            )
        logits: torch.Tensor = found.logits[0]
        return logits


class Nemotron(Pictured):
    aligned = False
    placeholder = START

    def __init__(self, path: Path, longest: int = 1400) -> None:
        stated = json.loads((path / "config.json").read_text())
        self.mask, self.block, self.longest = stated["mask_token_id"], stated["block_size"], longest
        vision = PixtralVisionConfig(**stated.pop("vision_config"))
        del stated["architectures"], stated["model_type"]
        config = Ministral3Config(**stated)
        config._attn_implementation = vision._attn_implementation = "eager"
        self.model = Ministral3ForCausalLM(config).double().eval()
        tensors = reference_nemotron.ministral_names(load_file(path / "model.safetensors"))
        of = lambda part: {  # noqa: E731
            name.removeprefix(part): it for name, it in tensors.items() if name.startswith(part)
        }
        parts = ("model.vision_tower.", "model.multi_modal_projector.")
        text = {name: it for name, it in tensors.items() if not name.startswith(parts)}
        self.model.load_state_dict(text)
        self.tower = PixtralVisionModel(vision).double().eval()
        self.tower.load_state_dict(of(parts[0]))
        self.projector = _nemotron_projector(config, vision).double().eval()
        self.projector.load_state_dict(of(parts[1]))

    sees = reference_nemotron.Reference.sees

    def logits(self, tokens: list[int], start: int | None = None) -> torch.Tensor:
        found = super().logits(tokens, start)
        found[:, self.mask] = -torch.inf
        return found

    def cells(self, picture: Image.Image) -> tuple[int, int]:
        width, height = picture.size
        ratio = max(width, height) / self.longest
        if ratio > 1:
            width, height = round(width / ratio), round(height / ratio)
        return (width - 1) // 28 + 1, (height - 1) // 28 + 1

    def pixels(self, picture: Image.Image) -> torch.Tensor:
        """float64 ``[3, height, width]``."""
        columns, rows = self.cells(picture)
        values: np.ndarray = np.asarray(picture, dtype=np.float64)
        resized = _cubic(_cubic(values, 28 * rows).swapaxes(0, 1), 28 * columns).swapaxes(0, 1)
        mean = np.array([0.48145466, 0.4578275, 0.40821073])
        deviation = np.array([0.26862954, 0.26130258, 0.27577711])
        return torch.from_numpy((resized / 255 - mean) / deviation).permute(2, 0, 1)

    def features(self, picture: Image.Image) -> torch.Tensor:
        pixels = self.pixels(picture)[None]
        size = torch.tensor([pixels.shape[2:]])
        with torch.no_grad():
            patches = self.tower(pixels, image_sizes=size).last_hidden_state[0]
            found: torch.Tensor = self.projector(patches, size)
        return found

    def expanded(self, picture: Image.Image) -> tuple[list[int], torch.Tensor]:
        columns, rows = self.cells(picture)
        tokens = [START, *([PAD] * columns + [BREAK]) * rows]
        tokens[-1] = STOP
        return tokens, torch.tensor(tokens) == PAD


def _cubic(values: np.ndarray, count: int) -> np.ndarray:
    """Resample the first axis as OpenCV's INTER_CUBIC does: four taps, edges repeated."""
    at = (np.arange(count) + 0.5) * len(values) / count - 0.5
    first: np.ndarray = np.floor(at).astype(int)
    t, a = at - first, -0.75
    near = lambda x: ((a + 2) * x - (a + 3)) * x * x + 1  # noqa: E731
    far = lambda x: ((a * x - 5 * a) * x + 8 * a) * x - 4 * a  # noqa: E731
    weights = (far(t + 1), near(t), near(1 - t), far(2 - t))
    taps = (values[np.clip(first + n - 1, 0, len(values) - 1)] for n in range(4))
    return sum(w[:, None, None] * tap for w, tap in zip(weights, taps, strict=True))


def _nemotron_projector(text: Any, vision: Any) -> Mistral3MultiModalProjector:
    from transformers import Mistral3Config

    sizes = {"text_config": text, "vision_config": vision, "spatial_merge_size": 2}
    return Mistral3MultiModalProjector(
        Mistral3Config(**sizes, projector_hidden_act="gelu", multimodal_projector_bias=False)
    )


class Sdar(Pictured):
    placeholder = SHOWN

    def __init__(self, path: Path) -> None:
        stated = json.loads((path / "config.json").read_text())
        text = stated["text_config"]
        self.mask, self.block = text["mask_token_id"], text["block_size"]
        left_out = ("architectures", "model_type", "auto_map", "block_size", "mask_token_id")
        config = Qwen3Config(**{name: it for name, it in text.items() if name not in left_out})
        config._attn_implementation = "eager"
        self.model = Qwen3ForCausalLM(config).double().eval()
        tensors = load_file(path / "model.safetensors")
        prefix = "language_model."
        own = {
            name.removeprefix(prefix): it for name, it in tensors.items() if name.startswith(prefix)
        }
        self.model.load_state_dict(own)
        self.vision = _one_vision(config).double().eval()
        rest = {
            name.replace("vision_tower.vision_model.", "vision_tower."): it
            for name, it in tensors.items()
            if not name.startswith(prefix)
        }
        missing, unexpected = self.vision.load_state_dict(rest, strict=False)
        assert not unexpected and all(name.startswith(prefix) for name in missing)

    def squares(self, picture: Image.Image) -> torch.Tensor:
        """float64 ``[squares, 3, SQUARE, SQUARE]``: the whole picture, then its parts."""
        width, height = picture.size

        def judged(size: list[int]) -> tuple[int, int]:
            scale = min(size[1] / width, size[0] / height)
            used = min(int(width * scale) * int(height * scale), width * height)
            return used, used - size[0] * size[1]

        best = max(PINPOINTS, key=judged)
        scale = best[1] / width, best[0] / height
        if scale[0] < scale[1]:
            inner = best[1], min(math.ceil(height * scale[0]), best[0])
        else:
            inner = min(math.ceil(width * scale[1]), best[1]), best[0]
        canvas = Image.new("RGB", (best[1], best[0]))
        at = (best[1] - inner[0]) // 2, (best[0] - inner[1]) // 2
        canvas.paste(picture.resize(inner, Image.Resampling.BICUBIC), at)
        whole = picture.resize((SQUARE, SQUARE), Image.Resampling.BICUBIC)
        parts = [
            canvas.crop((x, y, x + SQUARE, y + SQUARE))
            for y in range(0, best[0], SQUARE)
            for x in range(0, best[1], SQUARE)
        ]
        pixels = np.stack([np.asarray(one, dtype=np.float64) for one in (whole, *parts)])
        return torch.from_numpy((pixels / 255 - 0.5) / 0.5).permute(0, 3, 1, 2)

    def features(self, picture: Image.Image) -> torch.Tensor:
        size = torch.tensor([[picture.height, picture.width]])
        with torch.no_grad():
            found = self.vision.get_image_features(
                self.squares(picture),
                size,
                vision_feature_layer=-1,
                vision_feature_select_strategy="full",
                vision_aspect_ratio="anyres_max_9",
            )
        packed: torch.Tensor = found.pooler_output[0]
        return packed

    def expanded(self, picture: Image.Image) -> tuple[list[int], torch.Tensor]:
        count = len(self.features(picture))
        return [SHOWN] * count, torch.ones(count, dtype=torch.bool)


def _one_vision(text: Any) -> LlavaOnevisionModel:
    vision = SiglipVisionConfig(
        **VISION, intermediate_size=48, image_size=SQUARE, patch_size=PATCH, vision_use_head=False,
        hidden_act="gelu_pytorch_tanh",
    )  # fmt: skip
    config = LlavaOnevisionConfig(
        text_config=text, vision_config=vision, image_grid_pinpoints=PINPOINTS
    )
    config._attn_implementation = vision._attn_implementation = "eager"
    return LlavaOnevisionModel(config)


def _loud(part: torch.nn.Module) -> torch.nn.Module:
    """Random weights with which a picture does not drown in the text."""
    generator = torch.Generator().manual_seed(5)
    for name, weight in part.named_parameters():
        gain = 1.6 * weight[0].numel() ** -0.5 if weight.ndim > 1 else 0.1
        drawn = torch.randn(weight.shape, generator=generator) * gain
        weight.data = 1 + drawn if "norm" in name and name.endswith("weight") else drawn
    return part.float()


def nemotron_checkpoint(path: Path, block: int) -> Path:
    """Write a model of random weights; its rope is as in `reference_nemotron`."""
    path.mkdir(parents=True, exist_ok=True)
    rope = nemotron_config("nemotron-labs-diffusion-3b")["rope_parameters"]
    rope |= {"original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.5}
    sizes = SIZES | {"head_dim": 32, "eos_token_id": END, "rope_parameters": rope}
    text = spread(Ministral3ForCausalLM(Ministral3Config(**sizes)))
    vision = PixtralVisionConfig(
        **VISION, intermediate_size=48, image_size=1540, patch_size=14, hidden_act="silu"
    )
    tensors = {
        name.replace("model.", "encoder.", 1).replace("lm_head.", "diffusion_head.", 1): tensor
        for name, tensor in text.state_dict().items()
    }
    tower, projector = PixtralVisionModel(vision), _nemotron_projector(text.config, vision)
    for name, part in (("vision_tower", tower), ("multi_modal_projector", projector)):
        tensors |= {f"encoder.{name}.{key}": it for key, it in _loud(part).state_dict().items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    stated = sizes | {
        "architectures": ["NemotronLabsDiffusionVLMModel"],
        "model_type": "nemotron_labs_diffusion_vlm", "dlm_paradigm": "bidirectional",
        "dlm_type": "llada", "block_size": block, "mask_token_id": reference_nemotron.MASK,
        "vision_config": vision.to_dict(),
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(stated))
    _write_tokenizer(path, {START: "<|image_start|>"}, START)
    return path


def sdar_checkpoint(path: Path, block: int) -> Path:
    """Write a model of random weights."""
    path.mkdir(parents=True, exist_ok=True)
    sizes = SIZES | {"head_dim": 32, "rope_theta": 1e6}
    text = spread(Qwen3ForCausalLM(Qwen3Config(**sizes)))
    vision = _loud(_one_vision(text.config))
    tensors = {f"language_model.{name}": it for name, it in text.state_dict().items()}
    for name, it in vision.state_dict().items():
        if not name.startswith("language_model."):
            tensors[name.replace("vision_tower.", "vision_tower.vision_model.")] = it
    save_file(
        {name: it.contiguous() for name, it in tensors.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    own = {"block_size": block, "mask_token_id": MASK, "model_type": "sdar"}
    stated = {
        "architectures": ["LlavaOnevisionForConditionalGeneration"], "model_type": "sdar_v",
        "text_config": sizes | own | {"architectures": ["SDAR"]},
        "vision_config": vision.config.vision_config.to_dict(),
        "image_token_index": SHOWN, "video_token_index": SHOWN + 1, "ignore_index": -100,
        "image_grid_pinpoints": PINPOINTS, "use_image_newline_parameter": True,
        "vision_aspect_ratio": "anyres_max_9", "tie_word_embeddings": False,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(stated))
    half = [0.5, 0.5, 0.5]
    preprocessor = {
        "image_processor_type": "LlavaOnevisionImageProcessorFast", "resample": 3,
        "image_grid_pinpoints": PINPOINTS, "image_mean": half, "image_std": half,
        "size": {"height": SQUARE, "width": SQUARE}, "do_pad": True,
    }  # fmt: skip
    (path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    _write_tokenizer(path, {SHOWN: "<|image_pad|>", MASK: "<|MASK|>"}, SHOWN)
    return path


def _write_tokenizer(path: Path, words: dict[int, str], placeholder: int) -> None:
    """See `write_tokenizer`; a chat is what its parts are, with a word for each picture."""
    write_tokenizer(path, END, words)
    file = path / "tokenizer.json"
    state = json.loads(file.read_text()) | {"pre_tokenizer": {"type": "WhitespaceSplit"}}
    file.write_text(json.dumps(state))
    parts = "{% for c in m.content %}{{ c.text if c.type == 'text' else ' WORD ' }}{% endfor %}"
    template = f"{{% for m in messages %}}{parts}{{% endfor %}}"
    (path / "chat_template.jinja").write_text(template.replace("WORD", words[placeholder]))

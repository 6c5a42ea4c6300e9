"""Byte-level tokenizers for the tiny checkpoints: 256 bytes and the family's special tokens."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma4AudioFeatureExtractor,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VideoProcessor,
    PreTrainedTokenizerFast,
)

LLADA2_SPECIAL = (
    *("<|startoftext|>", "<|endoftext|>", "[CLS]", "[gMASK]", "<|mask|>"),
    *("<role>SYSTEM</role>", "<role>HUMAN</role>", "<role>ASSISTANT</role>", "<|role_end|>"),
)
LLADA2_CHAT = (
    "{% for message in messages %}"
    "<role>{{ 'HUMAN' if message.role == 'user' else message.role | upper }}</role>"
    "{{ message.content }}<|role_end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<role>ASSISTANT</role>{% endif %}"
)


def byte_level(special: tuple[str, ...], *, first: int) -> Tokenizer:
    """Every byte is a token and nothing is merged; `special` get the ids from `first` on.

    With `first` above 0 the bytes come before the special tokens, with 0 after them.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ordered = [*alphabet, *special] if first else [*special, *alphabet]
    model = models.BPE({token: i for i, token in enumerate(ordered)}, [])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def llada2_tokenizer() -> PreTrainedTokenizerFast:
    """LLaDA2's special tokens and chat turns, after 256 bytes."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(LLADA2_SPECIAL, first=256),
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        mask_token="<|mask|>",
    )
    fast.chat_template = LLADA2_CHAT
    return fast


SDAR_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>"),
    *("</think>", "<|MASK|>"),
)
SDAR_CHAT = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def sdar_tokenizer() -> PreTrainedTokenizerFast:
    """SDAR's special tokens and chat turns, which are Qwen's, after 256 bytes.

    As published, a turn ends with another token than a text.
    """
    fast = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(SDAR_SPECIAL, first=256),
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        mask_token="<|MASK|>",
    )
    fast.chat_template = SDAR_CHAT
    return fast


GEMMA_SPECIAL = (
    *("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>system", "<|turn>user", "<|turn>model"),
    *("<turn|>", "<|image>", "<|image|>", "<image|>", "<|video|>"),
    *("<|audio>", "<|audio|>", "<audio|>"),  # the processor insists on them; no model hears them
)
GEMMA_CHAT = (
    "<bos>{% for message in messages %}"
    "<|turn>{{ 'model' if message.role == 'assistant' else message.role }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{{ '<|image|>' if part.type == 'image' else part.text }}"
    "{% endfor %}{% endif %}<turn|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model{% endif %}"
)


def gemma_processor() -> Gemma4Processor:
    """DiffusionGemma's tokenizer, chat turns and image processor; special tokens come first."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(GEMMA_SPECIAL, first=0),
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        extra_special_tokens={
            "boi_token": "<|image>",
            "image_token": "<|image|>",
            "eoi_token": "<image|>",
            "boa_token": "<|audio>",
            "audio_token": "<|audio|>",
            "eoa_token": "<audio|>",
        },
    )
    tokenizer.chat_template = GEMMA_CHAT
    return Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(),
        tokenizer=tokenizer,
        video_processor=Gemma4VideoProcessor(),
        chat_template=GEMMA_CHAT,
    )

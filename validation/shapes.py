"""Shapes of published models, for rows that only name one: (layers, hidden, heads, key/value heads, ffn, vocabulary).

From each model's published configuration; ffn is one matrix's width. Mixtures add (experts, top k), and heads of another
width than hidden / heads the width. Models of the catalogue (schema/catalogue/models) are found by name without this table.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Shape(NamedTuple):
    """The numbers a decoder is built from."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    experts: int = 0
    top_k: int = 0
    head_dim: int = 0


# fmt: off
SIZES = {
    # mixtures with experts that every token visits
    "deepseek-moe-16b": 16.4, "deepseek-v2": 235.7, "kimi-k2": 1026.0, "qwen1.5-moe-a2.7b": 14.3, "qwen2-57b-a14b": 57.4,
    # heads that are tied or not against their family's habit
    "nemotron-8b": 8.5, "nemotron-22b": 21.3, "nemotron-4-15b": 15.6, "phi-1.5": 1.42, "phi-2": 2.78, "gpt-neox-20b": 20.55,
    "gpt-j-6b": 6.05, "pythia-160m": 0.162, "pythia-410m": 0.405, "pythia-1.4b": 1.41, "pythia-2.8b": 2.78, "pythia-6.9b": 6.86,
    "stablelm-alpha-3b": 3.64, "stablelm-alpha-7b": 7.87, "llama-3.2-3b": 3.21, "gemma-2b": 2.51, "gemma-7b": 8.54,
    "gemma-2-2b": 2.61, "gemma-2-27b": 27.2, "gemma-3-1b": 1.0, "gemma-3-4b": 3.88, "gemma-3-12b": 11.8, "gemma-3-27b": 27.0,
    "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02,
    "smollm2-360m": 0.362, "olmo-1b": 1.18,
}
"""Published sizes, billions of parameters, where the shape alone leaves open what else is counted."""

SHAPES: dict[str, Shape] = {
    # NeMo's GPT and Nemotron recipes; Megatron's sizes (arXiv:2104.04473 table 1)
    "gpt3-126m": Shape(12, 768, 12, 12, 3072, 51200), "gpt3-5b": Shape(24, 4096, 32, 32, 16384, 51200),
    "gpt3-20b": Shape(44, 6144, 48, 48, 24576, 51200), "gpt3-40b": Shape(48, 8192, 64, 64, 32768, 51200),
    "gpt-1.7b": Shape(24, 2304, 24, 24, 9216, 51200), "gpt-3.6b": Shape(30, 3072, 32, 32, 12288, 51200),
    "gpt-7.5b": Shape(36, 4096, 32, 32, 16384, 51200), "gpt-18b": Shape(40, 6144, 48, 48, 24576, 51200),
    "gpt-39b": Shape(48, 8192, 64, 64, 32768, 51200), "gpt-76b": Shape(60, 10240, 80, 80, 40960, 51200),
    "gpt-145b": Shape(80, 12288, 96, 96, 49152, 51200), "gpt-530b": Shape(105, 20480, 128, 128, 81920, 51200),
    "gpt-1t": Shape(128, 25600, 160, 160, 102400, 51200), "bloomberggpt-50b": Shape(70, 7680, 40, 40, 30720, 131072),
    "nemotron-8b": Shape(32, 4096, 32, 32, 16384, 256000), "nemotron-22b": Shape(40, 6144, 48, 48, 24576, 256000),
    "nemotron-4-15b": Shape(32, 6144, 48, 8, 24576, 256000),
    # Llama and its relatives
    "llama-7b": Shape(32, 4096, 32, 32, 11008, 32000), "llama-13b": Shape(40, 5120, 40, 40, 13824, 32000),
    "llama-30b": Shape(60, 6656, 52, 52, 17920, 32000), "llama-33b": Shape(60, 6656, 52, 52, 17920, 32000),
    "llama-65b": Shape(80, 8192, 64, 64, 22016, 32000), "llama-3-8b": Shape(32, 4096, 32, 8, 14336, 128256),
    "llama-3-70b": Shape(80, 8192, 64, 8, 28672, 128256), "llama-3.3-70b": Shape(80, 8192, 64, 8, 28672, 128256),
    "llama-3-405b": Shape(126, 16384, 128, 8, 53248, 128256), "llama-3.2-3b": Shape(28, 3072, 24, 8, 8192, 128256),
    "codellama-34b": Shape(48, 8192, 64, 8, 22016, 32000), "tinyllama-1.1b": Shape(22, 2048, 32, 4, 5632, 32000),
    "mistral-nemo-12b": Shape(40, 5120, 32, 8, 14336, 131072, head_dim=128),
    "mistral-small-24b": Shape(40, 5120, 32, 8, 32768, 131072, head_dim=128),
    "mistral-large-123b": Shape(88, 12288, 96, 8, 28672, 32768),
    "yi-6b": Shape(32, 4096, 32, 4, 11008, 64000), "yi-9b": Shape(48, 4096, 32, 4, 11008, 64000),
    "yi-34b": Shape(60, 7168, 56, 8, 20480, 64000),
    "baichuan-7b": Shape(32, 4096, 32, 32, 11008, 64000), "baichuan-13b": Shape(40, 5120, 40, 40, 13696, 64000),
    "baichuan2-7b": Shape(32, 4096, 32, 32, 11008, 125696), "baichuan2-13b": Shape(40, 5120, 40, 40, 13696, 125696),
    "internlm-7b": Shape(32, 4096, 32, 32, 11008, 103168), "internlm-20b": Shape(60, 5120, 40, 40, 13824, 103168),
    "internlm2-7b": Shape(32, 4096, 32, 8, 14336, 92544), "internlm2-20b": Shape(48, 6144, 48, 8, 16384, 92544),
    "internlm2.5-7b": Shape(32, 4096, 32, 8, 14336, 92544),
    "chatglm2-6b": Shape(28, 4096, 32, 2, 13696, 65024), "chatglm3-6b": Shape(28, 4096, 32, 2, 13696, 65024),
    "glm-4-9b": Shape(40, 4096, 32, 2, 13696, 151552), "glm-130b": Shape(70, 12288, 96, 96, 32768, 150528),
    "deepseek-llm-7b": Shape(30, 4096, 32, 32, 11008, 102400), "deepseek-llm-67b": Shape(95, 8192, 64, 8, 22016, 102400),
    "smollm2-360m": Shape(32, 960, 15, 5, 2560, 49152), "olmo-1b": Shape(16, 2048, 16, 16, 8192, 50304),
    "olmo-7b": Shape(32, 4096, 32, 32, 11008, 50304), "olmo2-7b": Shape(32, 4096, 32, 32, 11008, 100352),
    "olmo2-13b": Shape(40, 5120, 40, 40, 13824, 100352), "olmo2-32b": Shape(64, 5120, 40, 8, 27648, 100352),
    # Qwen
    "qwen2.5-0.5b": Shape(24, 896, 14, 2, 4864, 151936), "qwen2.5-1.5b": Shape(28, 1536, 12, 2, 8960, 151936),
    "qwen2.5-3b": Shape(36, 2048, 16, 2, 11008, 151936), "qwen2.5-14b": Shape(48, 5120, 40, 8, 13824, 152064),
    "qwen-7b": Shape(32, 4096, 32, 32, 11008, 151936), "qwen-14b": Shape(40, 5120, 40, 40, 13696, 152064),
    "qwen-72b": Shape(80, 8192, 64, 64, 24576, 152064), "qwen2-7b": Shape(28, 3584, 28, 4, 18944, 152064),
    "qwen2-72b": Shape(80, 8192, 64, 8, 29568, 152064), "qwen3-0.6b": Shape(28, 1024, 16, 8, 3072, 151936, head_dim=128),
    "qwen3-1.7b": Shape(28, 2048, 16, 8, 6144, 151936), "qwen3-4b": Shape(36, 2560, 32, 8, 9728, 151936, head_dim=128),
    "qwen3-14b": Shape(40, 5120, 40, 8, 17408, 151936),
    # Gemma, Phi
    "gemma-2b": Shape(18, 2048, 8, 1, 16384, 256000, head_dim=256),
    "gemma-7b": Shape(28, 3072, 16, 16, 24576, 256000, head_dim=256),
    "gemma-2-2b": Shape(26, 2304, 8, 4, 9216, 256000, head_dim=256),
    "gemma-2-27b": Shape(46, 4608, 32, 16, 36864, 256000, head_dim=128),
    "gemma-3-1b": Shape(26, 1152, 4, 1, 6912, 262144, head_dim=256),
    "gemma-3-4b": Shape(34, 2560, 8, 4, 10240, 262144, head_dim=256),
    "gemma-3-12b": Shape(48, 3840, 16, 8, 15360, 262144, head_dim=256),
    "gemma-3-27b": Shape(62, 5376, 32, 16, 21504, 262144, head_dim=128),
    "phi-1.5": Shape(24, 2048, 32, 32, 8192, 51200), "phi-2": Shape(32, 2560, 32, 32, 10240, 51200),
    "phi-3-mini": Shape(32, 3072, 32, 32, 8192, 32064), "phi-3-medium": Shape(40, 5120, 40, 10, 17920, 32064),
    "phi-4": Shape(40, 5120, 40, 10, 17920, 100352),
    # Not gated
    "opt-125m": Shape(12, 768, 12, 12, 3072, 50272), "opt-1.3b": Shape(24, 2048, 32, 32, 8192, 50272),
    "opt-2.7b": Shape(32, 2560, 32, 32, 10240, 50272), "opt-6.7b": Shape(32, 4096, 32, 32, 16384, 50272),
    "opt-13b": Shape(40, 5120, 40, 40, 20480, 50272), "opt-30b": Shape(48, 7168, 56, 56, 28672, 50272),
    "opt-66b": Shape(64, 9216, 72, 72, 36864, 50272), "opt-175b": Shape(96, 12288, 96, 96, 49152, 50272),
    "bloom-560m": Shape(24, 1024, 16, 16, 4096, 250880), "bloom-1.1b": Shape(24, 1536, 16, 16, 6144, 250880),
    "bloom-1.7b": Shape(24, 2048, 16, 16, 8192, 250880), "bloom-3b": Shape(30, 2560, 32, 32, 10240, 250880),
    "bloom-7b": Shape(30, 4096, 32, 32, 16384, 250880), "bloom-176b": Shape(70, 14336, 112, 112, 57344, 250880),
    "pythia-160m": Shape(12, 768, 12, 12, 3072, 50304), "pythia-410m": Shape(24, 1024, 16, 16, 4096, 50304),
    "pythia-1.4b": Shape(24, 2048, 16, 16, 8192, 50304), "pythia-2.8b": Shape(32, 2560, 32, 32, 10240, 50304),
    "pythia-6.9b": Shape(32, 4096, 32, 32, 16384, 50432), "gpt-neox-20b": Shape(44, 6144, 64, 64, 24576, 50432),
    "gpt-neo-2.7b": Shape(32, 2560, 20, 20, 10240, 50257), "gpt-j-6b": Shape(28, 4096, 16, 16, 16384, 50400),
    "mpt-7b": Shape(32, 4096, 32, 32, 16384, 50432), "mpt-30b": Shape(48, 7168, 64, 64, 28672, 50432),
    "falcon-7b": Shape(32, 4544, 71, 1, 18176, 65024), "falcon-40b": Shape(60, 8192, 128, 8, 32768, 65024),
    "falcon-180b": Shape(80, 14848, 232, 8, 59392, 65024), "starcoder": Shape(40, 6144, 48, 1, 24576, 49152),
    "stablelm-alpha-3b": Shape(16, 4096, 32, 32, 16384, 50688),
    "stablelm-alpha-7b": Shape(16, 6144, 48, 48, 24576, 50688),
    # Mixtures
    "dbrx": Shape(40, 6144, 48, 8, 10752, 100352, 16, 4), "grok-1": Shape(64, 6144, 48, 8, 32768, 131072, 8, 2, head_dim=128),
    "deepseek-moe-16b": Shape(28, 2048, 16, 16, 1408, 102400, 64, 6),
    "deepseek-v2": Shape(60, 5120, 128, 128, 1536, 102400, 160, 6), "kimi-k2": Shape(61, 7168, 64, 64, 2048, 163840, 384, 8),
    "qwen1.5-moe-a2.7b": Shape(24, 2048, 16, 16, 1408, 151936, 60, 4),
    "qwen2-57b-a14b": Shape(28, 3584, 28, 4, 2560, 151936, 64, 8),
}
# fmt: on

_ALIASES = (
    (r"meta-|-?(instruct|chat|hf|base|v0\.[1-9]|it|4k|8k|128k)(?=-|$)", ""),
    (r"^tiny-?llama(-1\.1b)?$", "tinyllama-1.1b"),
    (r"^llama-?([123])", r"llama-\1"),
    (r"^llama-1-", "llama-"),
    (r"^llama-3\.1-(8b|70b|405b)$", r"llama-3-\1"),
    (r"^gemma-?([23])", r"gemma-\1"),
    (r"^qwen(2\.5|1\.5|3|2|)-(?=\d)", r"qwen\1-"),
    (r"^qwen-(2\.5|1\.5|3|2)-(?=\d+(\.\d+)?b)", r"qwen\1-"),
    (r"^bloom(z?)-(\d)b(\d)$", r"bloom-\2.\3b"),
    (r"^bloom$", "bloom-176b"),
    (r"^gpt-?3-(?=\d)", "gpt3-"),
    (r"^phi-?(\d)", r"phi-\1"),
    (r"^olmo-2-", "olmo2-"),
)


def shape_named(name: str) -> Shape | None:
    """The published shape a table's spelling of a model's name means."""
    key = canonical(name)
    return SHAPES.get(key) or SHAPES.get(re.sub(r"-\d+(\.\d+)?b$", "", key))


def canonical(name: str) -> str:
    """A name in the table's spelling: lower case, words joined by hyphens, without what does not change the shape."""
    key = re.sub(r"[\s_/]+", "-", name.strip().lower().split("/")[-1])
    key = re.sub(r"(\d)-b\b", r"\1b", key)
    for pattern, replacement in _ALIASES:
        key = re.sub(pattern, replacement, key)
    return key.strip("-")


def shape_of_size(params: float, vocab: int) -> Shape:
    """A GPT of ``params`` parameters whose width is 128 times its depth, as those of arXiv:2104.04473 are within a factor of two.

    params = 12 L h^2 + V h with h = 128 L, the width rounded to whole heads of 128.
    """
    hidden = max(128, 128 * round((128 * params / 12) ** (1 / 3) / 128))
    layers = max(1, round((params - vocab * hidden) / (12 * hidden**2)))
    heads = hidden // 128
    return Shape(layers, hidden, heads, heads, 4 * hidden, vocab)

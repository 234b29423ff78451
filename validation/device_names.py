"""What tables, drivers and vendors call an accelerator -> its name in the catalogue."""

from __future__ import annotations

import re

_NOISE = re.compile(
    r"\b(nvidia|amd|instinct|geforce|tesla|quadro|intel|habana|hpu|google|cloud|aws|amazon|dgx|hgx|oam)\b[- ]*"
)

PATTERNS: tuple[tuple[str, str], ...] = (
    (r"gb300", "GB300-278GB"),
    (r"gb200", "GB200-186GB"),
    (r"gh200.*(14[14]|hbm3e)", "GH200-144GB"),
    (r"gh200", "GH200-96GB"),
    (r"\bb300", "B300-SXM-268GB"),
    (r"\bb200", "B200-SXM-180GB"),
    (r"h200.*nvl", "H200-NVL-141GB"),
    (r"h200", "H200-SXM-141GB"),
    (r"h100.*nvl", "H100-NVL-94GB"),
    (r"h100.*pcie", "H100-PCIe-80GB"),
    (r"h100", "H100-SXM-80GB"),
    (r"h800", "H800-SXM-80GB"),
    (r"\bh20\b", "H20-96GB"),
    (r"a800.*pcie", "A800-PCIe-80GB"),
    (r"a800", "A100-SXM-80GB"),  # an A100 with fewer NVLinks
    (r"a100.*pcie.*40|a100.*40.*pcie", "A100-PCIe-40GB"),
    (r"a100.*pcie", "A100-PCIe-80GB"),
    (r"a100.*40 ?g|a100-(sxm4?-)?40", "A100-SXM-40GB"),
    (r"a100", "A100-SXM-80GB"),
    (r"v100.*pcie", "V100-PCIe-32GB"),
    (r"v100.*32", "V100-SXM2-32GB"),
    (r"v100", "V100-SXM2-16GB"),
    (r"p100", "P100-SXM2-16GB"),
    (r"rtx-?pro-?6000", "RTX-PRO-6000-Server-96GB"),
    (r"6000-?ada", "RTX6000-Ada-48GB"),
    (r"\ba6000", "RTX-A6000-48GB"),
    (r"5090", "RTX5090-32GB"),
    (r"4090", "RTX4090-24GB"),
    (r"3090", "RTX3090-24GB"),
    (r"\bl40s", "L40S-48GB"),
    (r"\bl40\b", "L40-48GB"),
    (r"\bl20\b", "L20-48GB"),
    (r"\bl4\b", "L4-24GB"),
    (r"\ba10g", "A10G-24GB"),
    (r"\ba10\b", "A10-24GB"),
    (r"\ba30\b", "A30-24GB"),
    (r"\ba40\b", "A40-48GB"),
    (r"\bt4\b", "T4-16GB"),
    (r"mi355x", "MI355X-288GB"),
    (r"mi350x", "MI350X-288GB"),
    (r"mi325x", "MI325X-256GB"),
    (r"mi300a", "MI300A-128GB"),
    (r"mi300x?\b", "MI300X-192GB"),
    (r"mi250x", "MI250X-GCD"),
    (r"mi250", "MI250-GCD"),
    (r"mi210", "MI210-64GB"),
    (r"gaudi-?3|hl-?325", "Gaudi3-128GB"),
    (r"gaudi-?2|hl-?225", "Gaudi2-96GB"),
    (r"\bv6e|trillium", "TPU-v6e"),
    (r"\bv5p", "TPU-v5p"),
    (r"\bv5e|v5-?lite", "TPU-v5e"),
    (r"tpu-?v4", "TPU-v4"),
    (r"trainium-?2|\btrn2", "Trainium2-96GB"),
    (r"trainium|\btrn1", "Trainium1-32GB"),
)
"""First match counts; what has no pattern is not in the catalogue."""


def device_named(text: str) -> str | None:
    """The catalogue's name of what ``text`` means, e.g. ``NVIDIA H100 80GB HBM3``; None where it means nothing known."""
    words = re.sub(r"[\s_/()]+", "-", _NOISE.sub("", text.strip().lower())).strip("-")
    return next((name for pattern, name in PATTERNS if re.search(pattern, words)), None)

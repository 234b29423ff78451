"""Megatron Bridge's own reading of overrides: recipe, merge, ``runtime_config_update`` with ``ConfigContainer.validate``.

A case: the recipe's function, the file, the model's config.json (a recipe fetches it from the hub), and the ranks.
"""

import importlib
import os
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
import yaml
from harness import answer
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import runtime_config_update
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

if not torch.cuda.is_available():  # recipes ask for the kind of device
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, name="NVIDIA H100")


def read(case):
    os.environ["WORLD_SIZE"] = str(case["num_devices"])
    config_class = getattr(transformers, case["config"]["architectures"][0]).config_class
    config = config_class(**case["config"])
    config.architectures = case["config"]["architectures"]
    AutoBridge.from_hf_pretrained = lambda *_args, **_options: AutoBridge.from_hf_config(config)
    module, function = case["recipe"].rsplit(".", 1)
    container = getattr(importlib.import_module(f"megatron.bridge.recipes.{module}"), function)()
    container = process_config_with_overrides(container, case["path"])
    runtime_config_update(container)
    return {
        "unheeded": unheeded(container, case["path"]),
        "stages": stages(container.model),
        "chunks": container.model.virtual_pipeline_model_parallel_size or 1,
        "data_parallel": container.data_parallel_size,
        "gradients_in_fp32": container.ddp.grad_reduce_in_fp32,
        "fp8": container.model.fp8,
        "tp_overlap": container.model.tp_comm_overlap,
    }


def stages(model):
    """Return the kinds of layers of each stage in the order of the model; none where the layout is Megatron's own."""
    layout = model.pipeline_model_parallel_layout
    if layout is None:
        return None
    chunks = layout.virtual_pipeline_model_parallel_size
    return [[kind.name for kind in rank[chunk]] for chunk in range(chunks) for rank in layout.layout]


def unheeded(container, path):
    """Return the overrides that the finished configuration does not have."""
    overrides = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    lines = []
    for section, fields in overrides.items():
        found = getattr(container, section)
        for name, said in fields.items() if "_target_" not in fields else ():
            value = getattr(found, name, "no such field")
            if said is not None and str(value) != str(said):
                lines.append(f"{section}.{name}: {said!r} became {value!r}")
    return lines


answer(read)

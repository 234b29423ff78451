"""Megatron-LM's own reading of options: ``parse_args``, ``validate_args`` and the configuration that it makes of them.

A case: the words after the script's name, and the ranks. megatron.training is of a checkout, which PYTHONPATH names.
"""

import os
import sys
from types import SimpleNamespace

import torch
from harness import answer
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args

if not torch.cuda.is_available():  # options are checked for the kind of device
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, name="NVIDIA H100")


def read(case):
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(case["num_devices"]), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    sys.argv = ["pretrain_gpt.py", *case["words"]]
    args = parse_args()
    validate_args(args)
    config = core_transformer_config_from_args(args)
    return {
        "layers": config.num_layers,
        "chunks": args.virtual_pipeline_model_parallel_size or 1,
        "data_parallel": args.data_parallel_size,
        "gradients_in_fp32": args.accumulate_allreduce_grads_in_fp32,
        "fp8": config.fp8,
        "tp_overlap": args.tp_comm_overlap,
    }


answer(read)

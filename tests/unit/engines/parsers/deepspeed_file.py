"""DeepSpeed's own reading of a file, as one of as many made-up ranks: DeepSpeedConfig compares the batch with the ranks.

A case: the file, and the ranks.
"""

import torch
from harness import answer
from torch.testing._internal.distributed.fake_pg import FakeStore


def read(case):
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=case["num_devices"])
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        deepspeed.comm.init_distributed(dist_backend="fake", verbose=False)
        config = DeepSpeedConfig(case["path"])
    finally:
        torch.distributed.destroy_process_group()
        deepspeed.comm.comm.cdb = None
    return {
        "stage": config.zero_optimization_stage,
        "micro_batch": config.train_micro_batch_size_per_gpu,
        "microbatches": config.gradient_accumulation_steps,
        "offloads": [getattr(config.zero_config, f"offload_{what}") is not None for what in ("optimizer", "param")],
        "second_partition": config.zero_config.zero_hpz_partition_size,
        "bf16": config.bfloat16_config.enabled,
    }


answer(read)

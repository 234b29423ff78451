"""torchtitan's own reading of a module: its ConfigManager, the checks of Trainer.Config, of the degrees and of the model.

A case: the folder of the module, and the ranks.
"""

import importlib
import sys

from harness import answer
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed import ParallelDims


def read(case):
    sys.path.insert(0, case["folder"])
    sys.modules.pop("meshwright_plan", None)
    importlib.invalidate_caches()
    try:
        config = ConfigManager().parse_args(["--module", "meshwright_plan", "--config", "plan"])
        config.__post_init__()
    finally:
        sys.path.remove(case["folder"])
    dims = ParallelDims.from_config(config.parallelism, case["num_devices"])
    config.model_spec.model.update_from_config(config=config)
    batch = config.training.local_batch_size * dims.dp_replicate * dims.dp_shard
    assert config.training.global_batch_size % batch == 0, "Trainer asserts this"
    return {
        "degrees": [dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp, dims.pp, dims.ep],
        "stages": config.parallelism.module_fqns_per_model_part,
        "checkpointing": type(config.activation_checkpoint).__qualname__,
        "microbatches": config.training.global_batch_size // batch,
    }


answer(read)

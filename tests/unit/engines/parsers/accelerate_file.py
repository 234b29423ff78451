"""Accelerate's own reading of a file: the parser of `accelerate launch`, the environment that it makes, and the plugins of that.

A case: the file, and the ranks.
"""

import os

from accelerate import ParallelismConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from harness import answer


def read(case):
    before = dict(os.environ)
    args = launch_command_parser().parse_args(["--config_file", case["path"], "script.py"])
    args, _, _ = _validate_launch_command(args)
    os.environ |= prepare_multi_gpu_env(args)
    try:
        plugin = FullyShardedDataParallelPlugin()
        degrees = ParallelismConfig()
        assert degrees.total_size == case["num_devices"], f"{degrees} for {case['num_devices']} ranks"
        return {
            "degrees": [degrees.dp_replicate_size, degrees.dp_shard_size, degrees.cp_size, degrees.tp_size],
            "reshards": plugin.reshard_after_forward,
            "checkpointing": plugin.activation_checkpointing,
            "offloads": type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
            "version": plugin.fsdp_version,
            "precision": args.mixed_precision,
            "nodes": args.num_machines,
        }
    finally:
        os.environ.clear()
        os.environ |= before


answer(read)

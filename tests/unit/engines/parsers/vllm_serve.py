"""vLLM's own parsers of `vllm serve` and `vllm bench serve`. A case: ``command`` (serve or bench) and its ``words``."""

from harness import answer
from vllm.benchmarks.serve import add_cli_args
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

SERVE = make_arg_parser(FlexibleArgumentParser())
BENCH = FlexibleArgumentParser()
add_cli_args(BENCH)

ENGINE = (
    "model", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel", "max_num_seqs",
    "max_num_batched_tokens", "max_model_len", "kv_cache_dtype", "block_size", "enable_prefix_caching", "quantization",
)  # fmt: skip


def read(case):
    if case["command"] == "bench":
        args = BENCH.parse_args(case["words"])
        return {name: getattr(args, name) for name in ("random_input_len", "random_output_len", "num_prompts")}
    args = SERVE.parse_args(case["words"])
    args.model = getattr(args, "model_tag", None) or args.model
    validate_parsed_serve_args(args)
    engine = AsyncEngineArgs.from_cli_args(args)
    return {name: getattr(engine, name) for name in ENGINE} | {"connector": _connector(engine)}


def _connector(engine):
    transfer = engine.kv_transfer_config
    return None if transfer is None else transfer.kv_connector


answer(read)

"""SGLang's own parsers of `sglang.launch_server` and `sglang.bench_serving`; its server's needs no GPU. A case: ``words``."""

import argparse

from harness import answer
from sglang.srt.server_args import ServerArgs

SERVER = argparse.ArgumentParser()
ServerArgs.add_cli_args(SERVER)
NAMES = (
    "tp_size", "pp_size", "attn_dp_size", "ep_size", "max_running_requests", "chunked_prefill_size", "max_total_tokens",
    "page_size", "kv_cache_dtype", "disable_radix_cache", "disaggregation_mode", "context_length",
)  # fmt: skip


def read(case):
    args = SERVER.parse_args(case["words"])
    return {name: getattr(args, name) for name in NAMES}


answer(read)

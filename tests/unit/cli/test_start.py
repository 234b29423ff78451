"""What a command imports before it does anything: the launcher of a job waits for no model, compiler or algebra."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from meshwright.cli.apply import apply
from meshwright.runtime.job.launch import launch
from meshwright.runtime.job.worker import Job
from meshwright.runtime.training.metrics import read_new_records
from meshwright.runtime.training.options import prepare_options
print(*sorted({"torch._dynamo", "torch.distributed.tensor", "sympy", "sklearn", "transformers"} & sys.modules.keys()))
"""


def test_launcher_imports_torch_and_nothing_that_only_ranks_need() -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_names_of_the_runtime_are_functions_and_classes_whatever_was_imported_before() -> None:
    from meshwright import runtime

    for name in runtime.__all__:
        assert callable(getattr(runtime, name)), name

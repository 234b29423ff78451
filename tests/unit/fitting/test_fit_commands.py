"""The commands that fit what is shipped: wrong arguments and tables end in one message."""

from __future__ import annotations

import pytest
from meshwright.fitting.__main__ import main


@pytest.mark.parametrize("fit", ["overlap", "intervals", "coefficients", "collectives", "gemm", "hosts", "all_reduce"])
@pytest.mark.parametrize("arguments", [[], ["no/such/table"]])
def test_wrong_arguments_end_with_exit_code_two_and_a_message(fit: str, arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main([fit, *arguments])
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err

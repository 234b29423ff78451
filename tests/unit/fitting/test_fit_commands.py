"""The commands that fit what is shipped: wrong arguments and tables end in one message."""

from __future__ import annotations

from importlib import import_module

import pytest

COMMANDS = (
    "fitting.overlap",
    "fitting.intervals",
    "fitting.coefficients",
)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("arguments", [[], ["no/such/table.csv"]])
def test_wrong_arguments_end_with_exit_code_two_and_a_message(name: str, arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        import_module(f"meshwright.{name}").main(arguments)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err

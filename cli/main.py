"""The `meshwright` command: one file per subcommand; heavy imports happen inside them, so that --help is quick."""

from __future__ import annotations

import typer

from .apply import ApplyCommand, apply
from .calibrate import calibrate
from .catalogue import devices, models
from .doctor import doctor
from .engines import compare, export, import_configuration
from .estimate import estimate
from .experts import experts_app
from .explain import explain
from .plan import plan
from .profile_app import profile_app
from .report import report
from .tokens import tokens
from .validate import validate

app = typer.Typer(
    name="meshwright",
    help="Plan how to spread the training of a large model over a cluster, see why, and run the plan.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(plan)
app.command()(estimate)
app.command()(explain)
app.command()(report)
app.command(cls=ApplyCommand)(apply)
app.command()(tokens)
app.command()(export)
app.command("import")(import_configuration)
app.command()(compare)
app.command()(calibrate)
app.command()(validate)
app.command()(models)
app.command()(devices)
app.command()(doctor)
app.add_typer(experts_app, name="experts")
app.add_typer(profile_app, name="profile")

OWN_PROCESS = "own process"
"""What the context carries where the command may count its time from the start of the process."""


def main() -> None:
    """Console entry point: the process is this command's, from its start to its end."""
    app(obj=OWN_PROCESS)

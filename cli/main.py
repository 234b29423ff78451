"""The `meshwright` command: one file per subcommand; heavy imports happen inside them, so that --help is quick."""

from __future__ import annotations

import typer

from .apply import ApplyCommand, apply, tokens
from .catalogue import devices, doctor, models
from .experts import experts_app
from .explain import compare, explain, export, import_configuration, report
from .plan import estimate, plan
from .profile import profile_app
from .validate import calibrate, validate

app = typer.Typer(
    name="meshwright",
    help="Plan how to spread the training of a large model over a cluster, see why, and run the plan.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(short_help="The fastest layout that fits, and why it won; writes plan.json.")(plan)
app.command(short_help="What one given layout costs, whether it fits or not.")(estimate)
app.command(short_help="What binds a plan, what more of each resource is worth, why not.")(explain)
app.command(short_help="Draw a plan: a page for a browser, a trace for Perfetto.")(report)
app.command(cls=ApplyCommand, short_help="Run a plan: train its model, or your own script under it.")(apply)
app.command()(tokens)
app.command()(export)
app.command("import", short_help="Read an engine's configuration as a layout.")(import_configuration)
app.command(short_help="Set a present configuration next to a plan.")(compare)
app.command(short_help="Correct a profile by what `apply` measured.")(calibrate)
app.command(short_help="Score predictions against a table of measured runs.")(validate)
app.command()(models)
app.command()(devices)
app.command(short_help="What is installed and here, what will not work and why.")(doctor)
app.add_typer(experts_app, name="experts")
app.add_typer(profile_app, name="profile")

FROM_START = "from the start of the process"
"""What the context carries where the command may count its time from the start of the process."""


def main() -> None:
    """Console entry point: the process is this command's, from its start to its end."""
    app(obj=FROM_START)

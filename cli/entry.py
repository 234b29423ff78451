"""The program `meshwright`: nothing is imported before Ctrl-C ends it without a traceback."""

from __future__ import annotations

import signal

from .interrupt import leave_now


def main() -> None:
    """Run the command line of this process, from its start to its end."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background ignores it
        signal.signal(signal.SIGINT, leave_now)
    from .main import main as run

    run()


if __name__ == "__main__":
    main()

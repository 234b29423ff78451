"""Renders chat templates in a process of its own: started by path, it knows jinja2 and nothing of ours.

A template comes with a model folder, so it is another's program: jinja2's immutable sandbox keeps it from everything but its
arguments, this process has a limit of memory, and whoever asks ends it when it takes too long. One JSON object a line in, one out.
"""

from __future__ import annotations

import datetime as dt
import json
import resource
import sys
from typing import Any, NoReturn

MEMORY_BYTES = 2**30
MAX_CHARACTERS = 2**22
"""Of what a template renders."""


def main() -> None:
    """Answer lines ``{"template", "context"}`` with ``{"text"}`` or ``{"error"}`` until there are no more."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    def refuse(message: Any = "") -> NoReturn:
        raise ValueError(str(message)[:500])

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: dt.datetime.now().strftime(form)
    compiled: dict[str, Any] = {}
    for line in sys.stdin:
        try:
            request = json.loads(line)
            source = request["template"]
            if source not in compiled:
                compiled[source] = environment.from_string(source)
            text = compiled[source].render(**request["context"])
            answer = {"text": text} if len(text) <= MAX_CHARACTERS else {"error": f"it renders {len(text)} characters"}
        except Exception as error:  # whatever a template does
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Cases as JSON on stdin, what the engine makes of each on stdout: ``{"found": ...}``, or ``{"error": ...}`` where it refuses."""

import json
import os
import sys


def answer(read):
    answers, stdout = [], os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints, also from C and at its end, goes to stderr
    for case in json.load(sys.stdin):
        try:
            answers.append({"found": read(case)})
        except (Exception, SystemExit) as error:  # whatever an engine refuses with
            answers.append({"error": f"{type(error).__name__}: {error}"})
    json.dump(answers, stdout)
    stdout.close()

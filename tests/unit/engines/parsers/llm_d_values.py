"""The schema of the chart llm-d-modelservice, of a checkout that LLM_D_MODELSERVICE names. A case: ``values``."""

import json
import os
import sys
from pathlib import Path

import jsonschema
from harness import answer

FOLDER = os.environ.get("LLM_D_MODELSERVICE")
if not FOLDER:
    sys.exit("ModuleNotFoundError: LLM_D_MODELSERVICE names no checkout of llm-d-modelservice")
SCHEMA = json.loads((Path(FOLDER) / "charts/llm-d-modelservice/values.schema.json").read_text())


def read(case):
    jsonschema.validate(case["values"], SCHEMA)
    return {
        "sections": sorted(set(case["values"]) & set(SCHEMA["properties"])),
        "unknown": sorted(set(case["values"]) - set(SCHEMA["properties"])),
    }


answer(read)

"""Lets the tests of engines import the options of Megatron-LM beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

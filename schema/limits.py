"""The limits of what comes from outside, in one table; each is checked where the value enters.

They keep every command within seconds and a gigabyte, and stand far beyond what exists. What a search does within them is bounded
by its time limit.
"""

from __future__ import annotations

MAX_TEXT_BYTES = 2**30
"""Of a file that is read as text: the largest plans have some hundred megabytes, and a device file never ends."""

MAX_TABLE_LINES, MAX_TABLE_BYTES = 4 * 10**6, 2**27
"""Of a file with an entry in each line, as unpacked: twice the longest list below, and what its lines take."""

MAX_LINE_BYTES = 2**20
"""Of such a line."""

MAX_COUNT = 10**9
"""Of sizes that a user states: a width, a vocabulary, tokens, sequences of a batch."""

MAX_GENERATED = 2**20
"""Tokens of an answer, each a pass."""

MAX_LAYERS = 512
"""Blocks of a model: four times the deepest that are published. Cutting them into stages takes time and memory by the square."""

MAX_MODEL_LAYERS = 2 * MAX_LAYERS + 16
"""Of a model with embedding, head and heads for further tokens, when each block is cut in halves."""

MAX_EXPERTS = 2**16
"""Of a layer."""

MAX_DEVICES = 10_000_000
"""Of a cluster: more than anybody has built by a factor of ten."""

MAX_SIZES = 20_000
"""Numbers of nodes of all offers that are compared for cost or energy: a second, and 80 MB."""

MAX_CHANGES = 10**6
"""Lines of a record of machines that come and go."""

MAX_SEQUENCES = 10**6
"""Of a batch of unequal lengths."""

MAX_REQUESTS = 2 * 10**6
"""Of a recording."""

MAX_PREFIX_BLOCKS = 4 * 10**6
"""Different ones of a recording, of some 150 bytes each."""

MAX_LOADS = 10**8
"""Entries of an array of loads or choices of experts: a gigabyte, and more than any model has."""

MAX_EXPERT_GPUS = 2**15
"""GPUs that share the experts of a layer: a hundred times those of the largest deployments (320)."""

MAX_EXCHANGES = 2 * 10**7
"""Exchanges of two experts' slots that are looked at together: arrays of 160 MB, several of them at a time."""

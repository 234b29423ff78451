from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


FloatArray = NDArray[np.float64]


BoolArray = NDArray[np.bool_]


Array = Any
"""A float or a float array; all arguments of one call broadcast together."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_TESTS = Path(__file__).parent
sys.path[:0] = [str(_TESTS), *(str(directory) for directory in _TESTS.iterdir() if directory.is_dir())]

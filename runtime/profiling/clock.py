"""How long this process has been alive, the start of Python and all imports included."""

from __future__ import annotations

import os
import time
from pathlib import Path

_IMPORTED = time.perf_counter()
_START_TIME = 19  # place of `starttime` after the command's name in /proc/self/stat, see proc(5)


def seconds_since_start() -> float:
    """Seconds since the system started this process (to 10 ms); where the system does not tell,
    since this module was imported."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - start
    except (OSError, AttributeError):
        return time.perf_counter() - _IMPORTED

"""Have a file or directory for oneself, among the processes of this host and, where the file system knows them, of others.

The kernel drops a lock with the process that holds it. A file system without locks (Lustre without `-o flock`, some NFS) costs one
warning: what would be kept apart is then the user's affair.
"""

from __future__ import annotations

import fcntl
import logging
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)


def take(file: int | IO[str] | IO[bytes], path: Path) -> bool:
    """Lock `file`, which is `path`, until it is closed. False when another has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning("%s cannot be locked (%s): see to it yourself that nothing else uses it", path, error.strerror)
    return True

"""`python -m dflash_mp.child COMMAND…`: become COMMAND, tied to the life of the supervisor.

The tie survives the exec, so even a command that knows nothing of dflash-mp dies with its parent, from its first instruction on.
"""

from __future__ import annotations

import os
import sys

from dflash_mp.process import die_with_parent


def main(command: list[str]) -> None:
    """Replace this process by `command`; ends with 127 when there is no such command."""
    die_with_parent()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""`python -m dflash_mp.bench.on_device DEVICES COMMAND…`: become COMMAND, which sees one GPU only.

DEVICES are values of CUDA_VISIBLE_DEVICES, separated by commas, one for each of torchrun's local ranks; the same may appear several
times, which CUDA_VISIBLE_DEVICES alone does not allow.
"""

from __future__ import annotations

import os
import sys


def main(devices: str, command: list[str]) -> None:
    """Replace this process by `command`; ends with an error when there is no such command."""
    os.environ["CUDA_VISIBLE_DEVICES"] = devices.split(",")[int(os.environ["LOCAL_RANK"])]
    os.environ["LOCAL_RANK"] = "0"
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

"""`python -m dflash_mp.torchrun …`: torchrun, with the same arguments, that ends with the exit code of the first process that failed.

Plain torchrun ends with 1 whatever happened and prints a page of its own traceback after the error that matters; killed, it leaves a directory
of empty logs behind, and a worker that was still starting. Here such a worker ends itself (`dflash_mp.process`), and logs go where
`--log-dir` says or nowhere.
"""

from __future__ import annotations

import os
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from dflash_mp.process import LEADER, die_with_parent, mark_of


def main(arguments: list[str]) -> int:
    """Run torchrun; 0, or the exit code of the first failed rank (128 + signal when a signal ended it, or torchrun itself)."""
    die_with_parent()
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # torchrun's own default, without its banner; a rank sets its threads itself
    os.environ[LEADER] = mark_of(os.getpid())
    try:
        torchrun(["--log-dir", os.devnull, *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"torchrun: rank {rank} was the first to fail, with exit code {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as signalled:
        print(f"torchrun: stopped by {signalled.sigval.name}", file=sys.stderr)
        return 128 + signalled.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m dflash_mp.target.follower`: a process of a split feeder that isn't its leader (`dflash_mp.target.split_group`).

Started by the leader only, which hands it the configuration; makes the same target, capture and self-check as the leader, then its passes.
SIGTERM and SIGINT are the leader's business, whoever gets them: the end of the pipe, or of the leader, ends this process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

import torch

from dflash_mp import logs
from dflash_mp.config import RunConfig
from dflash_mp.control_groups import usable_cores
from dflash_mp.data.store import open_dataset
from dflash_mp.errors import DflashError
from dflash_mp.process import die_with_parent
from dflash_mp.target.capture import Capture
from dflash_mp.target.split import load_split
from dflash_mp.target.split_group import STOPS, Follower

log = logging.getLogger("dflash_mp.feed")


def main() -> None:
    """Ends with 0 when the leader has done, with a `DflashError`'s exit code when it can't follow."""
    die_with_parent()
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    follower = Follower(sys.stdin.buffer)
    index = int(follower.facts["index"])
    logs.start(logs.Speaker(f"feeder {index}, process", follower.share.rank), logs.Settings.of(os.environ))
    try:
        _follow(follower)
        code = 0
    except DflashError as error:
        log.error("%s", error)
        code = error.exit_code
    except Exception:
        log.exception("this process failed")
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what ends libraries in order would wait for the other processes


def _follow(follower: Follower) -> None:
    config = RunConfig.model_validate(follower.facts["config"])
    torch.set_num_threads(config.feed.threads or min(torch.get_num_threads(), usable_cores()))
    dataset = open_dataset(config)
    row = dataset.row("train", 0)
    follower.join()
    target = load_split(config.target, follower.share, row)
    capture = Capture(
        target,
        last_hidden=config.train.objective == "distill",
        row_tokens=dataset.manifest.row_tokens,
        compiled=config.feed.compile,
    )
    capture.self_check(row)
    follower.follow(capture)


if __name__ == "__main__":
    main()

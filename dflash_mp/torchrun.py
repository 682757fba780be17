"""`python -m dflash_mp.torchrun …`: torchrun, with the same arguments, that lets its ranks finish and ends with the first failure's exit code.

Plain torchrun ends with 1 whatever happened and prints a page of its own traceback after the error that matters; asked to stop, it kills ranks
after 30 s, be their checkpoint written or not; killed, it leaves a directory of empty logs behind, and a worker that was still starting.
Here SIGTERM, SIGINT and SIGHUP are handed to this machine's ranks as SIGTERM, each time one comes, and torchrun ends when they have; without ranks yet it
ends at once with 128 + signal, and so it does when a second signal, three seconds or more later, still finds none. When they have ended by themselves
a signal changes nothing. A worker that was still starting ends itself (`dflash_mp.process`), and logs go where `--log-dir` says or nowhere.

A world of one (`--standalone --nproc-per-node 1 [--virtual-local-rank] -m MODULE …`) has nobody to meet: its rank is started at once, without
torchrun, whose imports take seconds.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from dflash_mp import logs
from dflash_mp.process import LEADER, SAME_SIGNAL_SECONDS, children_of, die_with_parent, mark_of, send_signal

log = logging.getLogger("dflash_mp.torchrun")

_LOOK_SECONDS = 0.2  # between two looks for ranks that torchrun has started again
_ALONE = ["--standalone", "--nproc-per-node", "1"]
_OWN_GPU = "--virtual-local-rank"
_PLACE_ALONE = {  # as torchrun tells it
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), "1"),
}
_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(arguments: list[str]) -> int:
    """Run torchrun; 0, or the exit code of the first failed rank (128 + signal when a signal ended it, or torchrun itself)."""
    die_with_parent()
    logs.start(logs.Speaker("torchrun"), logs.Settings.of(os.environ))
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # torchrun's own default, without its banner; a rank sets its threads itself
    os.environ[LEADER] = mark_of(os.getpid())
    started = threading.Event()
    sys.addaudithook(lambda event, facts: _notice_ranks(event, facts, started))
    _hand_signals_on(started)
    for own_gpu in (False, True):
        options = [*_ALONE, *([_OWN_GPU] if own_gpu else []), "-m"]
        if arguments[: len(options)] == options:
            return _run_alone(arguments[len(options) :], own_gpu)
    return _run_torchrun(arguments)


def _run_alone(module: list[str], own_gpu: bool) -> int:
    """Run `module`, a name and its arguments, as the only rank; `own_gpu`: it sees the first GPU only."""
    environment = {**os.environ, **_PLACE_ALONE}
    if own_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    code = subprocess.Popen([sys.executable, "-u", "-m", *module], env=environment).wait()
    return 0 if code == 0 else _failed(0, code)


def _run_torchrun(arguments: list[str]) -> int:
    # Late: they import PyTorch.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    if any("rdzv-backend" in argument.replace("_", "-") for argument in arguments):
        # Ranks that meet again after a restart must not find in torchrun's own store the addresses of those that are dead.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        torchrun(["--log-dir", os.devnull, "--signals-to-handle", "SIGQUIT", *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _failed(rank, failure.exitcode)
    except SignalException as signalled:
        log.info("stopped by %s", signalled.sigval.name)
        return 128 + signalled.sigval
    return 0


def _failed(rank: int, code: int) -> int:
    """Say so; the exit code for it. `code` is negative when a signal ended the rank."""
    log.error("rank %d was the first to fail, with exit code %d", rank, code)
    return code if code > 0 else 128 - code


def _notice_ranks(event: str, facts: tuple[Any, ...], started: threading.Event) -> None:
    """Set `started` when the first rank is started: a process that is given a LOCAL_RANK."""
    if event == "subprocess.Popen" and "LOCAL_RANK" in (facts[3] or {}):
        started.set()


def _hand_signals_on(started: threading.Event) -> None:
    """From a thread: while torchrun waits for other machines its main thread is in a call that no Python signal handler interrupts."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in _STOP:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda number, frame: None)
    threading.Thread(target=_stop_ranks, args=(reading, started), name="signals", daemon=True).start()


def _stop_ranks(reading: int, started: threading.Event) -> None:
    """Ask the ranks to stop for each signal that comes; they agree with those of other machines on a step, save, and exit 0.

    A rank that was not training yet ends with an error, for which torchrun may start all ranks again (`--max-restarts`): those are asked, too.
    """
    stopping: signal.Signals | None = None
    asked: set[int] = set()
    first = 0.0
    while True:
        ready, _, _ = select.select([reading], [], [], None if stopping is None else _LOOK_SECONDS)
        number = signal.Signals(os.read(reading, 1)[0]) if ready else None
        if number in _STOP:
            if stopping is None:
                first = time.monotonic()
            stopping, asked = number, set()
        if stopping is None:
            continue
        ranks = children_of(os.getpid())
        for rank in set(ranks) - asked:
            send_signal(rank, signal.SIGTERM)
        asked.update(ranks)
        without = not started.is_set() or time.monotonic() - first > SAME_SIGNAL_SECONDS
        if not ranks and number in _STOP and without:
            os.write(2, f"torchrun: stopped by {stopping.name}, without a rank\n".encode())
            os._exit(128 + stopping)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

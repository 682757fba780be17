"""Whether the port is free that ranks of several machines meet at."""

from __future__ import annotations

import socket

from dflash_mp.doctor.finding import Finding, green, yellow
from dflash_mp.listening import who_listens

_RENDEZVOUS = 29500


def check_rendezvous() -> Finding:
    """The port that torchrun's rendezvous takes by default; other hosts need it, `dflash-mp run` does not."""
    about = f"port {_RENDEZVOUS}"
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", _RENDEZVOUS))
        except OSError as error:
            return yellow(
                about,
                f"taken by {who_listens(f'tcp://*:{_RENDEZVOUS}') or 'an unknown process'} ({error.strerror})",
                "give torchrun another one: --rdzv-endpoint HOST:PORT (`dflash-mp run` doesn't use it)",
            )
    return green(about, "free for a rendezvous of several machines")

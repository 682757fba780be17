#!/usr/bin/env bash
# The drafters of this host, one of several: torchrun, with a rendezvous on the first host.
#
#   launchers/trainers.sh --head ADDRESS --nodes N --node K -c run.yaml [--set KEY=VALUE …]
#
#   --head ADDRESS    address of host 0, where every host reaches it; that host's run_dir gets checkpoints and figures, the others need none
#   --nodes N         hosts that train
#   --node K          this one's number, from 0
#   --port PORT       of the rendezvous on host 0 (default: 29500)
#
# Starts train.drafters processes. Hosts may be started in any order, within ten minutes. Ctrl-C or SIGTERM on one of them is enough: all ranks finish
# the step, rank 0 saves, and every host's script ends. Exit code 0: trained to the last step; 75, on host 0: stopped in order before it, start all of
# them again to go on; 143: stopped before there was anything to save; another: that of the rank which failed first. Environment: PYTHON (default: python), GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME
# (default: the network interface that leads to ADDRESS).
set -euo pipefail

python="${PYTHON:-python}" head="" nodes="" node="" port=29500
while [ $# -gt 0 ]; do
    case "$1" in
        --head) head="$2"; shift 2 ;;
        --nodes) nodes="$2"; shift 2 ;;
        --node) node="$2"; shift 2 ;;
        --port) port="$2"; shift 2 ;;
        *) break ;;
    esac
done
if [ -z "$head" ] || [ -z "$nodes" ] || [ -z "$node" ]; then
    echo "usage: trainers.sh --head ADDRESS --nodes N --node K [--port PORT] -c run.yaml [--set KEY=VALUE …]" >&2
    exit 2
fi

asked="" code=0 torchrun=""
trap 'asked=yes; [ -z "$torchrun" ] || kill -TERM "$torchrun" 2> /dev/null || true' TERM INT HUP
facts="$("$python" - "$head" "$@" <<'END'
import fcntl
import socket
import struct
import sys
import time

import click

from dflash_mp.errors import DflashError
from dflash_mp.options import config_options, load

SIOCGIFADDR = 0x8915
NAME_SECONDS = 60


def interface_to(head: str) -> str:
    """The interface whose address this host would use towards `head`; empty where it can't be told (IPv6)."""
    deadline = time.monotonic() + NAME_SECONDS
    while True:
        try:
            family, _, _, _, place = socket.getaddrinfo(head, 9, type=socket.SOCK_DGRAM)[0]
            break
        except socket.gaierror:  # in a cluster a name may come after its host
            if time.monotonic() > deadline:
                raise
            time.sleep(1)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        mine = probe.getsockname()[0]
        if mine.startswith("127."):
            return "lo"
        for _, name in socket.if_nameindex() if family == socket.AF_INET else ():
            try:
                found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(found[20:24]) == mine:
                return name
    return ""


@click.command()
@click.argument("head")
@config_options
def main(head, config_file, overrides):
    try:
        drafters = load(config_file, overrides).config.train.drafters
        print(drafters, interface_to(head))
    except (DflashError, OSError) as error:
        sys.exit(f"trainers.sh: {error}" if isinstance(error, DflashError) else f"trainers.sh: --head {head}: {error}")


main()
END
)"
[ -z "$asked" ] || exit 143  # there is nothing to save yet
read -r drafters interface <<< "$facts"
if [ -n "$interface" ]; then
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$interface}"
fi

setsid "$python" -m dflash_mp.torchrun --nnodes "$nodes" --node-rank "$node" --master-addr "$head" --master-port "$port" \
    --nproc-per-node "$drafters" -m dflash_mp.drafter "$@" &
torchrun=$!
[ -z "$asked" ] || kill -TERM "$torchrun"  # a signal came before there was one to hand it to
while true; do
    asked="" code=0
    wait "$torchrun" || code=$?
    [ -n "$asked" ] || break  # a signal ends `wait`, not torchrun
done
if [ "$code" -eq 0 ] && [ "$node" -eq 0 ]; then
    "$python" -m dflash_mp.cli trained "$@" || code=$?
fi
exit "$code"

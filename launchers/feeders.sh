#!/usr/bin/env bash
# The feeders of this host: starts one for each address in feed.endpoints that is this host's, on the device that feed.devices gives it.
#
#   launchers/feeders.sh -c run.yaml [--set KEY=VALUE …]
#
# Feeders hold nothing that could be lost: end them with Ctrl-C or SIGTERM, after the drafters. If one fails the others end, too, and the script with its
# exit code. Needs bash 4.3.
# Environment: PYTHON (default: python).
set -euo pipefail

python="${PYTHON:-python}"
indices="$("$python" - "$@" <<'END'
import sys

import click

from dflash_mp.addresses import is_of_this_host
from dflash_mp.errors import DflashError
from dflash_mp.options import config_options, load


@click.command()
@config_options
def main(config_file, overrides):
    try:
        endpoints = load(config_file, overrides).config.feeder_endpoints()
    except DflashError as error:
        sys.exit(f"feeders.sh: {error}")
    here = [str(index) for index, endpoint in enumerate(endpoints) if is_of_this_host(endpoint)]
    if not here:
        sys.exit(f"feeders.sh: none of {', '.join(endpoints)} is an address of this host\n  → give feed.endpoints addresses that this host has")
    print(*here)


main()
END
)"

feeders=() asked="" code=0
stop() { kill -TERM "${feeders[@]}" 2> /dev/null || true; }
trap 'asked=yes; stop' TERM INT HUP
for index in $indices; do
    setsid "$python" -m dflash_mp.cli feed --index "$index" "$@" &  # a session of its own: Ctrl-C comes once, from here
    feeders+=("$!")
done
[ -z "$asked" ] || stop  # a signal came between the first and the last

while [ -n "$(jobs -rp)" ]; do
    ended=0
    wait -n || ended=$?  # a signal ends `wait`, not a feeder
    if [ "$ended" -ne 0 ] && [ -z "$asked" ]; then
        echo "feeders.sh: a feeder ended with exit code $ended; the others on this host end, too" >&2
        code=$ended asked=yes
        stop
    fi
done
exit "$code"

#!/usr/bin/env bash
# Installs dflash-mp with its tests' dependencies into a virtual environment, fetches the demo target, and runs linters and tests.
# Needs Python ≥ 3.10 with venv and pip, and a package index. Tests that want root, `ip`, Prometheus, Chromium or Slurm say what they miss
# and are skipped; on Debian, `.ci/run` installs these first. Arguments go to pytest. Environment:
#   PYTHON            interpreter for a new environment (default: python3)
#   VENV              the environment to make or use (default: .venv)
#   DFLASH_MP_DEMO    where the demo target lies or is fetched to (default: .cache/demo)
set -euo pipefail
cd "$(dirname "$0")/.."

. launchers/environment.sh
stage "environment" make_environment "[test]"
# Tests start hundreds of processes: none of them has to compile the package, even where Python is told to keep no bytecode.
python -m compileall -q dflash_mp
# The official client, for comparison; its pinned requirements are those of serving, so it comes without them.
stage "official client" python -m pip install --quiet --disable-pip-version-check --no-deps dflash==0.1.0
export DFLASH_MP_DEMO="${DFLASH_MP_DEMO:-$PWD/.cache/demo}"
# Many processes share the cores: one thread each, asleep while it waits.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
dflash-mp demo "$DFLASH_MP_DEMO" &
demo=$!
trap 'kill "$demo" 2> /dev/null || true' EXIT
stage "ruff check" ruff check
stage "ruff format" ruff format --check
stage "mypy" mypy
stage "demo target" wait "$demo"
# Tests in parts, two at a time on two cores: who is done takes the next. The first, which takes longest, is what the others leave out.
# Those of the stream mostly wait, and count seconds: they run beside the two, and before them whenever they need a core.
PARTS=(tests/integration "tests/launchers tests/docker tests/network tests/monitor" tests/threads)
WAITING=tests/stream
LISTED="${PARTS[*]} $WAITING"
PARTS=("--ignore=${LISTED// / --ignore=}" "${PARTS[@]}")
take_parts() {
    local nice="$1" code=0 part place
    for part in "${@:2}"; do
        place="$reports/${part//[^a-z]/-}"
        mkdir "$place" 2> /dev/null || continue # it is taken
        # shellcheck disable=SC2086 # a list
        nice -n "$nice" pytest $part > "$place/report" 2>&1 &
        echo $! > "$place/pid"
        wait $! || code=$?
        rm "$place/pid"
        echo "pytest $part: $(tail -n 1 "$place/report")"
    done
    return "$code"
}
all_parts() {
    local code=0 worker
    reports="$(mktemp -d)"
    workers=()
    trap 'kill "${workers[@]}" $(cat "$reports"/*/pid 2> /dev/null) 2> /dev/null || true; rm -rf "$reports"' EXIT
    for worker in 1 2; do take_parts 5 "${PARTS[@]}" & workers+=($!); done
    take_parts 0 "$WAITING" & workers+=($!)
    for worker in "${workers[@]}"; do wait "$worker" || code=$?; done
    cat "$reports"/*/report
    return "$code"
}
if [ $# -gt 0 ]; then stage "pytest" pytest "$@"; else stage "pytest" all_parts; fi
print_stages

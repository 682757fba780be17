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
stage "bytecode" python -m compileall -q dflash_mp
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
stage "rest of dflash-mp demo" wait "$demo"
trap - EXIT
# Two chains of parts for two cores. Tests of the stream mostly wait, and those of threads watch for hangs: they run beside the two, and first
# whenever they need a core.
RUNS=(tests/integration "tests/launchers tests/docker tests/network tests/monitor")
LISTED="${RUNS[*]} tests/threads tests/stream"
REST="--ignore=${LISTED// / --ignore=}"
# chain NICE PART…: pytest on one part after the other, each with a report of its own.
chain() {
    local nice="$1" code=0 part report
    trap '' INT # the report is shown when pytest has ended
    for part in "${@:2}"; do
        [ ! -e "$reports/stop" ] || return "$code"
        report="$reports/${part//[^a-z]/-}"
        # shellcheck disable=SC2086 # a list
        nice -n "$nice" pytest $part > "$report" 2>&1 &
        echo $! > "$report.pid"
        wait $! || code=$?
        rm "$report.pid"
        echo "pytest $part: $(tail -n 1 "$report")"
    done
    return "$code"
}
all_parts() {
    local code=0 chain
    reports="$(mktemp -d)" || return 1
    chains=()
    chain 5 "$REST" & chains+=($!)
    chain 5 "${RUNS[@]}" & chains+=($!)
    chain 0 tests/stream tests/threads & chains+=($!)
    trap 'interrupted' INT # the terminal interrupts every pytest, too
    trap 'interrupt; interrupted' TERM
    for chain in "${chains[@]}"; do wait "$chain" || code=$?; done
    trap - INT TERM
    show_reports
    return "$code"
}
# Tests end their processes themselves when pytest is interrupted, but not when it is killed.
interrupt() { cat "$reports"/*.pid 2> /dev/null | xargs --no-run-if-empty kill -INT 2> /dev/null || true; }
interrupted() {
    trap - INT TERM
    touch "$reports/stop"
    wait "${chains[@]}"
    show_reports
    exit 130
}
show_reports() {
    rm -f "$reports/stop"
    cat "$reports"/*
    rm -rf "$reports"
}
if [ $# -gt 0 ]; then stage "pytest" pytest "$@"; else stage "pytest" all_parts; fi
print_stages

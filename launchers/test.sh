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
# The official client, for comparison; its pinned requirements are those of serving, so it comes without them.
stage "official client" python -m pip install --quiet --disable-pip-version-check --no-deps dflash==0.1.0
export DFLASH_MP_DEMO="${DFLASH_MP_DEMO:-$PWD/.cache/demo}"
stage "demo target" dflash-mp demo "$DFLASH_MP_DEMO"
# Many processes share the cores: one thread each, asleep while it waits.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
stage "ruff check" ruff check
stage "ruff format" ruff format --check
stage "mypy" mypy
# Tests that start runs mostly wait for them: the two halves share two cores well. The first half's report comes last.
RUNS=(tests/integration tests/launchers tests/docker tests/network tests/monitor)
both_halves() {
    local code=0
    report="$(mktemp)"
    pytest "${RUNS[@]}" > "$report" 2>&1 &
    runs=$!
    trap 'kill "$runs" 2> /dev/null || true; rm -f "$report"' EXIT
    pytest "${RUNS[@]/#/--ignore=}" || code=$?
    wait "$runs" || code=$?
    cat "$report"
    return "$code"
}
if [ $# -gt 0 ]; then stage "pytest" pytest "$@"; else stage "pytest" both_halves; fi
print_stages

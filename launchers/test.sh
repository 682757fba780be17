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
stage "pytest" pytest "$@"
print_stages

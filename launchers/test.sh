#!/usr/bin/env bash
# Installs dflash-mp with its tests' dependencies into a virtual environment, fetches the demo target, and runs linters and tests.
# Needs Python ≥ 3.10 with venv and pip, and a package index. Arguments go to pytest. Environment:
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
# Some tests make hosts of their own on this machine (tests/network); without root or `ip` they are skipped, and say so.
install_ip() {
    if command -v ip > /dev/null || ! command -v apt-get > /dev/null || [ "$(id -u)" != 0 ]; then return 0; fi
    { apt-get update -qq && apt-get install -y -qq iproute2; } > /dev/null || echo "iproute2 could not be installed: tests/network will be skipped"
}
stage "iproute2" install_ip
# The dashboard is asked of a real Prometheus, the report is opened in a real browser; without them those tests are skipped, and say so.
install_viewers() {
    if ! command -v apt-get > /dev/null || [ "$(id -u)" != 0 ]; then return 0; fi
    if command -v prometheus > /dev/null && command -v chromium > /dev/null; then return 0; fi
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus chromium; } > /dev/null ||
        echo "prometheus and chromium could not be installed: parts of tests/monitor will be skipped"
}
stage "prometheus, chromium" install_viewers
# launchers/slurm.sbatch is submitted to a real Slurm. Its packages bring services along, so they are installed in CI only.
install_slurm() {
    if [ -z "${CI:-}" ] || command -v slurmctld > /dev/null || ! command -v apt-get > /dev/null || [ "$(id -u)" != 0 ]; then return 0; fi
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge; } > /dev/null || echo "Slurm could not be installed: tests/launchers/test_slurm.py will be skipped"
}
stage "Slurm" install_slurm

# Many processes share the cores: one thread each, asleep while it waits.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
stage "ruff check" ruff check
stage "ruff format" ruff format --check
stage "mypy" mypy
stage "pytest" pytest "$@"
print_stages

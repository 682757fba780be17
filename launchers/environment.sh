# shellcheck shell=bash
# Sourced by the launchers: a virtual environment with dflash-mp in it, and stages that tell how long they took.

PYTHON="${PYTHON:-python3}"
VENV="${VENV:-.venv}"
# The package takes any torch from 2.11 on; the scripts install one that is known to work (set TORCH for another, say a build for CUDA 12).
TORCH="${TORCH:-torch==2.13.0}"
STAGES=()

# stage NAME COMMAND…: run COMMAND and note its seconds for print_stages; ends the script when COMMAND fails.
stage() {
    local name="$1" started=$SECONDS
    shift
    echo "=== $name"
    "$@" || { local code=$?; echo "=== $name failed (exit code $code): $*" >&2; exit "$code"; }
    STAGES+=("$(printf '%5d s  %s' $((SECONDS - started)) "$name")")
}

print_stages() {
    printf '%s\n' "${STAGES[@]}" "$(printf '%5d s  in all' "$SECONDS")"
}

# make_environment EXTRAS: make $VENV if need be, activate it, install torch and this package (editable) with EXTRAS, for example "[test]".
make_environment() {
    if [ ! -x "$VENV/bin/python" ]; then
        command -v "$PYTHON" > /dev/null || { echo "$PYTHON not found: install Python 3.10 or newer, or set PYTHON" >&2; return 1; }
        "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
            || { echo "$PYTHON is $("$PYTHON" -V 2>&1), dflash-mp needs 3.10 or newer: set PYTHON" >&2; return 1; }
        "$PYTHON" -m venv "$VENV" \
            || { echo "$PYTHON cannot make virtual environments: install its venv module (Debian: apt install python3-venv)" >&2; return 1; }
    fi
    # shellcheck disable=SC1091  # made above
    . "$VENV/bin/activate"
    python -m pip install --quiet --disable-pip-version-check "$TORCH" -e ".$1"
}

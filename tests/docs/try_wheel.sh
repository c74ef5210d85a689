#!/usr/bin/env bash
# Builds the wheel, installs it into an empty environment and uses it in a folder outside the checkout: a packaged configuration by
# name, evaluation, a project of one's own. Called by `make package`.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD

rm -rf build/wheel build/lib
.venv/bin/python -m build --wheel --outdir build/wheel >/dev/null
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" "$root"/build/wheel/vla_rl-*.whl pytest
export PATH=$folder/venv/bin:$PATH OMP_NUM_THREADS=1
unset PYTHONPATH

vla-rl --version
small=(--sim.num_envs 4 --sim.tasks '[push]' --start.episodes 4 --start.bc.steps 4 --start.bc.shards 1
    --algorithm.iterations 3 --algorithm.chunks 2 --evaluation.episodes 4 --evaluation.validation_episodes 4)
vla-rl train quickstart "${small[@]}" --run-dir runs/small
vla-rl eval runs/small --episodes 4 --json
vla-rl init my_task
cd my_task
pip install --quiet --disable-pip-version-check --no-deps -e .
pytest -q
vla-rl train my_task.yaml --algorithm.iterations 4 --json >/dev/null
echo "the wheel works outside the checkout"

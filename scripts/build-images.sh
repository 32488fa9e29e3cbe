#!/usr/bin/env bash
# Builds the images of compose/ as decoupled-diloco/NAME:TAG and prints their sizes.
#
#   build-images.sh [TAG]     TAG is dev where it is not given
#
# TORCH_INDEX names another package index for torch. Without it and where PyTorch's index of CPU builds is
# out of reach, the wheel that pip finds is put into wheels/ first, from pip's cache if it is there.
set -euo pipefail
cd "$(dirname "$0")/.."

TAG=${1:-dev}
PYTHON=$(scripts/setup.sh --print-python)

have_torch() { compgen -G 'wheels/torch-*.whl' >/dev/null; }

if [[ -z ${TORCH_INDEX:-} ]] && ! have_torch; then
    TORCH_INDEX=$("$PYTHON" -c 'import sys; sys.path.insert(0, "scripts")
import setup_environment
setup_environment.say = lambda text: print("setup:", text, file=sys.stderr)
print(setup_environment.probe_cpu_index())')
    if [[ -z $TORCH_INDEX ]]; then
        [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
        "$PYTHON" -m pip download -q --no-deps --dest wheels "$(grep '^torch==' requirements.lock)"
    fi
fi

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
for target in synchronizer learner link; do
    arguments=(--target "$target" --tag "decoupled-diloco/$target:$TAG"
        --build-arg "VERSION=$version" --build-arg "REVISION=$revision")
    [[ -z ${TORCH_INDEX:-} ]] || arguments+=(--build-arg "TORCH_INDEX=$TORCH_INDEX")
    [[ -z ${BASE:-} ]] || arguments+=(--build-arg "BASE=$BASE")
    docker buildx build --load --quiet "${arguments[@]}" . >/dev/null
    docker image inspect "decoupled-diloco/$target:$TAG" --format '{{.Size}}' |
        awk -v name="$target:$TAG" '{printf "image %-24s %6.0f MB\n", name, $1 / 1e6}'
done

#!/usr/bin/env bash
# The container tests: builds the images, starts a fleet with compose, and runs tests/containers on it.
# Everything that it made is removed at the end, also after a failure or Ctrl-C.
#
#   container-tests.sh [arguments for pytest]
#
# Starts a container engine where none answers (container-engine.sh), and ends that one again. Only where
# none can be started are the tests skipped, which the last line says.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-$PWD/.venv/bin/python}
export IMAGE_TAG=test-$$
export COMPOSE_PROJECT_NAME=diloco-test-$$
export COMPOSE_FILE=compose/compose.yaml
overlays=compose/observability.yaml:compose/chaos.yaml:compose/small-disks.yaml
label=com.docker.compose.project=$COMPOSE_PROJECT_NAME

step() { echo "container tests: $* ($SECONDS s)"; }

remains() {
    docker ps --all --quiet --filter "label=$label"
    docker volume ls --quiet --filter "label=$label"
    # By name: those that faults make carry no label.
    docker network ls --quiet --filter "name=$COMPOSE_PROJECT_NAME"
    docker images --quiet "decoupled-diloco/*:$IMAGE_TAG"
}

remove() {
    local code=$?
    trap - EXIT
    trap '' INT TERM
    export COMPOSE_FILE=$COMPOSE_FILE:$overlays
    [[ -z ${tests:-} ]] || kill "$tests" 2>/dev/null || true
    if [[ $code != 0 ]]; then
        docker compose --profile tools ps --all || true
        docker compose --profile tools logs --tail 40 || true
    fi
    step "removing everything"
    docker compose --profile tools down --volumes --remove-orphans --timeout 20 >/dev/null 2>&1 || true
    docker network ls --quiet --filter "name=$COMPOSE_PROJECT_NAME" |
        xargs --no-run-if-empty docker network rm >/dev/null || true
    docker images --format '{{.Repository}}:{{.Tag}}' "decoupled-diloco/*:$IMAGE_TAG" |
        xargs --no-run-if-empty docker rmi >/dev/null || true
    if [[ -n $(remains) ]]; then
        echo "container tests: something is left of $COMPOSE_PROJECT_NAME: $(remains)" >&2
        code=1
    fi
    [[ $answered == yes ]] || scripts/container-engine.sh down || code=1
    step "exit code $code"
    exit "$code"
}

answered=yes
docker info >/dev/null 2>&1 || answered=no
engine=0
scripts/container-engine.sh up prometheus || engine=$?
if [[ $engine == 69 ]]; then
    echo "container tests: SKIPPED, no container engine can be started here (see above)"
    exit 0
elif [[ $engine != 0 ]]; then
    exit "$engine"
fi
trap remove EXIT
trap 'exit 130' INT TERM

step "building images"
scripts/build-images.sh "$IMAGE_TAG"
step "running tests"
# In the background: who ends this script does not wait for them.
PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 CONTAINER_TESTS=1 "$PYTHON" -m pytest -p timeout -p asyncio -q \
    tests/containers "$@" &
tests=$!
wait "$tests"
tests=
step "passed"

#!/usr/bin/env bash
# Finds a Python that can make an environment and hands over to setup_environment.py.
# PYTHON names one; otherwise the first of the usual names that is new enough.
set -euo pipefail

usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

candidates=(python3 python3.11 python3.12 python3.13 python3.14 python)
if [[ -n "${PYTHON:-}" ]]; then
    candidates=("$PYTHON")
fi
for candidate in "${candidates[@]}"; do
    if usable "$candidate"; then
        if [[ "${1:-}" == --print-python ]]; then
            command -v "$candidate"
            exit 0
        fi
        exec "$candidate" "$(dirname "$0")/setup_environment.py" "$@"
    fi
done
echo "error: no usable Python among: ${candidates[*]}; it must be 3.11 or later, with its venv" \
    "module (Debian and Ubuntu: apt install python3-venv); name one with make PYTHON=/path/to/python" >&2
exit 64

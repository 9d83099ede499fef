#!/bin/sh
# Sets up all that the tests need (scripts/setup_env.sh), then runs the one check (scripts/check).
# Arguments go to pytest: sh tests/run.sh -k gqa
set -eu
ROOT=$(cd "$(dirname "$0")/.." && pwd)
. "$ROOT/scripts/setup_env.sh"
setup_venv test,dev
setup_test_adapters
PYTHON=$VENV_PYTHON exec sh "$ROOT/scripts/check" "$@"

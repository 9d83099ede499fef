#!/bin/sh
# Makes an environment, finds or installs a WebGPU adapter, and decodes text with the attention of a
# small real model on it. Arguments go to quickstart.py: sh examples/quickstart.sh --tokens 80
set -eu
ROOT=$(cd "$(dirname "$0")/.." && pwd)
. "$ROOT/scripts/setup_env.sh"
setup_venv examples
setup_one_adapter
exec "$VENV_PYTHON" "$ROOT/examples/quickstart.py" "$@"

#!/bin/sh
# Makes an environment, finds or installs a WebGPU adapter, decodes text with the attention of a small
# real model on it, then embeds sentences with a packed encoder, whose operators ORT's CPU EP lacks.
# Arguments go to quickstart.py: sh examples/quickstart.sh --tokens 80
set -eu
ROOT=$(cd "$(dirname "$0")/.." && pwd)
. "$ROOT/scripts/setup_env.sh"
setup_venv examples
setup_one_adapter
"$VENV_PYTHON" "$ROOT/examples/quickstart.py" "$@"
printf '\n--- sentences, by a packed encoder\n'
exec "$VENV_PYTHON" -W ignore "$ROOT/examples/embed_sentences.py"

#!/bin/sh
# Makes a virtual environment with this package in it: install.sh PYTHON VENV EXTRA. Does nothing where that is done.
# The stamp holds a checksum of pyproject.toml and of the Python version. `dev` contains `demo`.
set -eu

python=$1 venv=$2 extra=$3

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Waypath needs Python 3.11 or newer; $python is $("$python" -V 2>&1). Try: make PYTHON=python3.11 …" >&2
    exit 2
}

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
wanted=$(cksum < pyproject.toml; "$venv/bin/python" -V)
for have in "$extra" dev; do
    if [ -f "$venv/waypath-$have" ] && [ "$(cat "$venv/waypath-$have")" = "$wanted" ]; then
        exit 0
    fi
done

echo "installing waypath[$extra] into $venv …"
# Byte code is left to the first import: an install compiles thousands of files that are never loaded.
"$venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check --editable ".[$extra]"
"$venv/bin/python" -c 'import jax, flax.nnx, optax, orbax.checkpoint, grpc' # compiled once here, not by six processes at once
printf '%s\n' "$wanted" > "$venv/waypath-$extra"

#!/usr/bin/env bash
# Regenerates every table and figure. ./reproduce.sh --help says the rest; the work is done by nnpiper/artifact.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
root=$(pwd -P)
python="$root/.venv/bin/python"
installed=.venv/nnpiper-installed     # written last: what .venv was made from
installing=.venv/nnpiper-installing   # there while packages are being installed: .venv is then made anew

# nothing of the caller's Python, Jupyter, IPython and matplotlib settings reaches the results
unset PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONSAFEPATH JUPYTER_PATH JUPYTER_CONFIG_PATH
export PYTHONHASHSEED=0 PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 MPLBACKEND=Agg JUPYTER_PREFER_ENV_PATH=1
export IPYTHONDIR="$root/.venv/share/ipython" MPLCONFIGDIR="$root/.venv/share/matplotlib"
export JUPYTER_RUNTIME_DIR="$root/.venv/share/jupyter/runtime" JUPYTER_CONFIG_DIR="$root/.venv/share/jupyter/config"

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

if new_enough "$python" && [[ ! -e $installing ]]; then
    base="$python"
else
    for base in "${PYTHON:-python3}" python3 python3.11 python3.12 python3.13 python3.14 ""; do
        [[ -n $base ]] || { echo "reproduce.sh: no Python 3.11 or newer found; install one or set PYTHON=..." >&2; exit 2; }
        if new_enough "$base"; then break; fi
    done
fi

# options are checked before anything is installed
if [[ ${1:-} != test ]]; then
    "$base" -c 'import sys; from nnpiper.artifact import parse; parse(sys.argv[1:])' "$@"
    for option in "$@"; do
        case $option in -h | --help) exit 0 ;; esac
    done
fi

made_from="$root
$(cat requirements.lock pyproject.toml)"
if [[ $base != "$python" || ! -e $installed || $(cat "$installed") != "$made_from" ]]; then
    echo "installing the locked packages into .venv (a few minutes, about 2 GB)"
    if [[ $base != "$python" ]]; then
        rm -rf .venv
        mkdir .venv
    fi
    touch "$installing"
    if [[ $base != "$python" ]]; then
        "$base" -m venv .venv || { echo "reproduce.sh: $base cannot make a venv (Debian: python3-venv)" >&2; exit 2; }
    fi
    "$python" -m pip install --quiet --requirement requirements.lock
    "$python" -m pip install --quiet --no-deps --editable .
    # an import check; it also builds matplotlib's font cache
    "$python" -c 'import IPython, matplotlib.font_manager, numba, pandas, papermill, pytest, torch, nnpiper'
    rm "$installing"
    printf '%s\n' "$made_from" >"$installed.tmp"
    mv "$installed.tmp" "$installed"
fi

# before Python starts: torch and numba size their thread pools when they are loaded
threads=$("$python" -c 'from nnpiper.provenance import usable_cores; print(usable_cores())')
for name in OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS NUMBA_NUM_THREADS; do
    export "$name=${!name:-$threads}"
done

if [[ ${1:-} == test ]]; then
    exec "$python" -m pytest --numprocesses 2 --dist loadfile "${@:2}"  # two cores are what the README asks for
fi
exec "$python" -m nnpiper.artifact "$@"

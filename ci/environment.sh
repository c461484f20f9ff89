# Makes .venv, or what venv_name names, with stretto and everything its tests need; sourced by ci/demo, ci/gpu and
# ci/test.
#
# The environment is made once. The package is installed (not in editable mode, so that what is tested is
# what users get) whenever its sources differ from those installed last, and the dependencies whenever
# pyproject.toml does. PYTHON names the interpreter to use; without it the first that fits is taken.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
venv=$PWD/${venv_name:-.venv}

say() { printf '== %s\n' "$*"; }

fits() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
        >/dev/null 2>&1
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        fits "$PYTHON" && command -v "$PYTHON" && return
        echo "PYTHON names $PYTHON, which does not run here, or is no Python from 3.11 to 3.13 with venv" >&2
        return 1
    fi
    for candidate in python3.11 python3.12 python3.13 python3; do
        if fits "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    echo "No Python from 3.11 to 3.13 with venv was found. Install one (Debian: apt install" \
        "python3.11-venv python3-dev build-essential), or name it: PYTHON=/path/to/python $0" >&2
    return 1
}

sources_hash() {
    { find stretto runtime collectives hlo_frontend plugin -name '*.py' -o -name '*.pyx' \
          -o -name '*.pxi' ! -name '_pjrt_abi.pxi'  # which the build makes
      echo setup.py; echo stretto-start.pth; echo pyproject.toml; echo README.md; } | LC_ALL=C sort |
        while read -r file; do sha256sum "$file"; done | sha256sum
}

if ! "$venv/bin/python" -c '' 2>/dev/null; then
    python=$(find_python) || exit 1
    say "making ${venv_name:-.venv} with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv" || exit 1
fi

dependencies=$(sha256sum pyproject.toml)
if [ "$(cat "$venv/dependencies.sha256" 2>/dev/null)" != "$dependencies" ]; then
    say "installing dependencies into ${venv_name:-.venv}"
    "$venv/bin/python" -m pip install --quiet --upgrade pip 'setuptools>=77' 'Cython>=3.1' wheel || exit 1
    "$venv/bin/python" -m pip install --quiet --no-build-isolation '.[test]' || exit 1
    rm -f "$venv/sources.sha256"
    echo "$dependencies" >"$venv/dependencies.sha256"
fi

sources=$(sources_hash)
if [ "$(cat "$venv/sources.sha256" 2>/dev/null)" != "$sources" ]; then
    say "building and installing stretto"
    rm -rf build
    "$venv/bin/python" -m pip install --quiet --no-build-isolation --no-deps --force-reinstall . || exit 1
    rm -rf build ./*.egg-info
    echo "$sources" >"$venv/sources.sha256"
else
    say "stretto in ${venv_name:-.venv} is up to date"
fi

# The ranks' own commands first: mpiexec must belong to the MPI that mpi4py uses.
export PATH=$venv/bin:$PATH
unset PYTHONPATH PYTHONHOME

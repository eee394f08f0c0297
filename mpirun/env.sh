# The environment for programs of this checkout:  . mpirun/env.sh
# (The Makefile does this for its targets; the paths are this checkout's.)

if [ -n "${BASH_VERSION:-}" ]; then _root=${BASH_SOURCE[0]}; else _root=$0; fi  # in zsh, $0 is this file
_root=$(cd "$(dirname "$_root")/.." && pwd)

# Where the Horovod and mpirun of the user's own interpreter lie, if the set-up uses them.
if [ -f "$_root/.venv/inherited-path" ]; then PATH="$(cat "$_root/.venv/inherited-path"):$PATH"; fi
export PATH="$_root/.venv/bin:$PATH"

# Open MPI refuses to run as root unless told twice; in a container one often is.
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
unset _root

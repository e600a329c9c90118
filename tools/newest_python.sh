#!/bin/sh
# Prints the path of the newest Python that works.
#
#     tools/newest_python.sh [LOWEST [HIGHEST]]
#
# LOWEST is 3.11 if nothing is said. The environment variable PYTHON, a command
# or a path, takes the place of the search; it must be within the bounds, too,
# but may be newer than what is looked for. Without any that works, it says so
# and exits with 1.
#
# A Python works if it runs and can make environments. That its command exists
# proves nothing: pyenv puts commands on the PATH for versions that are
# installed and not chosen, and these only say "command not found". So the
# versions in pyenv's own folder are tried after those on the PATH.
set -eu

VERSIONS="3.14 3.13 3.12 3.11" # newest first; all that pyproject.toml lists
LAST_JAX_FOR_3_11=0.10.2

lowest=${1:-3.11}
highest=${2:-}
if [ "$lowest" = "$highest" ]; then
  wanted="Python $lowest"
elif [ -n "$highest" ]; then
  wanted="Python $lowest to $highest"
else
  wanted="Python $lowest or later"
fi

main() {
  if [ -n "${PYTHON:-}" ]; then
    found=$(version_and_path "$PYTHON")
    case $PYTHON in # a name that pyenv has taken may be found elsewhere
      python3.*) found=${found:-$(first_that_works "${PYTHON#python}")} ;;
    esac
    [ -n "$found" ] || fail "PYTHON=$PYTHON does not run, or cannot make" \
      "environments, for which it needs the modules venv and ensurepip."
    is_wanted "${found%% *}" ||
      fail "$wanted is needed, and PYTHON=$PYTHON is Python ${found%% *}."
    answer "$found"
  fi
  for version in $VERSIONS; do
    if is_wanted "$version"; then
      found=$(first_that_works "$version")
      [ -z "$found" ] || answer "$found"
    fi
  done
  fail "$wanted is needed, and none was found that works. Install one, or say" \
    "where it is: PYTHON=/path/to/python."
}

# Prints the path of what was found, and what is worth knowing of its version.
answer() {
  [ "${1%% *}" != 3.11 ] ||
    echo "Python 3.11: JAX ends at $LAST_JAX_FOR_3_11" >&2
  echo "${1#* }"
  exit 0
}

fail() {
  echo "newest_python.sh: $*" >&2
  exit 1
}

is_wanted() {
  is_at_most "$lowest" "$1" &&
    { [ -z "$highest" ] || is_at_most "$1" "$highest"; }
}

# Whether the first version, such as 3.9, is at most the second, such as 3.11.
is_at_most() {
  [ "${1%%.*}" -lt "${2%%.*}" ] ||
    { [ "${1%%.*}" -eq "${2%%.*}" ] && [ "${1#*.}" -le "${2#*.}" ]; }
}

# The line of version_and_path for a Python of this version, if there is one.
first_that_works() {
  candidates "$1" | while read -r candidate; do
    found=$(version_and_path "$candidate")
    if [ "${found%% *}" = "$1" ]; then
      echo "$found"
      break
    fi
  done
}

# What may be a Python of this version, one path a line, the likeliest first.
candidates() {
  on_path "python$1"
  for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
    ls -d "$root/versions/$1".*"/bin/python$1" 2>/dev/null | sort -rV
  done
}

# Each file of this name on the PATH, since the first may be one that fails.
on_path() (
  IFS=:
  for folder in $PATH; do
    [ ! -x "$folder/$1" ] || echo "$folder/$1"
  done
)

# Prints "3.13 /path/to/python3.13" if this Python works, and else nothing.
version_and_path() {
  "$1" -c 'if True:
    import ensurepip, sys, venv
    print("%d.%d" % sys.version_info[:2], sys.executable)
  ' 2>/dev/null </dev/null || true
}

main

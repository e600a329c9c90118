#!/bin/sh
# Makes a virtual environment with the newest Python, unless it is there.
#
#     tools/make_venv.sh FOLDER [LOWEST [HIGHEST]]
#
# PYTHON and the bounds are those of newest_python.sh. If FOLDER is there, but
# with another version of Python, or was left half made, it is made anew: but
# only if the marks of make are in it, since it may be of value to somebody. The
# mark `made` is as old as the environment, so that make can compare.
set -eu

folder=$1
shift
python=$("$(dirname "$0")/newest_python.sh" "$@")

# What the environments of one Python share, such as "3.13", or "3.13t" for a
# build without the global lock. Nothing, if it or the module $2 does not work.
version() {
  "$1" -c "import $2, sys
print('%d.%d' % sys.version_info[:2] + sys.abiflags)" 2>/dev/null || true
}

asked=$(version "$python" venv)
if [ -e "$folder" ]; then
  found=$(version "$folder/bin/python" pip)
  if [ "$found" = "$asked" ]; then
    [ -e "$folder/made" ] || touch "$folder/made"
    exit 0
  fi
  if [ ! -e "$folder/made" ] && ! ls "$folder"/installed-* >/dev/null 2>&1; then
    echo "make_venv.sh: $folder is no environment of Python $asked with pip," \
      "and was not made by make. Remove it, or name another folder by VENV=," \
      "or another Python by PYTHON=." >&2
    exit 1
  fi
  rm -rf "$folder"
fi
echo "Making $folder with Python $asked" >&2
mkdir -p "$folder"
touch "$folder/made" # first, so that what is interrupted is known as ours
"$python" -m venv "$folder"

#!/usr/bin/env bash
# symbols.sh NM LEVEL OBJECT...: an object of a level gives the linker one function, which enters its kernels in the level's
# table. Anything shared, an inline function of a header say, might be taken from the object of a level that the CPU lacks.
set -euo pipefail
nm=$1 level=$2
shift 2
for object in "$@"; do
  file=$(basename "$object" .cpp.o)
  exported=$("$nm" --extern-only --defined-only "$object" | awk '{ print $NF }' | tr '\n' ' ')
  if [ "$exported" != "pi_${file}_$level " ]; then
    echo "$object exports: $exported" >&2
    exit 1
  fi
done

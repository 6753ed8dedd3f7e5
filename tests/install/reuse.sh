#!/bin/sh
# A compiler launcher, in front of the compiler's command line: takes flashjit's objects from the build folder REUSE, where they
# are, so that a test of another project's build does not compile flashjit again.
for word; do
  [ "$last" != -o ] || object=$word
  last=$word
done
case $object in
  *CMakeFiles/flashjit_*)
    for ready in "$REUSE/CMakeFiles/${object##*CMakeFiles/}" "$REUSE/tools/CMakeFiles/${object##*CMakeFiles/}"; do
      [ ! -e "$ready" ] || exec cp "$ready" "$object"
    done
    ;;
esac
exec "$@"

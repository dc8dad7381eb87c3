#!/usr/bin/env bash
# The tests of the native part with AddressSanitizer and UndefinedBehaviorSanitizer in it (GCC; `make sanitize`).
# Without LeakSanitizer: Python itself ends with memory it has not freed.
set -euo pipefail
cd "$(dirname "$0")/.."
compiler=${CXX:-g++}
flags=(-std=c++17 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -fPIC
       -ffp-contract=off -fvisibility=hidden -w -Ilocalspec/native/ggml)
folder=build/sanitized
mkdir -p "$folder"
printf '%s\n' localspec/native/*.cpp | xargs -P "$(nproc)" -I{} bash -c \
    '"$0" "${@:2}" -c "$1" -o "'"$folder"'/$(basename "$1" .cpp).o"' "$compiler" {} "${flags[@]}"
"$compiler" -shared "${flags[@]}" -o "$folder/liblocalspec_native.so" "$folder"/*.o

LD_PRELOAD="$($compiler -print-file-name=libasan.so) $($compiler -print-file-name=libubsan.so)" \
ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
LOCALSPEC_NATIVE_LIBRARY="$PWD/$folder/liblocalspec_native.so" \
    .venv/bin/python -m pytest -p no:cacheprovider tests/llama/test_native_*.py "$@"

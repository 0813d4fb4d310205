#!/usr/bin/env bash
# Fuzzes the C++ index builder with AddressSanitizer and UndefinedBehaviorSanitizer, for a minute unless told.
#   tests/fuzz/run.sh 600
# Needs clang with libFuzzer; CXX names another one. Where there is none it says so, and that is no failure.
set -euo pipefail
cd "$(dirname "$0")/../.."

seconds=${1:-60}
python=${PYTHON:-.venv/bin/python}
clang=${CXX:-clang++}
build=build/fuzz
mkdir -p "$build/corpus"

if ! command -v "$clang" >/dev/null ||
  ! echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
    "$clang" -x c++ -fsanitize=fuzzer,address - -o "$build/probe" 2>/dev/null; then
  echo "tests/fuzz: not run: $clang is not found, or has no libFuzzer (Debian: apt-get install clang)"
  exit 0
fi

mapfile -t flags < <("$python" - <<'END'
import sysconfig

import pybind11

library = sysconfig.get_config_var("LIBDIR")
for flag in (
    f"-I{pybind11.get_include()}",
    f"-I{sysconfig.get_path('include')}",
    f"-L{library}",
    f"-Wl,-rpath,{library}",
    f"-lpython{sysconfig.get_config_var('LDVERSION')}",
):
    print(flag)
END
)
"$clang" -std=c++17 -O1 -g -fno-omit-frame-pointer -ffp-contract=off -Icsrc \
  -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -fno-sanitize=vptr,function \
  tests/fuzz/index_builder_fuzz.cpp "${flags[@]}" -o "$build/index_builder_fuzz"

PYTHONHOME=$("$python" -c 'import sys; print(sys.base_prefix)')
PYTHONPATH=$("$python" -c 'import os, numpy; print(os.path.dirname(os.path.dirname(numpy.__file__)))')
export PYTHONHOME PYTHONPATH
# The interpreter is never ended, so that all it holds would count as leaked.
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1
"$build/index_builder_fuzz" -max_total_time="$seconds" -max_len=512 -timeout=120 -rss_limit_mb=2048 \
  -malloc_limit_mb=512 -verbosity=0 -print_final_stats=1 -artifact_prefix="$build/" "$build/corpus" 2>&1 |
  grep -v "AddressSanitizer failed to allocate" # what absurd sizes are refused by
echo "tests/fuzz: nothing found in $seconds s"

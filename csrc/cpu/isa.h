// The same loop for several x86-64 levels in one library, the best that the processor has being chosen at run time.
//
// A body is a lambda marked MEGALITE_BODY whose callees are all inline: inlined into a function with a `target`, it
// is vectorised for that target. Elsewhere (arm64, other compilers) the compiler's own target serves.
#pragma once

#include "../philox.h"

#if defined(__GNUC__)
#define MEGALITE_BODY __attribute__((always_inline))
#else
#define MEGALITE_BODY
#endif

namespace megalite::cpu {

#if defined(__x86_64__) && defined(__GNUC__)

template <class Body>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,prefer-vector-width=512"))) void run_v4(
    const Body& body) {
  body();
}

template <class Body>
__attribute__((target("avx2,bmi2"))) void run_v3(const Body& body) {
  body();
}

template <class Body>
void run_for_isa(const Body& body) {
  static const bool has_v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  static const bool has_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
  if (has_v4) {
    run_v4(body);
  } else if (has_v3) {
    run_v3(body);
  } else {
    body();
  }
}

#else

template <class Body>
void run_for_isa(const Body& body) {
  body();
}

#endif

}  // namespace megalite::cpu

// Compiles the same loop for several x86-64 levels; the best level of the processor is selected at run time.
//
// A body is a lambda marked MEGALITE_BODY whose callees are all inline: inlined into a function with a `target`, it
// is vectorised for that target. On arm64 and with other compilers, the compiler's default target is used.
#pragma once

#include <cstdlib>
#include <string>

#include "../philox.h"

#if defined(__GNUC__)
#define MEGALITE_BODY __attribute__((always_inline))
#else
#define MEGALITE_BODY
#endif

namespace megalite::cpu {

enum class Isa { kDefault, kAvx2, kAvx512 };

#if defined(__x86_64__) && defined(__GNUC__)

// Returns the processor's best level, or a lower one named by MEGALITE_CPU_CAPABILITY.
inline Isa chosen_isa() {
  static const Isa chosen = [] {
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const char* asked = std::getenv("MEGALITE_CPU_CAPABILITY");
    const std::string limit = asked ? asked : "avx512";
    if (has_avx512 && limit == "avx512") return Isa::kAvx512;
    return has_avx2 && limit != "default" ? Isa::kAvx2 : Isa::kDefault;
  }();
  return chosen;
}

template <class Body>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,fma,prefer-vector-width=512"))) void run_avx512(
    const Body& body) {
  body();
}

template <class Body>
__attribute__((target("avx2,bmi2,fma"))) void run_avx2(const Body& body) {
  body();
}

template <class Body>
void run_for_isa(const Body& body) {
  switch (chosen_isa()) {
    case Isa::kAvx512:
      return run_avx512(body);
    case Isa::kAvx2:
      return run_avx2(body);
    case Isa::kDefault:
      return body();
  }
}

#else

inline Isa chosen_isa() { return Isa::kDefault; }

template <class Body>
void run_for_isa(const Body& body) {
  body();
}

#endif

}  // namespace megalite::cpu

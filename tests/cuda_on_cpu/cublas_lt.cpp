// As much of cuBLASLt as csrc/cuda uses, on a CPU: naive products of 16-bit matrices in host memory, into fp32 too.
//
// It is strict where the documentation is (https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api): sizes and
// values of attributes, leading dimensions, shapes, alignments, pointers that an epilogue needs, the algorithm and the
// workspace that were found for this very problem. What is wrong is said on standard error.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

enum Status { kSuccess = 0, kInvalidValue = 7, kNotSupported = 15 };
enum Type { kFloat = 0, kHalf = 2, kBFloat16 = 14 };
constexpr int kComputeFloat = 68;
constexpr uint32_t kGeluAux = 160, kGeluAuxBias = 164, kGeluGradient = 192, kGeluGradientBias = 208, kSumsOfB = 512;
constexpr uint64_t kAlgorithm = 0x6D6174726978;
constexpr size_t kWorkspace = 1 << 12;

int refuse(const char* why) {
  std::fprintf(stderr, "cuBLASLt on the CPU: %s\n", why);
  return kInvalidValue;
}

struct Attributes {
  std::map<int, size_t> sizes;  // of the known ones
  std::map<int, uint64_t> values;

  int set(int attribute, const void* value, size_t num_bytes) {
    const auto known = sizes.find(attribute);
    if (known == sizes.end()) return refuse("an attribute that it does not know");
    if (known->second != num_bytes) return refuse("an attribute of another size");
    uint64_t bits = 0;
    std::memcpy(&bits, value, num_bytes);
    values[attribute] = bits;
    return kSuccess;
  }

  uint64_t get(int attribute, uint64_t otherwise = 0) const {
    const auto found = values.find(attribute);
    return found == values.end() ? otherwise : found->second;
  }
};

struct Operation {
  int compute, scale;
  Attributes attributes{{{3, 4}, {4, 4}, {7, 4}, {8, 8}, {11, 8}, {12, 8}}, {}};

  bool transposes_a() const { return attributes.get(3) == 1; }
  bool transposes_b() const { return attributes.get(4) == 1; }
  uint32_t epilogue() const { return static_cast<uint32_t>(attributes.get(7, 1)); }
  void* bias() const { return reinterpret_cast<void*>(attributes.get(8)); }
  void* aux() const { return reinterpret_cast<void*>(attributes.get(11)); }
  int64_t aux_ld() const { return static_cast<int64_t>(attributes.get(12)); }
  bool has_aux() const { return epilogue() != kSumsOfB; }
  bool has_bias() const {
    return epilogue() == kGeluAuxBias || epilogue() == kGeluGradientBias || epilogue() == kSumsOfB;
  }
};

struct Layout {
  int type;
  uint64_t rows, columns;
  int64_t ld;
};

struct Preference {
  Attributes attributes{{{1, 8}, {5, 4}, {6, 4}, {7, 4}, {8, 4}}, {}};
};

struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

float read(int type, const void* data, int64_t i) {
  if (type == kFloat) return static_cast<const float*>(data)[i];
  uint16_t bits;
  std::memcpy(&bits, static_cast<const char*>(data) + 2 * i, 2);
  if (type == kHalf) {
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return static_cast<float>(value);
  }
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

void write(int type, void* data, int64_t i, float value) {
  if (type == kFloat) {
    static_cast<float*>(data)[i] = value;
    return;
  }
  uint16_t bits;
  if (type == kHalf) {
    const _Float16 rounded = static_cast<_Float16>(value);
    std::memcpy(&bits, &rounded, 2);
  } else {
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    bits = static_cast<uint16_t>((wide + 0x7FFF + (wide >> 16 & 1)) >> 16);
  }
  std::memcpy(static_cast<char*>(data) + 2 * i, &bits, 2);
}

double inner(double x) { return std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x); }

double gelu(double x) { return 0.5 * x * (1.0 + std::tanh(inner(x))); }

double gelu_gradient(double x) {
  const double t = std::tanh(inner(x));
  return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * std::sqrt(2.0 / M_PI) * (1.0 + 3.0 * 0.044715 * x * x);
}

// Why there is no such product, or an empty string.
std::string problem_of(
    const Operation& operation, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  const auto inner_of_a = operation.transposes_a() ? a.rows : a.columns;
  const auto rows = operation.transposes_a() ? a.columns : a.rows;
  const auto inner_of_b = operation.transposes_b() ? b.columns : b.rows;
  const auto columns = operation.transposes_b() ? b.rows : b.columns;
  const uint32_t epilogue = operation.epilogue();
  if (operation.compute != kComputeFloat || operation.scale != kFloat) return "it computes in fp32 only";
  if (a.type != kHalf && a.type != kBFloat16) return "it knows bf16 and fp16 only";
  for (const Layout* each : {&a, &b, &c, &d}) {
    if (each->rows == 0 || each->columns == 0) return "an empty matrix";
    if (each->ld < static_cast<int64_t>(each->rows)) return "a leading dimension below the number of rows";
  }
  if (inner_of_a != inner_of_b || rows != d.rows || columns != d.columns) return "shapes that do not match";
  if (c.rows != d.rows || c.columns != d.columns || c.ld != d.ld) return "a c that is not as d";
  if (epilogue != kGeluAux && epilogue != kGeluAuxBias && epilogue != kGeluGradient && epilogue != kGeluGradientBias &&
      epilogue != kSumsOfB) {
    return "an epilogue that it does not know";
  }
  if (b.type != a.type || c.type != d.type || d.type != (epilogue == kSumsOfB ? kFloat : a.type)) {
    return "types that this epilogue is not for";
  }
  if (operation.transposes_b() != (epilogue == kSumsOfB)) return "a transposed b without its epilogue, or the reverse";
  if (operation.has_aux() != (operation.aux() != nullptr)) return "an auxiliary matrix without its epilogue, or the reverse";
  if (operation.aux_ld() % 8 != 0) return "an auxiliary leading dimension that is no multiple of 8";
  if (operation.has_aux() && operation.aux_ld() < static_cast<int64_t>(d.rows)) return "an auxiliary leading dimension below the rows of d";
  if (operation.has_bias() != (operation.bias() != nullptr)) return "a bias without its epilogue, or the reverse";
  return "";
}

bool is_aligned(const void* data, uint64_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }

// The problem that an algorithm was found for.
std::vector<uint64_t> fingerprint(
    const Operation& operation, const Layout& a, const Layout& b, const Layout& d, const Preference& preference) {
  return {
      kAlgorithm, a.rows + (a.columns << 24), b.columns + (d.rows << 24), operation.epilogue(),
      preference.attributes.get(5, 256), preference.attributes.get(6, 256), preference.attributes.get(7, 256),
      preference.attributes.get(8, 256)};
}

}  // namespace

extern "C" {

int cublasLtCreate(void** handle) {
  *handle = new uint64_t{kAlgorithm};
  return kSuccess;
}

int cublasLtMatmulDescCreate(void** operation, int compute, int scale) {
  *operation = new Operation{compute, scale};
  return kSuccess;
}

int cublasLtMatmulDescDestroy(void* operation) {
  delete static_cast<Operation*>(operation);
  return kSuccess;
}

int cublasLtMatmulDescSetAttribute(void* operation, int attribute, const void* value, size_t num_bytes) {
  return static_cast<Operation*>(operation)->attributes.set(attribute, value, num_bytes);
}

int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t columns, int64_t ld) {
  *layout = new Layout{type, rows, columns, ld};
  return kSuccess;
}

int cublasLtMatrixLayoutDestroy(void* layout) {
  delete static_cast<Layout*>(layout);
  return kSuccess;
}

int cublasLtMatmulPreferenceCreate(void** preference) {
  *preference = new Preference;
  return kSuccess;
}

int cublasLtMatmulPreferenceDestroy(void* preference) {
  delete static_cast<Preference*>(preference);
  return kSuccess;
}

int cublasLtMatmulPreferenceSetAttribute(void* preference, int attribute, const void* value, size_t num_bytes) {
  return static_cast<Preference*>(preference)->attributes.set(attribute, value, num_bytes);
}

int cublasLtMatmulAlgoGetHeuristic(
    void* handle, void* operation, void* a, void* b, void* c, void* d, void* preference, int num_wanted,
    Heuristic* found, int* num_found) {
  *num_found = 0;
  if (handle == nullptr || num_wanted < 1) return refuse("no handle, or no algorithm wanted");
  const auto& wanted = *static_cast<Operation*>(operation);
  const auto &of_a = *static_cast<Layout*>(a), &of_b = *static_cast<Layout*>(b);
  const auto &of_c = *static_cast<Layout*>(c), &of_d = *static_cast<Layout*>(d);
  const auto& allowed = *static_cast<Preference*>(preference);
  const std::string problem = problem_of(wanted, of_a, of_b, of_c, of_d);
  if (!problem.empty()) {
    refuse(problem.c_str());
    return kNotSupported;
  }
  if (allowed.attributes.get(1) < kWorkspace) return kNotSupported;
  const auto numbers = fingerprint(wanted, of_a, of_b, of_d, allowed);
  std::copy(numbers.begin(), numbers.end(), found->algorithm);
  found->workspace_bytes = kWorkspace;
  found->status = kSuccess;
  *num_found = 1;
  return kSuccess;
}

int cublasLtMatmul(
    void* handle, void* operation, const void* alpha, const void* a, void* layout_of_a, const void* b,
    void* layout_of_b, const void* beta, const void* c, void* layout_of_c, void* d, void* layout_of_d,
    const uint64_t* algorithm, void* workspace, size_t workspace_bytes, void* stream) {
  if (handle == nullptr || algorithm == nullptr || stream == nullptr) return refuse("no handle, algorithm or stream");
  const auto& wanted = *static_cast<Operation*>(operation);
  const auto &of_a = *static_cast<Layout*>(layout_of_a), &of_b = *static_cast<Layout*>(layout_of_b);
  const auto &of_c = *static_cast<Layout*>(layout_of_c), &of_d = *static_cast<Layout*>(layout_of_d);
  const std::string problem = problem_of(wanted, of_a, of_b, of_c, of_d);
  if (!problem.empty()) return refuse(problem.c_str());
  Preference found;
  for (int i = 0; i < 4; ++i) found.attributes.values[5 + i] = algorithm[4 + i];
  const auto numbers = fingerprint(wanted, of_a, of_b, of_d, found);
  if (!std::equal(numbers.begin(), numbers.end(), algorithm)) return refuse("an algorithm for another problem");
  if (!is_aligned(a, algorithm[4]) || !is_aligned(b, algorithm[5]) || !is_aligned(c, algorithm[6]) ||
      !is_aligned(d, algorithm[7])) {
    return refuse("a matrix that is less aligned than the algorithm needs");
  }
  if (workspace_bytes < kWorkspace || !is_aligned(workspace, 16)) return refuse("a workspace too small or not aligned");
  const float share_of_c = *static_cast<const float*>(beta);
  if (c != d) return refuse("a c that is not d");
  if (share_of_c != 0.0f && wanted.epilogue() != kSumsOfB) return refuse("it adds with one epilogue only");
  std::memset(workspace, 0xFF, kWorkspace);

  const int type = of_a.type;
  const auto rows = static_cast<int64_t>(of_d.rows), columns = static_cast<int64_t>(of_d.columns);
  const auto shared = static_cast<int64_t>(wanted.transposes_b() ? of_b.columns : of_b.rows);
  const uint32_t epilogue = wanted.epilogue();
  const auto element_of_b = [&](int64_t k, int64_t j) {
    return read(type, b, wanted.transposes_b() ? j + k * of_b.ld : k + j * of_b.ld);
  };
  const bool is_backward = epilogue == kGeluGradient || epilogue == kGeluGradientBias;
  for (int64_t i = 0; i < rows; ++i) {
    double sum = 0.0;  // over the columns, of the gradient
    for (int64_t j = 0; j < columns; ++j) {
      double value = 0.0;
      for (int64_t k = 0; k < shared; ++k) {
        const int64_t place = wanted.transposes_a() ? k + i * of_a.ld : i + k * of_a.ld;
        value += static_cast<double>(read(type, a, place)) * element_of_b(k, j);
      }
      value *= *static_cast<const float*>(alpha);
      const int64_t place_of_aux = i + j * wanted.aux_ld();
      if (epilogue == kSumsOfB) {
        if (share_of_c != 0.0f) value += share_of_c * read(of_d.type, c, i + j * of_d.ld);
      } else if (is_backward) {
        value *= gelu_gradient(read(type, wanted.aux(), place_of_aux));
        sum += value;
      } else {
        if (wanted.has_bias()) value += read(type, wanted.bias(), i);
        write(type, wanted.aux(), place_of_aux, static_cast<float>(value));
        value = gelu(value);
      }
      write(of_d.type, d, i + j * of_d.ld, static_cast<float>(value));
    }
    if (is_backward && wanted.has_bias()) write(type, wanted.bias(), i, static_cast<float>(sum));
  }
  for (int64_t j = 0; epilogue == kSumsOfB && j < columns; ++j) {
    double sum = 0.0;
    for (int64_t k = 0; k < shared; ++k) sum += element_of_b(k, j);
    write(of_d.type, wanted.bias(), j, static_cast<float>(sum));
  }
  return kSuccess;
}

}  // extern "C"

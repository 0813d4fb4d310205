// GEMMs with cuBLASLt's epilogues: they apply GELU or multiply by its derivative before writing the result, or also
// sum one of the factors.
//
// torch has loaded the library, and its functions are looked up by name, so a build needs neither its headers nor the
// library. The declarations here match cublasLt.h, cublas_api.h and library_types.h of CUDA 12 and 13
// (https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api). GELU is in the tanh form.
#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "bindings.h"

namespace megalite::cuda {
namespace {

// cublasStatus_t, cublasComputeType_t, cudaDataType_t
constexpr int kSuccess = 0, kComputeFloat = 68, kFloat32 = 0, kFloat16 = 2, kBFloat16 = 14;
// cublasLtMatmulDescAttributes_t, with the type of the attribute
constexpr int kTransposeA = 3, kTransposeB = 4;                 // int32_t
constexpr int kEpilogue = 7;                                    // uint32_t
constexpr int kBiasPointer = 8, kAuxPointer = 11, kAuxLd = 12;  // void*, void*, int64_t: a multiple of 8
// cublasLtEpilogue_t
constexpr uint32_t kBias = 4, kBiasGradient = 16, kGeluAux = 32 | 128, kGeluGradient = 64 | 128, kSumsOfB = 512;
// cublasLtMatmulPreferenceAttributes_t
constexpr int kMaxWorkspaceBytes = 1;                                                       // uint64_t
constexpr int kAlignmentOfA = 5, kAlignmentOfB = 6, kAlignmentOfC = 7, kAlignmentOfD = 8;  // uint32_t

struct Algorithm {  // cublasLtMatmulAlgo_t
  uint64_t data[8];
};

struct Heuristic {  // cublasLtMatmulHeuristicResult_t
  Algorithm algorithm;
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

using Create = int(void** object);
using Destroy = int(void* object);
using SetAttribute = int(void* object, int attribute, const void* value, size_t num_bytes);

struct CublasLt {
  Create *create, *create_preference;
  int (*create_operation)(void** operation, int compute_type, int scale_type);
  int (*create_layout)(void** layout, int type, uint64_t rows, uint64_t columns, int64_t ld);
  Destroy *destroy_operation, *destroy_layout, *destroy_preference;
  SetAttribute *set_of_operation, *set_of_preference;
  int (*find_algorithms)(
      void* handle, void* operation, void* a, void* b, void* c, void* d, void* preference, int num_wanted,
      Heuristic* found, int* num_found);
  int (*multiply)(
      void* handle, void* operation, const void* alpha, const void* a, void* layout_of_a, const void* b,
      void* layout_of_b, const void* beta, const void* c, void* layout_of_c, void* d, void* layout_of_d,
      const Algorithm* algorithm, void* workspace, size_t workspace_bytes, cudaStream_t stream);
};

CublasLt open_library() {
  void* library = nullptr;
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
    if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);  // torch's own, or none
  }
  STD_TORCH_CHECK(library != nullptr, "torch has loaded no cuBLASLt of CUDA 12 or 13");
  CublasLt functions;
  const auto find = [&](auto*& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    STD_TORCH_CHECK(function != nullptr, "cuBLASLt has no ", name);
  };
  find(functions.create, "cublasLtCreate");
  find(functions.create_operation, "cublasLtMatmulDescCreate");
  find(functions.create_layout, "cublasLtMatrixLayoutCreate");
  find(functions.create_preference, "cublasLtMatmulPreferenceCreate");
  find(functions.destroy_operation, "cublasLtMatmulDescDestroy");
  find(functions.destroy_layout, "cublasLtMatrixLayoutDestroy");
  find(functions.destroy_preference, "cublasLtMatmulPreferenceDestroy");
  find(functions.set_of_operation, "cublasLtMatmulDescSetAttribute");
  find(functions.set_of_preference, "cublasLtMatmulPreferenceSetAttribute");
  find(functions.find_algorithms, "cublasLtMatmulAlgoGetHeuristic");
  find(functions.multiply, "cublasLtMatmul");
  return functions;
}

const CublasLt& library() {
  static const CublasLt functions = open_library();
  return functions;
}

void check(int status, const char* what) {
  STD_TORCH_CHECK(status == kSuccess, "cuBLASLt: ", what, " failed with status ", status);
}

// A handle for the current device, shared by all threads. It is never destroyed: at exit CUDA may be gone.
void* handle_of(int32_t device) {
  static std::mutex one_at_a_time;
  static std::map<int32_t, void*> handles;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  void*& handle = handles[device];
  if (handle == nullptr) check(library().create(&handle), "cublasLtCreate");
  return handle;
}

using Owned = std::unique_ptr<void, Destroy*>;

template <class... Arguments>
Owned make(int (*create)(void**, Arguments...), Destroy* destroy, Arguments... arguments) {
  void* object = nullptr;
  check(create(&object, arguments...), "a descriptor");
  return Owned(object, destroy);
}

template <class T>
void set(SetAttribute* setter, const Owned& object, int attribute, T value) {
  check(setter(object.get(), attribute, &value, sizeof value), "an attribute");
}

// The largest power of two up to 256 that divides an address.
uint32_t alignment_of(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return static_cast<uint32_t>(std::min<uintptr_t>(256, address & -address));
}

// A column-major matrix, as in cuBLAS: a contiguous tensor with `columns` rows.
struct Matrix {
  void* data;
  int64_t rows, columns;
  int type;
  bool is_transposed = false;  // as a factor of a GEMM
};

struct Epilogue {
  uint32_t kind;
  void* aux;          // as large as the result; null if `kind` has none
  void* bias;         // null if `kind` has none
  const char* flags;  // do without this epilogue
};

// Writes a b + beta d to d, where beta is 0 or 1.
void multiply(
    const Tensor& like, const Matrix& a, const Matrix& b, float beta, const Matrix& d, const Epilogue& epilogue) {
  using torch::headeronly::ScalarType;
  const CublasLt& lt = library();
  const Place place(like);
  const auto operation = make(lt.create_operation, lt.destroy_operation, kComputeFloat, kFloat32);
  set(lt.set_of_operation, operation, kTransposeA, int32_t{a.is_transposed});
  set(lt.set_of_operation, operation, kTransposeB, int32_t{b.is_transposed});
  set(lt.set_of_operation, operation, kEpilogue, epilogue.kind);
  if (epilogue.aux != nullptr) {
    set(lt.set_of_operation, operation, kAuxPointer, epilogue.aux);
    set(lt.set_of_operation, operation, kAuxLd, d.rows);
  }
  if (epilogue.bias != nullptr) set(lt.set_of_operation, operation, kBiasPointer, epilogue.bias);

  const auto layout_of = [&](const Matrix& matrix) {
    return make<int, uint64_t, uint64_t, int64_t>(
        lt.create_layout, lt.destroy_layout, matrix.type, matrix.rows, matrix.columns, matrix.rows);
  };
  const auto layout_of_a = layout_of(a), layout_of_b = layout_of(b), layout_of_d = layout_of(d);

  const auto preference = make(lt.create_preference, lt.destroy_preference);
  set(lt.set_of_preference, preference, kMaxWorkspaceBytes, uint64_t{32} << 20);  // as torch allows on Hopper
  set(lt.set_of_preference, preference, kAlignmentOfA, alignment_of(a.data));
  set(lt.set_of_preference, preference, kAlignmentOfB, alignment_of(b.data));
  set(lt.set_of_preference, preference, kAlignmentOfC, alignment_of(d.data));
  set(lt.set_of_preference, preference, kAlignmentOfD, alignment_of(d.data));

  void* handle = handle_of(like.get_device_index());
  Heuristic best = {};
  int num_found = 0;
  check(
      lt.find_algorithms(
          handle, operation.get(), layout_of_a.get(), layout_of_b.get(), layout_of_d.get(), layout_of_d.get(),
          preference.get(), 1, &best, &num_found),
      "cublasLtMatmulAlgoGetHeuristic");
  STD_TORCH_CHECK(
      num_found == 1 && best.status == kSuccess, "cuBLASLt has no GEMM of ", d.rows, " x ", d.columns, " x ",
      b.is_transposed ? b.columns : b.rows, " with epilogue ", epilogue.kind, ": do without it by ", epilogue.flags);
  auto workspace =
      torch::stable::new_empty(like, {static_cast<int64_t>(best.workspace_bytes)}, ScalarType::Byte);
  const float alpha = 1.0f;
  check(
      lt.multiply(
          handle, operation.get(), &alpha, a.data, layout_of_a.get(), b.data, layout_of_b.get(), &beta, d.data,
          layout_of_d.get(), d.data, layout_of_d.get(), &best.algorithm, workspace.mutable_data_ptr(),
          best.workspace_bytes, place.stream()),
      "cublasLtMatmul");
}

Matrix matrix_of(const Tensor& tensor, int64_t columns) {
  using torch::headeronly::ScalarType;
  const ScalarType dtype = tensor.scalar_type();
  const int type = dtype == ScalarType::Float ? kFloat32 : dtype == ScalarType::Half ? kFloat16 : kBFloat16;
  return {const_cast<void*>(tensor.const_data_ptr()), tensor.numel() / columns, columns, type};
}

Matrix transposed(Matrix matrix) {
  matrix.is_transposed = true;
  return matrix;
}

void check_factors(const char* op, const Tensor& x, const Tensor& y) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(
      is_like(x, y) && (x.scalar_type() == ScalarType::BFloat16 || x.scalar_type() == ScalarType::Half), op,
      ": both factors must be in bf16, or both in fp16, and on one device");
}

void check_weight(const char* op, const Tensor& x, const Tensor& weight, int64_t shared_dim) {
  check_factors(op, x, weight);
  STD_TORCH_CHECK(
      x.dim() >= 1 && weight.dim() == 2 && x.size(x.dim() - 1) == weight.size(shared_dim), op,
      ": the factors' shapes do not match");
}

constexpr const char* kWithoutGelu = "--recompute-granularity selective --recompute-modules mlp_act";

std::vector<int64_t> with_columns(const Tensor& x, int64_t columns) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = columns;
  return sizes;
}

}  // namespace

namespace ops {

std::tuple<Tensor, Tensor> linear_gelu(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_weight("linear_gelu", x, weight, 1);
  const auto input = torch::stable::contiguous(x), factor = torch::stable::contiguous(weight);
  const auto added = dense(bias);
  const int64_t outputs = weight.size(0), rows = rows_of(x);
  auto value = torch::stable::new_empty(input, with_columns(x, outputs));
  auto before = torch::stable::new_empty(value, value.sizes());
  check_bias("linear_gelu", value, added);
  if (value.numel() == 0) return {value, before};
  void* bias_data = const_cast<void*>(data_of(added));
  multiply(
      x, transposed(matrix_of(factor, outputs)), matrix_of(input, rows), 0.0f, matrix_of(value, rows),
      {kGeluAux | (added ? kBias : 0), before.mutable_data_ptr(), bias_data, kWithoutGelu});
  return {value, before};
}

std::tuple<Tensor, Tensor> gelu_linear_backward(
    const Tensor& grad, const Tensor& weight, const Tensor& before, bool has_bias) {
  check_weight("gelu_linear_backward", grad, weight, 0);
  const auto upper = torch::stable::contiguous(grad), factor = torch::stable::contiguous(weight);
  const auto aux = torch::stable::contiguous(before);
  const int64_t rows = rows_of(grad), columns = weight.size(1);
  STD_TORCH_CHECK(
      is_like(before, grad) && before.numel() == rows * columns,
      "gelu_linear_backward: before must have a row of weight for each of grad, and its dtype and device");
  auto out = torch::stable::new_empty(aux, aux.sizes());
  auto sums = torch::stable::new_empty(aux, {has_bias ? columns : 0});
  if (out.numel() == 0) return {out, torch::stable::zero_(sums)};
  multiply(
      grad, matrix_of(factor, weight.size(0)), matrix_of(upper, rows), 0.0f, matrix_of(out, rows),
      {kGeluGradient | (has_bias ? kBiasGradient : 0), const_cast<void*>(aux.const_data_ptr()),
       has_bias ? sums.mutable_data_ptr() : nullptr, kWithoutGelu});
  return {out, sums};
}

Tensor add_weight_and_bias_gradient_(Tensor total, const Tensor& grad, const Tensor& x, bool overwrite) {
  using torch::headeronly::ScalarType;
  check_factors("add_weight_and_bias_gradient_", x, grad);
  STD_TORCH_CHECK(
      x.dim() == 2 && grad.dim() == 2 && x.size(0) == grad.size(0) && total.is_contiguous() &&
          total.scalar_type() == ScalarType::Float && is_beside(total, grad) &&
          total.numel() == grad.size(1) * x.size(1),
      "add_weight_and_bias_gradient_: total must be contiguous fp32 of a row for each column of grad and a column for "
      "each of x, which have a row for each token");
  const auto upper = torch::stable::contiguous(grad), input = torch::stable::contiguous(x);
  const int64_t tokens = grad.size(0), outputs = grad.size(1);
  auto sums = torch::stable::new_empty(total, {outputs});
  if (tokens == 0 || total.numel() == 0) {
    if (overwrite) torch::stable::zero_(total);
    return torch::stable::zero_(sums);
  }
  multiply(
      grad, matrix_of(input, tokens), transposed(matrix_of(upper, tokens)), overwrite ? 0.0f : 1.0f,
      matrix_of(total, outputs),
      {kSumsOfB, nullptr, sums.mutable_data_ptr(), "--no-gradient-accumulation-fusion"});
  return sums;
}

}  // namespace ops
}  // namespace megalite::cuda

// Takes turns among a block's threads; also what torch and Python ask of a library that poses as the CPU's.
#define USE_CUDA
#include <Python.h>
#include <dlfcn.h>
#include <link.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda_runtime.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace megalite::cuda {

alignas(16) thread_local double dynamic_shared[cuda_on_cpu::kMaxSharedBytes / sizeof(double)];

}  // namespace megalite::cuda

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace cuda_on_cpu {
namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr unsigned kMaxThreads = 1024, kMaxDepth = 64, kMaxGridX = 0x7FFFFFFFu, kMaxGridYZ = 65535;

std::string problem;   // why the latest launch failed
int num_guards = 0;    // of the device, that live
char the_stream = 0;   // its address is the stream
thread_local volatile char anchor;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  uint3 index;
  Wait waits_for;
  bool is_done;
  unsigned num_exchanges;
};

struct Warp {
  unsigned char values[2][kWarp * kMaxValue];  // by turns: who reads one is met in the other
};

class Block {
 public:
  void run(const std::function<void()>& thread);
  void wait(Wait what);
  const unsigned char* exchange(const void* value, size_t size);

 private:
  static void enter();
  void resume(Fiber& fiber);
  void leave(Fiber& fiber, bool for_good);
  void start(Fiber& fiber);
  bool release();

  const std::function<void()>* thread_ = nullptr;
  size_t num_ = 0, current_ = 0;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Warp> warps_;
  std::mt19937 random_;
  ucontext_t scheduler_;
  void* scheduler_stack_ = nullptr;  // address, size and bottom for the sanitizer
  const void* scheduler_bottom_ = nullptr;
  size_t scheduler_size_ = 0;
};

Block block;

void Block::enter() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_bottom_, &block.scheduler_size_);
#endif
  (*block.thread_)();
  block.leave(*block.fibers_[block.current_], true);
}

void Block::start(Fiber& fiber) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, &Block::enter, 0);
  fiber.waits_for = Wait::kNot;
  fiber.is_done = false;
  fiber.num_exchanges = 0;
}

void Block::resume(Fiber& fiber) {
  threadIdx = fiber.index;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&scheduler_stack_, fiber.stack.get(), kStackBytes);
#endif
  swapcontext(&scheduler_, &fiber.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler_stack_, nullptr, nullptr);
#endif
}

void Block::leave(Fiber& fiber, bool for_good) {
  fiber.is_done = for_good;
#if defined(__SANITIZE_ADDRESS__)
  void* mine = nullptr;
  __sanitizer_start_switch_fiber(for_good ? nullptr : &mine, scheduler_bottom_, scheduler_size_);
#endif
  swapcontext(&fiber.context, &scheduler_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(mine, &scheduler_bottom_, &scheduler_size_);
#endif
}

void Block::wait(Wait what) {
  Fiber& fiber = *fibers_[current_];
  fiber.waits_for = what;
  leave(fiber, false);
}

const unsigned char* Block::exchange(const void* value, size_t size) {
  const size_t thread = current_;
  Fiber& fiber = *fibers_[thread];
  unsigned char* values = warps_[thread / kWarp].values[fiber.num_exchanges++ % 2];
  std::memcpy(values + thread % kWarp * kMaxValue, value, size);
  wait(Wait::kWarp);
  return values;
}

// Lets those go on who are all there; false if nobody is.
bool Block::release() {
  bool released = false;
  const auto all = [&](size_t begin, size_t end, Wait what) {
    for (size_t i = begin; i < end; ++i) {
      if (fibers_[i]->is_done || fibers_[i]->waits_for != what) return false;
    }
    return true;
  };
  const auto free = [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) fibers_[i]->waits_for = Wait::kNot;
    released = true;
  };
  if (all(0, num_, Wait::kBlock)) free(0, num_);
  for (size_t i = 0; i + kWarp <= num_; i += kWarp) {
    if (all(i, i + kWarp, Wait::kWarp)) free(i, i + kWarp);
  }
  return released;
}

void Block::run(const std::function<void()>& thread) {
  thread_ = &thread;
  num_ = size_t{blockDim.x} * blockDim.y * blockDim.z;
  while (fibers_.size() < num_) fibers_.push_back(std::make_unique<Fiber>());
  warps_.resize((num_ + kWarp - 1) / kWarp);
  for (size_t i = 0; i < num_; ++i) {
    const auto n = static_cast<unsigned>(i);
    fibers_[i]->index = {n % blockDim.x, n / blockDim.x % blockDim.y, n / blockDim.x / blockDim.y};
    start(*fibers_[i]);
  }
  const char* asked = std::getenv("CUDA_ON_CPU_ORDER");
  const std::string name = asked ? asked : "forward";
  std::vector<size_t> order(num_);
  std::iota(order.begin(), order.end(), size_t{0});
  if (name == "reverse") std::reverse(order.begin(), order.end());
  do {
    if (name == "shuffled") std::shuffle(order.begin(), order.end(), random_);
    for (const size_t i : order) {
      current_ = i;
      if (!fibers_[i]->is_done && fibers_[i]->waits_for == Wait::kNot) resume(*fibers_[i]);
    }
  } while (release());
  for (size_t i = 0; i < num_; ++i) {
    if (!fibers_[i]->is_done) problem = "a thread waits for others that have left or wait elsewhere";
  }
}

struct Memory {
  void* begin;
  size_t size;
};

// This library's thread-local memory of this thread: the shared memory of all kernels.
Memory shared_memory() {
  anchor = 1;  // it exists from here on
  const auto find = [](dl_phdr_info* info, size_t, void* found) {
    Dl_info mine;
    dladdr(&problem, &mine);
    if (reinterpret_cast<void*>(info->dlpi_addr) != mine.dli_fbase) return 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      if (info->dlpi_phdr[i].p_type != PT_TLS) continue;
      *static_cast<Memory*>(found) = {info->dlpi_tls_data, info->dlpi_phdr[i].p_memsz};
    }
    return 1;
  };
  Memory memory = {};
  dl_iterate_phdr(find, &memory);
  return memory;
}

std::mutex one_at_a_time;
std::map<const void*, size_t> granted;  // dynamic shared memory, by kernel
constexpr size_t kUnaskedSharedBytes = (48 << 10) - (1 << 10);  // no kernel here has more than 1 KiB that is static

std::string problem_of(const cudaLaunchConfig_t& config, const void* kernel) {
  const dim3 grid = config.gridDim, size = config.blockDim;
  if (grid.x - 1 >= kMaxGridX || grid.y - 1 >= kMaxGridYZ || grid.z - 1 >= kMaxGridYZ) return "no such grid";
  if (size.x == 0 || size.y == 0 || size.z - 1 >= kMaxDepth) return "no such block";
  if (uint64_t{size.x} * size.y * size.z > kMaxThreads) return "more than 1024 threads";
  if (config.dynamicSmemBytes > std::max(kUnaskedSharedBytes, granted[kernel])) return "shared memory not asked for";
  if (config.stream != reinterpret_cast<cudaStream_t>(&the_stream)) return "not the current stream";
  return num_guards == 1 ? "" : "the tensors' device is not the current one";
}

}  // namespace

void wait(Wait what) { block.wait(what); }

const unsigned char* exchange(unsigned mask, const void* value, size_t size) {
  if (mask != 0xFFFFFFFFu) problem = "a mask that is not of the whole warp";
  return block.exchange(value, size);
}

cudaError_t grant(const void* kernel, size_t bytes) {
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  if (bytes > kMaxSharedBytes) return cudaErrorInvalidValue;
  granted[kernel] = bytes;
  return cudaSuccess;
}

cudaError_t run(const cudaLaunchConfig_t& config, const void* kernel, const std::function<void()>& thread) {
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  problem = problem_of(config, kernel);
  if (!problem.empty()) return cudaErrorInvalidConfiguration;
  const Memory shared = shared_memory();
  blockDim = config.blockDim;
  gridDim = config.gridDim;
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < gridDim.x && problem.empty(); ++blockIdx.x) {
        std::memset(shared.begin, 0xFF, shared.size);  // NaN
        block.run(thread);
      }
    }
  }
  return problem.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace cuda_on_cpu

const char* cudaGetErrorString(cudaError_t) { return cuda_on_cpu::problem.c_str(); }

// What torch has where it has CUDA; this library's own calls find these first.
extern "C" {

AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  ++cuda_on_cpu::num_guards;
  *guard = reinterpret_cast<DeviceGuardHandle>(&cuda_on_cpu::num_guards);
  return 0;
}

AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) {
  --cuda_on_cpu::num_guards;
  return 0;
}

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = &cuda_on_cpu::the_stream;
  return 0;
}
}

namespace {

PyObject* capability(PyObject*, PyObject*) { return PyUnicode_FromString("CUDA on the CPU"); }

PyMethodDef methods[] = {
    {"capability", capability, METH_NOARGS, "As of the CPU's library."}, {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}

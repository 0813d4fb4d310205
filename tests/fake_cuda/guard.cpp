// A CUDA device without a GPU: streams and events are numbers, and every operation on them has ended at once.
//
// PyTorch's own code, such as autograd's engine, asks the guard of a device type for the current stream and for
// events. A CPU build of PyTorch has no guard for CUDA, so that FakeTensorMode cannot run backward there.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

namespace {

constexpr c10::DeviceType kCuda = c10::DeviceType::CUDA;

thread_local c10::StreamId current_stream = 0;
std::atomic<c10::StreamId> num_streams{0};

struct FakeCudaGuard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kCuda;

  static c10::Device device() { return {kCuda, 0}; }
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }

  c10::DeviceType type() const override { return kCuda; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}

  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(++num_streams); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(++num_streams); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::StreamId before = current_stream;
    current_stream = next.id();
    return stream(before);
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}

  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    static char any;
    *event = &any;
  }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 1.0; }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

struct FakeCudaHooks final : at::CUDAHooksInterface {
  explicit FakeCudaHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

// Preferred to the hooks of a build for CUDA, which would ask the driver.
const at::RegistererCUDAHooksRegistry hooks(
    "CUDAHooks",
    c10::REGISTRY_PREFERRED,
    at::CUDAHooksRegistry(),
    at::RegistererCUDAHooksRegistry::DefaultCreator<FakeCudaHooks>);

}  // namespace

extern "C" void install_guard() {
  static const FakeCudaGuard guard;
  const c10::impl::DeviceGuardImplRegistrar registrar(kCuda, &guard);
}

extern "C" long long current_stream_id() { return current_stream; }

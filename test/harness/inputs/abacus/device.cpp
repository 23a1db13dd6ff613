// A device that torch can tell from the host in every way. Its memory is the host's.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kMost = 16;
constexpr size_t kBlock = 512;

int visible = 0;
thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId streams[kMost] = {};
std::atomic<bool> used{false}; // true after a device was chosen or its memory was allocated
std::atomic<c10::StreamId> last_stream{0};
std::atomic<int64_t> allocated[kMost], peak[kMost], allocations[kMost];

// ---- memory

struct Block {
  void* data;
  size_t size;
  c10::DeviceIndex device;
};

void count(c10::DeviceIndex device, int64_t bytes) {
  int64_t now = allocated[device] += bytes;
  int64_t most = peak[device];
  while (now > most && !peak[device].compare_exchange_weak(most, now)) {
  }
}

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  count(block->device, -static_cast<int64_t>(block->size));
  std::free(block->data);
  delete block;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kType, current);
    if (bytes == 0) {
      return {nullptr, nullptr, &release, device};
    }
    const size_t size = (bytes + kBlock - 1) / kBlock * kBlock;
    void* data = std::aligned_alloc(kBlock, size);
    TORCH_CHECK(data != nullptr, "abacus is out of memory");
    used = true;
    allocations[current]++;
    count(current, size);
    return {data, new Block{data, size, current}, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

Memory memory;

std::mutex pinned_mutex;
std::unordered_map<void*, size_t> pinned;

void unpin(void* data) {
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.erase(data);
  }
  std::free(data);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::aligned_alloc(kBlock, std::max((bytes + kBlock - 1) / kBlock * kBlock, kBlock));
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[data] = bytes;
    return {data, data, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &unpin;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

PinnedMemory pinned_memory;

// ---- devices and streams: all work is done at once

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override {
    return {kType, current};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == kType && device.index() < visible, "there is no ", device);
    used = true;
    if (device.has_index()) {
      current = device.index();
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) {
      current = device.index();
    }
  }
  static c10::DeviceIndex index_of(c10::Device device) {
    return device.has_index() ? device.index() : current;
  }
  static c10::Stream stream_of(c10::DeviceIndex index, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream_of(index_of(device), streams[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index_of(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_of(index_of(device), ++last_stream);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto old = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return old;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<double*>(event);
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new double;
    }
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    *static_cast<double*>(*event) = std::chrono::duration<double, std::milli>(now).count();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return *static_cast<double*>(to) - *static_cast<double*>(from);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(visible);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- the general interface of a device

// Random numbers are a function of a seed and an offset, as DTensor wants it: sixteen bytes of state.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index)
      : GeneratorImpl(c10::Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override {
    offset_ = offset;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == at::kByte, "the state of a generator of abacus has 16 bytes");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(c10::kCPU));
    auto* words = static_cast<uint64_t*>(state.data_ptr());
    words[0] = seed_;
    words[1] = offset_;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->seed_ = seed_;
    made->offset_ = offset_;
    return made;
  }
  // A generator of the host for the next operation.
  at::Generator draw() {
    auto host = at::detail::createCPUGenerator(seed_ * 0x9E3779B97F4A7C15 + offset_);
    offset_ += 4;
    return host;
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return visible > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(visible);
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    current = device;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current : std::exchange(current, device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static std::vector<at::Generator> generators = [] {
      std::vector<at::Generator> made;
      for (int index = 0; index < kMost; ++index) {
        made.push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(index)));
      }
      return made;
    }();
    return generators[device < 0 ? current : device];
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current : device);
  }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    for (const auto& [start, size] : pinned) {
      if (data >= start && data < static_cast<const char*>(start) + std::max<size_t>(size, 1)) {
        return true;
      }
    }
    return false;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }
  at::Device getDeviceFromPtr(void*) const override {
    return {kType, current};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::OptionalDeviceGuard guard(storage.device());
    auto* impl = storage.unsafeGetStorageImpl();
    auto data = memory.allocate(size);
    if (const size_t kept = std::min(size, impl->nbytes())) {
      std::memcpy(data.get(), impl->data(), kept);
    }
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(size);
  }
};

Hooks hooks;

// ---- operations

// The same memory as a tensor of the host, which keeps the tensor alive.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kType) {
    return tensor;
  }
  at::AutoDispatchBelowADInplaceOrView below;
  auto* data = tensor.storage().nbytes() == 0 ? nullptr : tensor.data_ptr();
  return at::from_blob(
      data, tensor.sizes(), tensor.strides(), [tensor](void*) {}, tensor.options().device(c10::kCPU));
}

std::vector<at::Tensor> on_host(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> made;
  for (const auto& tensor : tensors) {
    made.push_back(on_host(tensor));
  }
  return made;
}

std::vector<std::vector<at::Tensor>> on_host(const std::vector<std::vector<at::Tensor>>& lists) {
  std::vector<std::vector<at::Tensor>> made;
  for (const auto& tensors : lists) {
    made.push_back(on_host(tensors));
  }
  return made;
}

at::Tensor empty(
    c10::SymIntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size),
      &memory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype),
      format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride),
      &memory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) {
    to.resize_(from.sizes());
  }
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  return on_host(tensor).item();
}

const at::Tensor& resize(
    const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!format.has_value() || *format == c10::MemoryFormat::Contiguous, "abacus resizes to contiguous tensors");
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const size_t needed = at::detail::computeStorageNbytesContiguous(
      impl->sizes(), tensor.dtype().itemsize(), static_cast<size_t>(tensor.storage_offset()));
  if (needed > tensor.storage().nbytes()) {
    hooks.resizePrivateUse1Bytes(tensor.storage(), needed);
  }
  return tensor;
}

at::Tensor as_strided(
    const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset.has_value()) {
    start = offset->expect_int();
  }
  return at::native::as_strided_tensorimpl(
      tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage source) {
  const int64_t size = static_cast<int64_t>(source.nbytes() / tensor.dtype().itemsize());
  return at::native::set_storage_cpu_(tensor, std::move(source), 0, {size}, {1});
}

at::Tensor& set_storage_at(
    at::Tensor& tensor, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset.expect_int());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return tensor;
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage_at(
      tensor, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

at::Tensor& set_nothing(at::Tensor& tensor) {
  c10::OptionalDeviceGuard guard(tensor.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, memory.allocate(0), &memory, true);
  return set_storage_at(tensor, none, 0, std::vector<c10::SymInt>{0}, std::vector<c10::SymInt>{1});
}

// ``module.to(device)`` gives a tensor other data in place.
bool has_compatible_type(const at::Tensor& tensor, const at::Tensor& source) {
  const auto dense = [](const at::Tensor& each) {
    return each.layout() == c10::kStrided && !each.unsafeGetTensorImpl()->is_python_dispatch();
  };
  return dense(tensor) && dense(source);
}

at::Tensor convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  std::optional<at::Tensor> host_bias;
  if (bias.has_value()) {
    host_bias = on_host(*bias);
  }
  return at::convolution_symint(
             on_host(input), on_host(weight), host_bias, stride, padding, dilation, transposed, output_padding, groups)
      .to(input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad,
    const at::Tensor& input,
    const at::Tensor& weight,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups,
    std::array<bool, 3> mask) {
  const std::vector<c10::SymInt> bias_sizes{grad.sym_size(1)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      on_host(grad), on_host(input), on_host(weight), c10::SymIntArrayRef(bias_sizes), stride, padding, dilation,
      transposed, output_padding, groups, mask);
  const auto back = [&](const at::Tensor& each) { return each.defined() ? each.to(input.device()) : each; };
  return {back(of_input), back(of_weight), back(of_bias)};
}

void record_stream(at::Tensor&, c10::Stream) {}

// A device adds up, copies and joins only what is on it.
void check_one_device(const torch::jit::Stack& stack, size_t arguments) {
  std::optional<c10::Device> found;
  for (size_t i = stack.size() - arguments; i < stack.size(); ++i) {
    if (!stack[i].isTensorList()) {
      continue;
    }
    for (const at::Tensor& tensor : stack[i].toTensorVector()) {
      if (tensor.defined() && tensor.device().type() == kType) {
        TORCH_CHECK(
            !found || *found == tensor.device(), "Expected all tensors to be on the same device, but found at least two "
            "devices, ", found.value_or(tensor.device()), " and ", tensor.device());
        found = tensor.device();
      }
    }
  }
}

// The host computes. It draws random numbers from the device's generator.
void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  check_one_device(*stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& type = arguments[i].type();
    const bool optional = type->kind() == c10::TypeKind::OptionalType;
    const auto& plain = optional ? type->castRaw<c10::OptionalType>()->getElementType() : type;
    if (plain->kind() != c10::TypeKind::GeneratorType) {
      continue;
    }
    auto& given = (*stack)[stack->size() - arguments.size() + i];
    at::Generator generator = given.isNone() ? hooks.getDefaultGenerator(current) : given.toGenerator();
    if (generator.device().type() == kType) {
      std::lock_guard<std::mutex> lock(generator.mutex());
      given = generator.get<Generator>()->draw();
    }
    break;
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", resize);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_type);
  m.impl("record_stream", record_stream);
}

// Autocast, of the operations that the models of the tests have.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
}

// ---- collectives: gloo's, over the same memory

// Work that is complete at once. gloo's own would copy the undivided sum again on a second wait.
class Done final : public c10d::Work {
 public:
  explicit Done(const std::vector<at::Tensor>& results) : Work(-1, c10d::OpType::UNKNOWN) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future_->markCompleted(c10::IValue(results));
    finish();
  }
  bool wait(std::chrono::milliseconds) override {
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Ledger final : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<std::vector<at::Tensor>>;

  explicit Ledger(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override {
    return "ledger";
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {
    gloo_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return gloo_->getSequenceNumberForGroup();
  }
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    auto host = on_host(tensors);
    return gloo_->broadcast(host, opts);
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    auto host = on_host(tensors);
    auto summed = opts;
    return averaged(host, summed, [&] { return gloo_->allreduce(host, summed); });
  }
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    auto host = on_host(tensors);
    auto summed = opts;
    return averaged(host, summed, [&] { return gloo_->allreduce_coalesced(host, summed); });
  }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    auto host = on_host(tensors);
    auto summed = opts;
    return averaged(host, summed, [&] { return gloo_->reduce(host, summed); });
  }
  Work allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return on_both(&Backend::allgather, outputs, inputs, opts);
  }
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    auto out = on_host(output).view(-1); // gloo would cut it along its first dimension
    auto in = on_host(input).view(-1);
    return gloo_->_allgather_base(out, in, opts);
  }
  Work allgather_coalesced(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return on_both(&Backend::allgather_coalesced, outputs, inputs, opts);
  }
  Work allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return on_both(&Backend::allgather_into_tensor_coalesced, outputs, inputs, opts);
  }
  Work gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    return on_both(&Backend::gather, outputs, inputs, opts);
  }
  Work scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& opts) override {
    return on_both(&Backend::scatter, outputs, inputs, opts);
  }
  Work reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    auto summed = opts;
    return averaged(out, summed, [&] { return gloo_->reduce_scatter(out, in, summed); });
  }
  Work _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    Tensors out{on_host(output)};
    auto in = on_host(input);
    auto summed = opts;
    return averaged(out, summed, [&] { return gloo_->_reduce_scatter_base(out[0], in, summed); });
  }
  Work reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    auto summed = opts;
    return averaged(out, summed, [&] { return gloo_->reduce_scatter_tensor_coalesced(out, in, summed); });
  }
  Work alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& opts) override {
    auto out = on_host(output);
    auto in = on_host(input);
    return gloo_->alltoall_base(out, in, output_splits, input_splits, opts);
  }
  Work send(Tensors& tensors, int to, int tag) override {
    auto host = on_host(tensors);
    return gloo_->send(host, to, tag);
  }
  Work recv(Tensors& tensors, int from, int tag) override {
    auto host = on_host(tensors);
    return gloo_->recv(host, from, tag);
  }
  Work recvAnysource(Tensors& tensors, int tag) override {
    auto host = on_host(tensors);
    return gloo_->recvAnysource(host, tag);
  }
  Work barrier(const c10d::BarrierOptions& opts) override {
    return gloo_->barrier(opts);
  }

 private:
  template <typename Outputs, typename Inputs, typename Options>
  Work on_both(
      Work (Backend::*collective)(Outputs&, Inputs&, const Options&),
      Outputs& outputs,
      Inputs& inputs,
      const Options& opts) {
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    return (gloo_.get()->*collective)(out, in, opts);
  }

  // gloo knows no average: sum, wait and divide.
  template <typename Options, typename Call>
  Work averaged(Tensors& results, Options& opts, Call call) {
    const bool mean = opts.reduceOp == c10d::ReduceOp::AVG;
    if (mean) {
      opts.reduceOp = c10d::ReduceOp::SUM;
    }
    auto work = call();
    if (!mean) {
      return work;
    }
    work->wait();
    for (auto& result : results) {
      result.div_(getSize());
    }
    return c10::make_intrusive<Done>(results);
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("begin", [](int count) {
    visible = std::min(count, kMost);
    c10::SetAllocator(kType, &memory);
    at::RegisterPrivateUse1HooksInterface(&hooks);
  });
  m.def("set_device", [](int index) { Guard().setDevice(c10::Device(kType, static_cast<c10::DeviceIndex>(index))); });
  m.def("is_initialized", [] { return used.load(); });
  m.def("current_device", [] { return static_cast<int>(current); });
  m.def("device_count", [] { return visible; });
  m.def("memory_allocated", [](int index) { return allocated[index].load(); });
  m.def("max_memory_allocated", [](int index) { return peak[index].load(); });
  m.def("reset_peak", [](int index) { peak[index] = allocated[index].load(); });
  m.def("allocations", [](int index) { return allocations[index].load(); });
  m.def("generator", [](int index) { return hooks.getDefaultGenerator(static_cast<c10::DeviceIndex>(index)); });
  m.def("ledger", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Ledger>(std::move(gloo));
  });
}

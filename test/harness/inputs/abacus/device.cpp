// An emulated device, which is separate from the CPU for torch. The host cannot touch its memory. Its streams do
// nothing, and all work is done at once, unless ABACUS_LATE is set: see late.h.
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
#include <c10/util/ScopeExit.h>
#include <torch/csrc/Event.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include "late.h"

#include <atomic>
#include <csignal>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kMost = 16;
constexpr size_t kBlock = 512;

int visible = 0;
thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId streams[kMost] = {};
std::atomic<bool> used{false}; // true after a device was chosen or its memory was allocated

// As with a real driver, asking for the devices starts it, and it works only in the process that started it. A fork
// that has inherited a started driver cannot use it.
std::atomic<pid_t> driver{0};

void start_driver() noexcept {
  pid_t none = 0;
  driver.compare_exchange_strong(none, getpid());
}

void need_driver() {
  start_driver();
  const pid_t owner = driver;
  TORCH_CHECK(owner == getpid(), "abacus: process ", owner, " had started the driver before it forked this one");
}
std::atomic<c10::StreamId> last_stream{0};
std::atomic<const char*> last_operator{"none"};

late::Stream stream_here(c10::DeviceIndex device) {
  return {device, streams[device]};
}

late::Stream key_of(const c10::Stream& stream) {
  return {stream.device_index(), stream.id()};
}

// ---- memory

struct Counter {
  std::atomic<int64_t> now{0}, peak{0};
  void add(int64_t bytes) {
    const int64_t sum = now += bytes;
    int64_t most = peak;
    while (sum > most && !peak.compare_exchange_weak(most, sum)) {
    }
  }
};

int64_t limit = 0; // of the bytes that a process reserves on a device
Counter allocated[kMost], reserved[kMost];
std::atomic<int64_t> allocations[kMost], retries[kMost], refusals[kMost];

// The tensors of a device have addresses in a range without memory, so a host that touches them dies. The bytes of an
// address are ``distance`` further on, which only this file knows.
char* shown = nullptr; // the first address of the first device
size_t range = 0, distance = 0;
struct sigaction action_before;

void* reach(const void* address) {
  if (address == nullptr) {
    return nullptr;
  }
  auto* found = static_cast<const char*>(address);
  TORCH_CHECK(found >= shown && found < shown + distance, "abacus has no memory at ", address);
  return const_cast<char*>(found) + distance;
}

void tell_who_touched(int number, siginfo_t* info, void*) {
  const auto* address = static_cast<const char*>(info->si_addr);
  if (info->si_code > 0 && address >= shown && address < shown + distance) {
    char text[300];
    const int size = std::snprintf(
        text, sizeof(text), "the host touched memory of abacus:%d at %p, which only the device can reach (last operator: %s)\n",
        static_cast<int>((address - shown) / range), info->si_addr, last_operator.load());
    [[maybe_unused]] const auto written = write(2, text, std::min<size_t>(size, sizeof(text) - 1));
  }
  sigaction(number, &action_before, nullptr);
  if (info->si_code <= 0) { // a process sent the signal, so no instruction raises it again
    raise(number);
  }
}

void lay_out_addresses() {
  range = std::max(size_t{1} << 36, 2 * static_cast<size_t>(limit));
  distance = visible * range;
  void* found = mmap(nullptr, 2 * distance, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(found != MAP_FAILED, "abacus: there are not enough addresses for ", 2 * distance, " bytes");
  shown = static_cast<char*>(found);
  TORCH_CHECK(mprotect(shown + distance, distance, PROT_READ | PROT_WRITE) == 0, "abacus: the host has no memory");
  struct sigaction action = {};
  action.sa_sigaction = tell_who_touched;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &action_before);
}

struct Block {
  char* data; // the address that tensors have
  size_t size;
  size_t used; // by its tensor
  c10::DeviceIndex device;
  late::Stream stream; // on which it was allocated
  std::set<late::Stream> users; // that were passed to record_stream
};

// Freed memory stays here. The next allocation on the stream where it was allocated may have it at once, although tasks may
// still use it: the tasks of its next owner come later on the same stream. Only streams that were passed to record_stream
// must finish their tasks first. The next owner finds poison.
class Pool {
 public:
  Block* take(size_t size, c10::DeviceIndex device) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto stream = stream_here(device);
    Block* block = find(size, stream);
    if (block == nullptr && reserved[device].now + static_cast<int64_t>(size) > limit) {
      retries[device]++;
      lock.unlock();
      empty(device);
      lock.lock();
    }
    block = block == nullptr ? make(size, stream) : block;
    block->used = size;
    const auto poison = [data = reach(block->data), size = block->size] { std::memset(data, kPoison, size); };
    if (late::queue()->tail(stream) != 0) {
      late::queue()->add(stream, poison);
    } else {
      poison();
    }
    return block;
  }

  void give(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<late::Id> last;
    for (const auto& user : block->users) {
      last.push_back(late::queue()->tail(user));
    }
    block->users.clear();
    kept_.emplace_back(block, std::move(last));
  }

  void record(Block* block, late::Stream stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (block != nullptr && stream != block->stream) {
      block->users.insert(stream);
    }
  }

  // Release the memory that no tensor has.
  void empty(c10::DeviceIndex device) {
    late::queue()->force_device(device);
    std::lock_guard<std::mutex> lock(mutex_);
    reclaim();
    for (auto& [stream, blocks] : free_) {
      if (stream.first != device) {
        continue;
      }
      for (auto& [size, block] : blocks) {
        reserved[device].add(-static_cast<int64_t>(size));
        give_back(block);
      }
      blocks.clear();
    }
  }

 private:
  Block* find(size_t size, late::Stream stream) {
    reclaim();
    auto& blocks = free_[stream];
    const auto found = blocks.lower_bound(size);
    if (found == blocks.end() || found->first > 2 * size) {
      return nullptr;
    }
    const auto latest = std::prev(blocks.upper_bound(found->first));
    auto* block = latest->second;
    blocks.erase(latest);
    return block;
  }

  Block* make(size_t size, late::Stream stream) {
    const auto device = static_cast<c10::DeviceIndex>(stream.first);
    const auto bytes = static_cast<int64_t>(size);
    const auto fits = [&](const auto& hole) { return hole.second >= size; };
    auto& holes = holes_[device];
    if (shown == nullptr) {
      lay_out_addresses();
    }
    if (reserved[device].now == 0) {
      holes = {{0, range}};
    }
    const auto hole = std::find_if(holes.begin(), holes.end(), fits);
    if (reserved[device].now + bytes > limit || hole == holes.end()) {
      refusals[device]++;
      const auto has = [](int64_t number) { return c10::str(static_cast<double>(number) / (1 << 20), " MiB"); };
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "abacus out of memory. Tried to allocate ", has(bytes), ". abacus:", stream.first,
          " has a total capacity of ", has(limit), " of which ", has(limit - reserved[device].now),
          " is free. This process has ", has(allocated[device].now), " allocated and ", has(reserved[device].now),
          " reserved.");
    }
    const auto [start, left] = *hole;
    holes.erase(hole);
    if (left > size) {
      holes[start + size] = left - size;
    }
    reserved[device].add(bytes);
    return new Block{shown + device * range + start, size, size, device, stream, {}};
  }

  void give_back(Block* block) {
    constexpr size_t page = 1 << 16;
    auto* data = static_cast<char*>(reach(block->data));
    auto* first = data + (page - reinterpret_cast<size_t>(data) % page) % page; // the first page of this block only
    if (first + page <= data + block->size) {
      madvise(first, (data + block->size - first) / page * page, MADV_DONTNEED);
    }
    auto& holes = holes_[block->device];
    const size_t start = block->data - shown - block->device * range;
    auto next = holes.emplace(start, block->size).first;
    if (const auto after = std::next(next); after != holes.end() && start + block->size == after->first) {
      next->second += after->second;
      holes.erase(after);
    }
    if (next != holes.begin() && std::prev(next)->first + std::prev(next)->second == start) {
      std::prev(next)->second += next->second;
      holes.erase(next);
    }
    delete block;
  }

  void reclaim() {
    std::erase_if(kept_, [&](auto& each) {
      auto& [block, last] = each;
      std::erase_if(last, [](late::Id id) { return !late::queue()->is_open(id); });
      if (last.empty()) {
        free_[block->stream].emplace(block->size, block);
      }
      return last.empty();
    });
  }

  static constexpr int kPoison = 0xFF; // a floating-point number of such bytes is NaN
  std::mutex mutex_;
  std::map<late::Stream, std::multimap<size_t, Block*>> free_;
  std::vector<std::pair<Block*, std::vector<late::Id>>> kept_; // for streams that were passed to record_stream
  std::map<size_t, size_t> holes_[kMost]; // the addresses without a block: where they begin, and how many
};

Pool& pool = *new Pool;

void release(void* context) {
  if (auto* block = static_cast<Block*>(context)) {
    allocated[block->device].add(-static_cast<int64_t>(block->used));
    pool.give(block);
  }
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kType, current);
    if (bytes == 0) {
      return {nullptr, nullptr, &release, device};
    }
    need_driver();
    used = true;
    auto* block = pool.take((bytes + kBlock - 1) / kBlock * kBlock, current);
    allocations[current]++;
    allocated[current].add(static_cast<int64_t>(block->used));
    return {block->data, block, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    late::queue()->force_device(current);
    default_copy_data(reach(to), reach(from), bytes);
  }
};

Memory memory;

struct Pinned {
  size_t size;
  int users = 0; // late copies
  bool freed = false;
};

std::mutex pinned_mutex;
std::unordered_map<void*, Pinned> pinned;

void forget_unused(void* data) {
  const auto found = pinned.find(data);
  if (found->second.freed && found->second.users == 0) {
    pinned.erase(found);
    std::free(data);
  }
}

void unpin(void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned.at(data).freed = true;
  forget_unused(data);
}

// The start of the pinned memory that contains an address, or null.
void* find_pinned(const void* data) {
  for (const auto& [start, each] : pinned) {
    if (data >= start && data < static_cast<const char*>(start) + std::max<size_t>(each.size, 1)) {
      return start;
    }
  }
  return nullptr;
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::aligned_alloc(kBlock, std::max((bytes + kBlock - 1) / kBlock * kBlock, kBlock));
    if (late::is_on()) {
      std::memset(data, 0xFF, bytes);
    }
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[data] = Pinned{bytes};
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

// ---- devices and streams

// Virtual time: when each stream will have finished its sleeps. Nothing else takes time. A stream that waits for
// another one takes over its time, and the clock of the host advances only while the host waits. So times do not depend
// on the speed of the host, and a sleep takes no real time.
class Clocks {
 public:
  using Time = std::chrono::nanoseconds;

  // Keep a stream busy until a time, and for ``more`` after that. Returns when it will be done.
  Time busy(late::Stream stream, Time until, Time more = {}) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& time = times_[stream];
    time = std::max(time, until) + more;
    return time;
  }
  Time of(late::Stream stream) {
    return busy(stream, host());
  }
  Time host() {
    std::lock_guard<std::mutex> lock(mutex_);
    return host_;
  }
  void host_waits(Time until) {
    std::lock_guard<std::mutex> lock(mutex_);
    host_ = std::max(host_, until);
  }
  void host_waits_for_device(int device) {
    Time last{};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [stream, time] : times_) {
        last = stream.first == device ? std::max(last, time) : last;
      }
    }
    host_waits(last);
  }

 private:
  std::mutex mutex_;
  std::map<late::Stream, Time> times_;
  Time host_{};
};

Clocks& clocks = *new Clocks;

// Let one stream wait for a task of another one, or the host.
void stream_waits(late::Stream stream, late::Id task, Clocks::Time time) {
  late::queue()->wait(stream, task);
  clocks.busy(stream, time);
}

void host_waits(late::Stream stream) {
  late::queue()->force(late::queue()->tail(stream));
  clocks.host_waits(clocks.of(stream));
}

struct Event {
  Clocks::Time time;
  late::Id task;
};

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
    need_driver();
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
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    *static_cast<Event*>(*event) = {clocks.of(key_of(stream)), late::queue()->tail(key_of(stream))};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (const auto* found = static_cast<Event*>(event)) {
      stream_waits(key_of(stream), found->task, found->time);
    }
  }
  bool queryEvent(void* event) const override {
    const auto* found = static_cast<Event*>(event);
    return found == nullptr || is_over(found->task, found->time);
  }
  void synchronizeEvent(void* event) const override {
    if (const auto* found = static_cast<Event*>(event)) {
      late::queue()->force(found->task);
      clocks.host_waits(found->time);
    }
  }
  bool queryStream(const c10::Stream& stream) const override {
    return is_over(late::queue()->tail(key_of(stream)), clocks.busy(key_of(stream), {}));
  }
  static bool is_over(late::Id task, Clocks::Time time) {
    if (time > clocks.host()) { // a caller that asks in a loop waits a bit
      clocks.host_waits(std::min(time, clocks.host() + std::chrono::microseconds(100)));
      return false;
    }
    return late::queue()->done(task);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits(key_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    late::queue()->force_device(device);
    clocks.host_waits_for_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    pool.record(static_cast<Block*>(data.get_context()), key_of(stream));
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    const auto time = static_cast<Event*>(to)->time - static_cast<Event*>(from)->time;
    return std::chrono::duration<double, std::milli>(time).count();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    start_driver();
    return static_cast<c10::DeviceIndex>(visible);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- the general interface of a device

// Random numbers are a function of a seed and an offset, as DTensor expects: sixteen bytes of state.
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
    // Like the generators of other devices, call no operator, which a dispatch mode would count.
    at::Tensor state = at::detail::empty_cpu({16}, at::TensorOptions().dtype(at::kByte));
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
  // A generator of the CPU for the next operation.
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
    start_driver();
    return visible > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    start_driver();
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
    return find_pinned(data) != nullptr;
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
      const auto copy = [to = reach(data.get()), from = reach(impl->data()), kept] { std::memcpy(to, from, kept); };
      if (late::is_on()) {
        late::queue()->add(stream_here(current), copy);
      } else {
        copy();
      }
    }
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(size);
  }
};

Hooks hooks;

// ---- operations

bool is_here(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// The memory of a tensor as a CPU tensor. Only with ``kept`` does it keep the tensor alive.
at::Tensor bare(const at::Tensor& tensor, bool kept = false) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto* data = tensor.storage().nbytes() == 0 ? nullptr : tensor.data_ptr();
  data = is_here(tensor) ? reach(data) : data;
  const auto options = tensor.options().device(c10::kCPU);
  const std::function<void(void*)> keep = [tensor](void*) {};
  auto made = kept ? at::from_blob(data, tensor.sizes(), tensor.strides(), keep, options)
                   : at::from_blob(data, tensor.sizes(), tensor.strides(), options);
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

// The same, which keeps the tensor alive, unless streams are late: their memory stays in the pool.
at::Tensor on_host(const at::Tensor& tensor) {
  return is_here(tensor) ? bare(tensor, !late::is_on()) : tensor;
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

thread_local bool host_computes = false; // for a device that works at once: the copies for this make no host wait

// Copies to and from pinned memory may be late. The host waits for other copies from and to it.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  last_operator = "aten::_copy_from";
  at::infer_size(to.sizes(), from.sizes()); // raises as other devices do
  TORCH_CHECK(
      at::is_expandable_to(from.sizes(), to.sizes()), "a tensor of the sizes ", from.sizes(), " cannot be copied to ",
      to.sizes());
  const auto device = stream_here((is_here(from) ? from : to).device().index());
  const auto target = stream_here((is_here(to) ? to : from).device().index());
  const auto carry = [](late::Stream stream, late::Stream other) {
    if (stream != other) { // both devices take part
      stream_waits(stream, late::queue()->tail(other), clocks.of(other));
    }
  };
  carry(device, target);
  void* start = nullptr;
  const bool with_host = !is_here(from) || !is_here(to);
  if (with_host && non_blocking) {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    start = find_pinned((is_here(from) ? to : from).data_ptr());
    if (start != nullptr) {
      pinned[start].users++;
    }
  }
  const auto copy = [start, from = bare(from), to = bare(to)] {
    to.copy_(from);
    if (start != nullptr) {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned[start].users--;
      forget_unused(start);
    }
  };
  if (late::is_on()) {
    late::queue()->add(device, copy);
  } else {
    copy();
  }
  if (with_host && start == nullptr && !host_computes) {
    host_waits(device);
  }
  carry(target, device);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) {
    to.resize_(from.sizes());
  }
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  last_operator = "aten::_local_scalar_dense";
  host_waits(stream_here(tensor.device().index()));
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

// An argument of a late operator: ``change`` replaces its tensors, and ``device`` replaces devices.
c10::IValue changed(
    const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change, c10::Device device) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    std::vector<at::Tensor> made;
    for (const at::Tensor& each : value.toTensorVector()) {
      made.push_back(change(each));
    }
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const auto& each : value.toOptionalTensorVector()) {
      made.push_back(each.has_value() ? std::make_optional(change(*each)) : std::nullopt);
    }
    return made;
  }
  return value.isDevice() ? c10::IValue(device) : value;
}

// All tensors in values that an operator takes or gives.
std::vector<at::Tensor> tensors_in(c10::ArrayRef<c10::IValue> values) {
  std::vector<at::Tensor> found;
  const auto note = [&](const at::Tensor& tensor) {
    found.push_back(tensor);
    return tensor;
  };
  for (const auto& value : values) {
    changed(value, note, c10::kCPU);
  }
  return found;
}

// The operand of a late operator: the memory of the device, or a copy of a CPU tensor with its present values.
at::Tensor as_operand(const at::Tensor& tensor) {
  if (!tensor.defined() || is_here(tensor)) {
    return tensor.defined() ? bare(tensor) : tensor;
  }
  at::AutoDispatchBelowADInplaceOrView below;
  auto copy = tensor.clone();
  copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return copy;
}

// The result of a late out= operator: empty, because the operator does not read it.
at::Tensor as_result(const at::Tensor& tensor) {
  return tensor.defined() ? at::empty({0}, tensor.options().device(c10::kCPU)) : tensor;
}

at::Tensor as_meta(const at::Tensor& tensor) {
  if (!is_here(tensor)) {
    return tensor;
  }
  return at::Tensor(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
}

std::mutex synchronized_mutex;
std::map<std::string, int64_t> synchronized; // operators that could not be late, and how often

// Add an operator to the current stream, and replace its arguments by its results, whose values come later. Return
// false if it cannot be late: it returns views or other things than tensors, or its results have sizes that depend on
// values.
bool defer(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t base = stack->size() - schema.arguments().size();
  const auto given = c10::ArrayRef<c10::IValue>(*stack).slice(base);
  if (schema.name().rfind("aten::", 0) != 0) {
    return false; // its kernel may be in Python
  }
  if (schema.name().rfind("aten::native_batch_norm", 0) == 0) {
    return false; // the statistics that it saves have other sizes and dtypes than its meta kernel says
  }
  std::optional<c10::Device> device;
  for (const auto& tensor : tensors_in(given)) {
    if (!tensor.defined()) {
      continue;
    }
    if (tensor.layout() != c10::kStrided) {
      return false;
    }
    if (!device && is_here(tensor)) {
      device = tensor.device();
    }
  }
  for (const auto& value : given) {
    if (!device && value.isDevice() && value.toDevice().type() == kType) {
      device = c10::Device(kType, Guard::index_of(value.toDevice()));
    }
  }
  if (!device) {
    return false;
  }
  bool fresh = false; // whether it returns new tensors
  std::vector<size_t> written; // for each result, the argument that it is
  for (const auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    if (alias == nullptr) {
      const auto& type = *result.type();
      if (!type.isSubtypeOf(*c10::TensorType::get()) && !type.isSubtypeOf(*c10::ListType::ofTensors())) {
        return false;
      }
      fresh = true;
      continue;
    }
    if (!alias->isWrite()) {
      return false;
    }
    for (size_t i = 0; i < given.size(); ++i) {
      const auto* other = schema.arguments()[i].alias_info();
      if (other != nullptr && other->beforeSets() == alias->beforeSets()) {
        written.push_back(i);
      }
    }
  }
  bool unsized = false; // whether the result of an out= operator is still empty
  for (size_t i = 0; i < given.size(); ++i) {
    const auto& argument = schema.arguments()[i];
    if (argument.alias_info() != nullptr) {
      for (const auto& tensor : tensors_in(given.slice(i, 1))) {
        if (tensor.defined() && !is_here(tensor)) {
          return false;
        }
        unsized |= argument.is_out() && tensor.defined() && tensor.numel() == 0;
      }
    }
  }
  if (fresh && !written.empty()) {
    return false;
  }

  torch::jit::Stack meta;
  if (fresh || unsized) {
    for (const auto& value : given) {
      meta.push_back(changed(value, as_meta, c10::kMeta));
    }
    const auto outs = meta;
    try {
      at::AutoDispatchBelowADInplaceOrView below;
      op.callBoxedForDispatchKey(c10::DispatchKey::Meta, meta);
    } catch (const std::exception&) {
      return false;
    }
    for (size_t i = 0; i < given.size(); ++i) {
      if (schema.arguments()[i].is_out()) {
        const auto real = tensors_in(given.slice(i, 1)), found = tensors_in(c10::ArrayRef<c10::IValue>(outs).slice(i, 1));
        for (size_t j = 0; j < real.size(); ++j) {
          if (real[j].defined() && real[j].sizes() != found[j].sizes()) {
            resize(real[j], c10::fromIntArrayRefSlow(found[j].sizes()), std::nullopt);
          }
        }
      }
    }
  }
  torch::jit::Stack operands;
  for (size_t i = 0; i < given.size(); ++i) {
    // An out= operator of the CPU may resize its result for a while, which memory of the device does not allow.
    operands.push_back(changed(given[i], schema.arguments()[i].is_out() ? as_result : as_operand, c10::kCPU));
  }
  torch::jit::Stack results;
  std::vector<at::Tensor> targets; // where results go that the operator does not write itself
  if (fresh) {
    c10::DeviceGuard guard(*device);
    const auto make = [&](const at::Tensor& tensor) {
      at::Tensor made;
      if (tensor.defined()) {
        made = at::Tensor(at::detail::empty_strided_generic(
            tensor.sizes(), tensor.strides(), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
            tensor.scalar_type()));
      }
      targets.push_back(made.defined() ? bare(made) : made);
      return made;
    };
    for (const auto& value : meta) {
      results.push_back(changed(value, make, *device));
    }
  } else {
    for (const size_t i : written) {
      results.push_back(given[i]);
      for (const auto& tensor : tensors_in(given.slice(i, 1))) {
        targets.push_back(schema.arguments()[i].is_out() ? bare(tensor) : at::Tensor());
      }
    }
  }
  std::vector<std::vector<int64_t>> sizes; // of what is written
  for (const size_t i : written) {
    for (const auto& tensor : tensors_in(given.slice(i, 1))) {
      sizes.push_back(tensor.sizes().vec());
    }
  }
  late::queue()->add(stream_here(device->index()), [op, sizes, operands = std::move(operands), targets] {
    auto values = operands;
    try {
      op.callBoxed(values);
    } catch (c10::Error& error) {
      error.add_context(c10::str("in late ", op.schema().name()));
      throw;
    }
    const auto made = tensors_in(values);
    for (size_t i = 0; i < sizes.size(); ++i) {
      TORCH_CHECK(made[i].sizes().equals(sizes[i]), "late ", op.schema(), ": its result has another size");
    }
    TORCH_INTERNAL_ASSERT(made.size() == targets.size(), op.schema());
    for (size_t i = 0; i < made.size(); ++i) {
      if (made[i].defined() && targets[i].defined()) {
        TORCH_INTERNAL_ASSERT(made[i].sizes() == targets[i].sizes(), op.schema());
        targets[i].copy_(made[i]);
      }
    }
  });
  torch::jit::drop(*stack, schema.arguments().size());
  for (auto& result : results) {
    stack->push_back(std::move(result));
  }
  return true;
}

// Add an operator to the current stream. It must be able to be late.
template <typename... Arguments>
torch::jit::Stack deferred(const char* name, Arguments&&... arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  torch::jit::Stack stack;
  torch::jit::push(stack, std::forward<Arguments>(arguments)...);
  TORCH_CHECK(defer(op, &stack), name, " cannot be late");
  return stack;
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
  if (late::is_on()) {
    return deferred(
               "aten::convolution", input, weight, bias, C10_AS_INTARRAYREF_SLOW(stride),
               C10_AS_INTARRAYREF_SLOW(padding), C10_AS_INTARRAYREF_SLOW(dilation), transposed,
               C10_AS_INTARRAYREF_SLOW(output_padding), groups.expect_int())[0]
        .toTensor();
  }
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
  if (late::is_on()) {
    const auto made = deferred(
        "aten::convolution_backward", grad, input, weight, std::vector<int64_t>{grad.size(1)},
        C10_AS_INTARRAYREF_SLOW(stride), C10_AS_INTARRAYREF_SLOW(padding), C10_AS_INTARRAYREF_SLOW(dilation), transposed,
        C10_AS_INTARRAYREF_SLOW(output_padding), groups.expect_int(), std::vector<bool>(mask.begin(), mask.end()));
    return {made[0].toTensor(), made[1].toTensor(), made[2].toTensor()};
  }
  const std::vector<c10::SymInt> bias_sizes{grad.sym_size(1)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      on_host(grad), on_host(input), on_host(weight), c10::SymIntArrayRef(bias_sizes), stride, padding, dilation,
      transposed, output_padding, groups, mask);
  const auto back = [&](const at::Tensor& each) { return each.defined() ? each.to(input.device()) : each; };
  return {back(of_input), back(of_weight), back(of_bias)};
}

// The dropout of the CPU would use the generator of the CPU, and only when its task runs.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  auto mask = at::empty_like(input, input.options().dtype(c10::kBool)).bernoulli_(train.value_or(true) ? 1 - p : 1);
  return {p == 1 ? at::zeros_like(input) : input.mul(mask).mul_(train.value_or(true) ? 1 / (1 - p) : 1), mask};
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  pool.record(static_cast<Block*>(tensor.storage().data_ptr().get_context()), key_of(stream));
}

// A device computes with tensors that are on it. Only numbers, and CPU tensors in lists such as indices, are allowed.
void check_one_device(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  std::optional<c10::Device> found;
  const auto check = [&found](const at::Tensor& tensor) {
    TORCH_CHECK(
        !found || *found == tensor.device(), "Expected all tensors to be on the same device, but found at least two "
        "devices, ", found.value_or(tensor.device()), " and ", tensor.device());
    found = tensor.device();
  };
  for (size_t i = stack.size() - op.schema().arguments().size(); i < stack.size(); ++i) {
    if (stack[i].isTensor()) {
      const at::Tensor& tensor = stack[i].toTensor();
      if (tensor.defined() && (tensor.dim() != 0 || tensor.device().type() == kType)) {
        check(tensor);
      }
    } else if (stack[i].isTensorList()) {
      for (const at::Tensor& tensor : stack[i].toTensorVector()) {
        if (tensor.defined() && tensor.device().type() == kType) {
          check(tensor);
        }
      }
    }
  }
}

// Compute on the CPU, with random numbers of the device's generator.
void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  last_operator = op.schema().name().c_str();
  const auto& arguments = op.schema().arguments();
  check_one_device(op, *stack);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& type = arguments[i].type();
    const bool optional = type->kind() == c10::TypeKind::OptionalType;
    const auto& plain = optional ? type->castRaw<c10::OptionalType>()->getElementType() : type;
    if (plain->kind() != c10::TypeKind::GeneratorType) {
      continue;
    }
    auto& given = (*stack)[stack->size() - arguments.size() + i];
    at::Generator generator = given.isNone() ? hooks.getDefaultGenerator(current) : given.toGenerator();
    TORCH_CHECK(
        generator.device().type() == kType, "expected a generator of abacus, but found one of ", generator.device());
    std::lock_guard<std::mutex> lock(generator.mutex());
    given = generator.get<Generator>()->draw();
    break;
  }
  if (late::is_on()) {
    if (defer(op, stack)) {
      return;
    }
    std::lock_guard<std::mutex> lock(synchronized_mutex);
    synchronized[toString(op.operator_name())]++;
  }
  const auto before = std::exchange(host_computes, !late::is_on());
  const auto restore = c10::make_scope_exit([before] { host_computes = before; });
  at::native::cpu_fallback(op, stack); // if streams are late, its copies to the host and back wait for the current one
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
  m.impl("native_dropout", native_dropout);
  m.impl("record_stream", record_stream);
}

// Copies resolve lazy conjugates and negatives themselves. torch would resolve them by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// Autocast of the operations that the models of the tests use.
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

// Work on a late stream. As with NCCL, a stream waits for it, not the host, and it keeps its tensors until then.
class Late final : public c10d::Work {
 public:
  Late(late::Id task, c10::Stream stream, std::vector<at::Tensor> results, std::shared_ptr<void> kept, bool blocks)
      : Work(-1, c10d::OpType::UNKNOWN),
        task_(task),
        stream_(stream),
        results_(std::move(results)),
        kept_(std::move(kept)),
        blocks_(blocks) {}
  bool wait(std::chrono::milliseconds) override {
    if (blocks_) {
      late::queue()->force(task_);
      clocks.host_waits(time_);
    } else {
      stream_waits(stream_here(stream_.device_index()), task_, time_);
    }
    kept_.reset();
    return true;
  }
  void synchronize() override {
    wait(::kNoTimeout);
  }
  bool isCompleted() override {
    return late::queue()->done(task_);
  }
  bool isSuccess() const override {
    return true;
  }
  std::vector<at::Tensor> result() override {
    return results_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (future_ == nullptr) {
      const std::vector<c10::Device> devices{stream_.device()};
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
      const c10::StreamGuard guard(stream_);
      future_->markCompleted(c10::IValue(results_));
    }
    return future_;
  }

 private:
  const late::Id task_;
  const c10::Stream stream_;
  const Clocks::Time time_ = clocks.of(key_of(stream_));
  const std::vector<at::Tensor> results_;
  std::shared_ptr<void> kept_;
  const bool blocks_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Ledger final : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<std::vector<at::Tensor>>;

  // ``shared`` is a file for all ranks of the group.
  Ledger(c10::intrusive_ptr<c10d::Backend> gloo, const std::string& shared)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {
    if (late::is_on()) {
      group_ = new late::Group{late::Demand::open(shared, getSize())};
      late::queue()->serve(group_);
    }
  }

  // Run what is left of the collectives: other ranks may need them.
  ~Ledger() override {
    if (group_ == nullptr) {
      return;
    }
    for (const auto& [device, stream] : own_streams_) {
      try {
        late::queue()->force(late::queue()->tail(key_of(stream)));
      } catch (const std::exception& error) {
        TORCH_WARN("ledger: ", error.what());
      }
    }
    late::queue()->leave(group_);
    munmap(group_->demand, sizeof(late::Demand));
    delete group_;
  }

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
    return give(tensors, {}, [gloo = gloo_, host = on_host(tensors), opts]() mutable {
      return gloo->broadcast(host, opts);
    });
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return averaged(tensors, {}, opts, [gloo = gloo_, host = on_host(tensors)](auto& summed) mutable {
      return gloo->allreduce(host, summed);
    });
  }
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return averaged(tensors, {}, opts, [gloo = gloo_, host = on_host(tensors)](auto& summed) mutable {
      return gloo->allreduce_coalesced(host, summed);
    });
  }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return averaged(tensors, {}, opts, [gloo = gloo_, host = on_host(tensors)](auto& summed) mutable {
      return gloo->reduce(host, summed);
    });
  }
  Work allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return on_both(&Backend::allgather, outputs, inputs, opts);
  }
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    check_dtypes(output, input);
    // gloo would split it along its first dimension
    return give(
        {output}, {input}, [gloo = gloo_, out = on_host(output).view(-1), in = on_host(input).view(-1), opts]() mutable {
          return gloo->_allgather_base(out, in, opts);
        });
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
    return averaged(
        outputs, flat(inputs), opts,
        [gloo = gloo_, out = on_host(outputs), in = on_host(inputs)](auto& summed) mutable {
          return gloo->reduce_scatter(out, in, summed);
        });
  }
  Work _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    check_dtypes(output, input);
    return averaged(
        {output}, {input}, opts, [gloo = gloo_, out = on_host(output), in = on_host(input)](auto& summed) mutable {
          return gloo->_reduce_scatter_base(out, in, summed);
        });
  }
  Work reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    return averaged(
        outputs, inputs, opts, [gloo = gloo_, out = on_host(outputs), in = on_host(inputs)](auto& summed) mutable {
          return gloo->reduce_scatter_tensor_coalesced(out, in, summed);
        });
  }
  Work alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& opts) override {
    return give(
        {output}, {input},
        [gloo = gloo_, out = on_host(output), in = on_host(input), output_splits, input_splits, opts]() mutable {
          return gloo->alltoall_base(out, in, output_splits, input_splits, opts);
        });
  }
  Work send(Tensors& tensors, int to, int tag) override {
    auto host = now(tensors);
    return gloo_->send(host, to, tag);
  }
  Work recv(Tensors& tensors, int from, int tag) override {
    auto host = now(tensors);
    return gloo_->recv(host, from, tag);
  }
  Work recvAnysource(Tensors& tensors, int tag) override {
    auto host = now(tensors);
    return gloo_->recvAnysource(host, tag);
  }
  Work barrier(const c10d::BarrierOptions& opts) override {
    return give({}, {}, [gloo = gloo_, opts] { return gloo->barrier(opts); });
  }

 private:
  // Raise at once, as NCCL does: on a late stream, gloo would raise too late.
  static void check_dtypes(const at::Tensor& output, const at::Tensor& input) {
    TORCH_CHECK_TYPE(
        output.dtype() == input.dtype(), "ledger: the output has the dtype ", output.dtype(), ", but the input has ",
        input.dtype());
  }
  static Tensors flat(const Tensors& tensors) {
    return tensors;
  }
  static Tensors flat(const Lists& lists) {
    Tensors made;
    for (const auto& tensors : lists) {
      made.insert(made.end(), tensors.begin(), tensors.end());
    }
    return made;
  }

  // Start a collective, or add it to the stream of this group, which waits for the current stream.
  template <typename Call>
  Work give(Tensors outputs, Tensors inputs, Call call) {
    if (group_ == nullptr) {
      return call();
    }
    const auto index = outputs.empty() ? current : outputs[0].device().index();
    auto found = own_streams_.find(index);
    if (found == own_streams_.end()) {
      found = own_streams_.emplace(index, Guard().getNewStream(c10::Device(kType, index), 0)).first;
    }
    const auto& stream = found->second;
    auto kept = std::make_shared<std::pair<Tensors, Tensors>>(outputs, std::move(inputs));
    const auto run = [call, kept]() mutable { call()->wait(); };
    const auto before = late::queue()->tail(stream_here(index));
    clocks.busy(key_of(stream), clocks.of(stream_here(index)));
    const auto task = late::queue()->add(key_of(stream), run, {before}, group_);
    const bool blocks = outputs.empty();
    return c10::make_intrusive<Late>(task, stream, std::move(outputs), std::move(kept), blocks);
  }

  // The tensors of a call of gloo that the host makes at once, after it has waited for them.
  Tensors now(const Tensors& tensors) {
    if (group_ == nullptr) {
      return on_host(tensors);
    }
    Tensors made;
    for (const auto& tensor : tensors) {
      host_waits(stream_here(tensor.device().index()));
      made.push_back(bare(tensor, true));
    }
    std::lock_guard<std::mutex> lock(synchronized_mutex);
    synchronized["c10d::send or c10d::recv"]++;
    return made;
  }

  template <typename Outputs, typename Inputs, typename Options>
  Work on_both(
      Work (Backend::*collective)(Outputs&, Inputs&, const Options&),
      Outputs& outputs,
      Inputs& inputs,
      const Options& opts) {
    return give(
        flat(outputs), flat(inputs),
        [gloo = gloo_, collective, out = on_host(outputs), in = on_host(inputs), opts]() mutable {
          return (gloo.get()->*collective)(out, in, opts);
        });
  }

  // gloo has no average: sum, wait and divide.
  template <typename Options, typename Call>
  Work averaged(Tensors outputs, Tensors inputs, Options opts, Call call) {
    const bool mean = opts.reduceOp == c10d::ReduceOp::AVG;
    if (mean) {
      opts.reduceOp = c10d::ReduceOp::SUM;
    }
    auto host = on_host(outputs);
    return give(std::move(outputs), std::move(inputs), [call, opts, mean, host, size = getSize()]() mutable -> Work {
      auto work = call(opts);
      if (!mean) {
        return work;
      }
      work->wait();
      for (auto& result : host) {
        result.div_(size);
      }
      return c10::make_intrusive<Done>(host);
    });
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  late::Group* group_ = nullptr; // null if nothing is late
  std::map<c10::DeviceIndex, c10::Stream> own_streams_;
};

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("begin", [](int count, int64_t bytes) {
    visible = std::min(count, kMost);
    limit = bytes;
    c10::SetAllocator(kType, &memory);
    at::RegisterPrivateUse1HooksInterface(&hooks);
  });
  m.def("set_device", [](int index) { Guard().setDevice(c10::Device(kType, static_cast<c10::DeviceIndex>(index))); });
  m.def("start_driver", start_driver);
  m.def("is_initialized", [] { return used.load(); });
  m.def("current_device", [] { return static_cast<int>(current); });
  m.def("device_count", [] { return visible; });
  m.def("memory_stats", [](int index) {
    const int64_t now = allocated[index].now, most = allocated[index].peak;
    return std::map<std::string, int64_t>{
        {"allocated_bytes.all.current", now},
        {"allocated_bytes.all.peak", most},
        {"active_bytes.all.current", now},
        {"active_bytes.all.peak", most},
        {"reserved_bytes.all.current", reserved[index].now},
        {"reserved_bytes.all.peak", reserved[index].peak},
        {"allocation.all.allocated", allocations[index]},
        {"num_alloc_retries", retries[index]},
        {"num_ooms", refusals[index]}};
  });
  m.def("reset_peak", [](int index) {
    for (auto* counter : {&allocated[index], &reserved[index]}) {
      counter->peak = counter->now.load();
    }
  });
  m.def("generator", [](int index) { return hooks.getDefaultGenerator(static_cast<c10::DeviceIndex>(index)); });
  m.def("is_late", late::is_on);
  m.def("elapsed_time", [](py::handle from, py::handle to) { // torch's own takes no subclass
    const auto event = [](py::handle each) -> c10::Event& { return reinterpret_cast<THPEvent*>(each.ptr())->event; };
    return event(from).elapsedTime(event(to));
  });
  m.def("_sleep", [](int64_t cycles) {
    clocks.busy(stream_here(current), clocks.host(), std::chrono::nanoseconds(cycles));
  });
  m.def("_waited", [] { return clocks.host().count(); });
  m.def("pending", [] { return late::queue()->size(); });
  m.def("synchronized_operators", [] {
    std::lock_guard<std::mutex> lock(synchronized_mutex);
    return synchronized;
  });
  const py::call_guard<py::gil_scoped_release> free;
  m.def("settle", [] { late::queue()->settle(); }, free);
  m.def("synchronize", [](int index) { Guard().synchronizeDevice(static_cast<c10::DeviceIndex>(index)); }, free);
  m.def("empty_cache", [](int index) { pool.empty(static_cast<c10::DeviceIndex>(index)); }, free);
  m.def("ledger", [](c10::intrusive_ptr<c10d::Backend> gloo, const std::string& shared) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Ledger>(std::move(gloo), shared));
  });
}

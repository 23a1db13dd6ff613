// Streams whose tasks run as late as their order allows.
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace late {

using Id = uint64_t; // of a task: a later task has a larger one, and 0 is none
using Stream = std::pair<int, int64_t>; // a device, and the number of a stream there
using Run = std::function<void()>;

constexpr int kPatience = 100; // how often a caller that asks in a loop whether a task is done gets a no

// What the ranks of a process group share: the number of the last collective whose result some rank needs.
struct Demand {
  std::atomic<uint64_t> number;
  std::atomic<int> users;

  static Demand* open(const std::string& path, int ranks) {
    const int file = ::open(path.c_str(), O_RDWR);
    void* found = file < 0 ? MAP_FAILED : mmap(nullptr, sizeof(Demand), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    TORCH_CHECK(found != MAP_FAILED, "ledger: no shared memory in ", path);
    close(file);
    auto* demand = static_cast<Demand*>(found);
    if (++demand->users == ranks) {
      unlink(path.c_str());
    }
    return demand;
  }
};

struct Group {
  Demand* demand;
  uint64_t issued = 0;
  std::map<uint64_t, Id> tasks = {}; // the collectives that are not done, by number

  void need(uint64_t number) const {
    uint64_t seen = demand->number;
    while (seen < number && !demand->number.compare_exchange_weak(seen, number)) {
    }
  }
};

// Releases the GIL, which a DTensor holds while it computes. A thread that ends a collective may need it.
struct __attribute__((visibility("hidden"))) WithoutGil {
  std::optional<pybind11::gil_scoped_release> released;
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) {
      released.emplace();
    }
  }
};

// A task runs after the one before it on its stream, and after those that its stream waits for. It runs when the host
// needs it, or when another rank needs a collective that depends on it, and not before. Among the tasks that are needed
// and may run, the policy "last" takes the one that was added last. A seed takes any of them, and sometimes runs a task
// that is not needed yet. A collective runs in a thread of its own, because it waits for other ranks. All other tasks
// run while ``mutex_`` is held, so they must neither use the queue nor Python.
class Queue {
 public:
  explicit Queue(const std::string& policy) : last_(policy == "last"), random_(last_ ? 0 : std::stoull(policy)) {}

  Id add(Stream stream, Run run, const std::vector<Id>& after = {}, Group* group = nullptr) {
    std::lock_guard<std::mutex> lock(mutex_);
    threads_ = at::get_num_threads();
    const Id id = ++count_;
    Task& task = tasks_[id];
    task.stream = stream;
    task.run = std::move(run);
    Id& tail = tails_[stream];
    depend(task, id, tail);
    for (const Id other : after) {
      depend(task, id, other);
    }
    tail = id;
    if (group != nullptr) {
      task.group = group;
      task.number = ++group->issued;
      group->tasks[task.number] = id;
      issued_.notify_one();
    }
    return id;
  }

  // The last task of a stream that is not done.
  Id tail(Stream stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = tails_.find(stream);
    return found == tails_.end() ? 0 : found->second;
  }

  bool is_open(Id id) {
    std::lock_guard<std::mutex> lock(mutex_);
    return tasks_.count(id) > 0;
  }

  size_t size() {
    std::lock_guard<std::mutex> lock(mutex_);
    return tasks_.size();
  }

  // Let the later tasks of a stream wait for a task.
  void wait(Stream stream, Id id) {
    if (is_open(id)) {
      add(stream, [] {}, {id});
    }
  }

  bool done(Id id) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = tasks_.find(id);
    if (found != tasks_.end() && ++found->second.asked > kPatience) {
      lock.unlock();
      force(id);
      return true;
    }
    return found == tasks_.end();
  }

  // Let the host wait for a task.
  void force(Id id) {
    const WithoutGil free;
    std::unique_lock<std::mutex> lock(mutex_);
    want(id);
    pump();
    changed_.wait(lock, [&] { return tasks_.count(id) == 0; });
    if (!last_ && !tasks_.empty() && random_() % 2 == 0) {
      want(std::next(tasks_.begin(), random_() % tasks_.size())->first);
      pump();
    }
    if (error_ != nullptr) {
      std::rethrow_exception(std::exchange(error_, nullptr));
    }
  }

  void force_device(int device) {
    std::vector<Id> last;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [stream, id] : tails_) {
        if (stream.first == device) {
          last.push_back(id);
          want(id);
        }
      }
    }
    for (const Id id : last) {
      force(id);
    }
  }

  // From now on, run the collectives of a group that other ranks need.
  void serve(Group* group) {
    std::lock_guard<std::mutex> lock(mutex_);
    groups_.insert(group);
    if (server_ != getpid()) { // a fork has no threads
      server_ = getpid();
      std::thread([this, threads = at::get_num_threads()] {
        at::set_num_threads(threads);
        serve();
      }).detach();
    }
  }

  // Wait for the collectives that have begun. At the end of Python, their threads would not survive.
  void settle() {
    const WithoutGil free;
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(5), [&] { return running_ == 0; });
  }

  void leave(Group* group) {
    std::lock_guard<std::mutex> lock(mutex_);
    groups_.erase(group);
  }

 private:
  struct Task {
    Stream stream;
    Run run;
    std::vector<Id> before, after; // what it waits for, and what waits for it
    size_t missing = 0; // how many of those before it are not done
    int asked = 0;
    bool wanted = false;
    Group* group = nullptr;
    uint64_t number = 0;
  };

  void depend(Task& task, Id id, Id other) {
    const auto found = tasks_.find(other);
    if (found != tasks_.end() && other != id) {
      task.before.push_back(other);
      found->second.after.push_back(id);
      task.missing++;
    }
  }

  void want(Id id) {
    std::vector<Id> next{id};
    while (!next.empty()) {
      const auto found = tasks_.find(next.back());
      next.pop_back();
      if (found == tasks_.end() || found->second.wanted) {
        continue;
      }
      Task& task = found->second;
      task.wanted = true;
      if (task.group != nullptr) {
        task.group->need(task.number);
      }
      if (task.missing == 0) {
        ready_.insert(found->first);
      }
      next.insert(next.end(), task.before.begin(), task.before.end());
    }
  }

  void pump() {
    while (!ready_.empty()) {
      auto chosen = std::prev(ready_.end());
      if (!last_) {
        chosen = std::next(ready_.begin(), random_() % ready_.size());
      }
      const Id id = *chosen;
      ready_.erase(chosen);
      Task& task = tasks_.at(id);
      if (task.group == nullptr) {
        const auto failed = attempt(task.run);
        error_ = failed != nullptr ? failed : error_;
        finish(id);
        continue;
      }
      running_++;
      std::thread([this, id, run = std::move(task.run), threads = threads_]() mutable {
        at::set_num_threads(threads); // rounding depends on it
        const auto failed = attempt(run);
        run = nullptr; // before the task counts as done, because freeing tensors may need Python
        std::lock_guard<std::mutex> lock(mutex_);
        error_ = failed != nullptr ? failed : error_;
        finish(id);
        pump();
        running_--;
        changed_.notify_all();
      }).detach();
    }
    changed_.notify_all();
  }

  void finish(Id id) {
    const auto found = tasks_.find(id);
    Task& task = found->second;
    for (const Id other : task.after) {
      Task& next = tasks_.at(other);
      if (--next.missing == 0 && next.wanted) {
        ready_.insert(other);
      }
    }
    if (const auto tail = tails_.find(task.stream); tail->second == id) {
      tails_.erase(tail);
    }
    if (task.group != nullptr) {
      task.group->tasks.erase(task.number);
    }
    tasks_.erase(found);
  }

  static std::exception_ptr attempt(const Run& run) {
    const c10::impl::ForceDispatchKeyGuard plain(
        c10::default_included_set, c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    try {
      run();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      bool open = false;
      for (const Group* group : groups_) {
        for (const auto& [number, id] : group->tasks) {
          if (number > group->demand->number) {
            open = true;
            break;
          }
          want(id);
        }
      }
      pump();
      if (open) {
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::microseconds(500));
        lock.lock();
      } else {
        issued_.wait(lock);
      }
    }
  }

  const bool last_;
  std::mt19937_64 random_;
  std::mutex mutex_;
  std::condition_variable changed_, issued_;
  Id count_ = 0;
  std::map<Id, Task> tasks_;
  std::map<Stream, Id> tails_;
  std::set<Id> ready_;
  std::set<Group*> groups_;
  std::exception_ptr error_;
  pid_t server_ = 0;
  int threads_ = 1; // with which the host computes
  int running_ = 0; // threads of collectives
};

// Whether streams are late. Otherwise the device works at once, and the queue stays empty.
inline bool is_on() {
  static const char* policy = std::getenv("ABACUS_LATE");
  return policy != nullptr && *policy != '\0';
}

// It is never deleted, because threads use it until the process ends.
inline Queue* queue() {
  static Queue* made = new Queue(is_on() ? std::getenv("ABACUS_LATE") : "last");
  return made;
}

} // namespace late

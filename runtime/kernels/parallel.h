// How a kernel spreads work: whoever calls it brings the threads.
#pragma once

#include <cstddef>

namespace trtllm_lite {

// Runs task(i) for every i in [0, count), on as many threads as the owner has. Tasks do not throw.
class Parallel {
 public:
  virtual ~Parallel() = default;

  template <class Task>
  void run(size_t count, const Task& task) {
    if (count <= 1) {
      if (count == 1) task(0);
      return;
    }
    auto call = [](void* context, size_t i) { (*static_cast<const Task*>(context))(i); };
    spread(count, call, const_cast<Task*>(&task));
  }

 protected:
  virtual void spread(size_t count, void (*call)(void*, size_t), void* context) = 0;
};

}  // namespace trtllm_lite

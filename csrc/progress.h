// The progress of a long loop, which another thread reads.

#pragma once

#include <atomic>
#include <cstdint>

class Progress {
 public:
  void add(std::int64_t count) { done_.fetch_add(count, std::memory_order_relaxed); }
  std::int64_t done() const { return done_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::int64_t> done_{0};
};

// Does nothing if no progress was requested.
inline void add_to(Progress* progress, std::int64_t count) {
  if (progress != nullptr) progress->add(count);
}

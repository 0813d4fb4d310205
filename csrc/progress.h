// How far a long loop is, for another thread to look at.

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

// Where nobody asked for the progress there is none.
inline void add_to(Progress* progress, std::int64_t count) {
  if (progress != nullptr) progress->add(count);
}

// New numpy arrays in memory that is fast to touch for the first time.

#pragma once

#include <pybind11/numpy.h>

#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

// An uninitialized array. Filling an array costs as much in page faults as in work unless its pages are huge. numpy
// requests huge pages from 4 MiB on, but its arrays do not start at the boundary of such a page.
template <typename T>
pybind11::array_t<T> new_array(const std::vector<pybind11::ssize_t>& shape) {
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  std::size_t bytes = sizeof(T);
  for (const pybind11::ssize_t size : shape) bytes *= static_cast<std::size_t>(size);
  if (bytes < kHugePage / 2) return pybind11::array_t<T>(shape);
  const std::size_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* memory = std::aligned_alloc(kHugePage, whole);
  if (memory == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  madvise(memory, whole, MADV_HUGEPAGE);  // without support, the system uses small pages
#endif
  const pybind11::capsule owner(memory, [](void* pointer) { std::free(pointer); });
  return pybind11::array_t<T>(shape, static_cast<T*>(memory), owner);
}

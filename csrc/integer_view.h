// A view of a caller's one-dimensional array of integers with any width, stride and alignment.

#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

// Elements are int32 or int64, and not necessarily aligned: the arrays of an .idx start at byte 34.
class IntegerView {
 public:
  IntegerView(const pybind11::array& array, const char* name)
      : data_(static_cast<const char*>(array.data())),
        size_(array.size()),
        stride_(array.ndim() == 1 ? array.strides(0) : 0),
        wide_(array.itemsize() == 8) {
    const bool integer = array.dtype().kind() == 'i' && (wide_ || array.itemsize() == 4);
    const char order = array.dtype().byteorder();
    if (array.ndim() != 1 || !integer || (order != '=' && order != '|'))
      throw std::invalid_argument(std::string(name) + " must be a 1-d array of int32 or int64");
  }

  std::int64_t size() const { return size_; }

  std::int64_t operator[](std::int64_t i) const {
    return wide_ ? load<std::int64_t>(i) : load<std::int32_t>(i);
  }

  // Prefetches element i, which need not exist.
  void prefetch(std::int64_t i) const {
    if (i >= 0 && i < size_) __builtin_prefetch(data_ + i * stride_);
  }

  bool is_packed_int32() const { return !wide_ && (stride_ == 4 || size_ <= 1); }
  const char* data() const { return data_; }

 private:
  template <typename T>
  T load(std::int64_t i) const {
    T value;
    std::memcpy(&value, data_ + i * stride_, sizeof value);
    return value;
  }

  const char* data_;
  std::int64_t size_, stride_;
  bool wide_;
};

// The usual case of an IntegerView, for a loop that is only limited by its loads.
class PackedView {
 public:
  explicit PackedView(const IntegerView& view) : data_(view.data()), size_(view.size()) {}

  std::int64_t size() const { return size_; }

  std::int64_t operator[](std::int64_t i) const {
    std::int32_t value;
    std::memcpy(&value, data_ + i * 4, sizeof value);
    return value;
  }

  // Prefetches element i, which need not exist.
  void prefetch(std::int64_t i) const {
    if (i >= 0 && i < size_) __builtin_prefetch(data_ + i * 4);
  }

 private:
  const char* data_;
  std::int64_t size_;
};

// Copies the tokens of samples from a mapped .bin: many samples per call, without an object for each document.

#pragma once

#include <pybind11/numpy.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "integer_view.h"

// The arrays that locate a sample's tokens. They come from files, so each number is checked before its use.
struct SampleSource {
  const char* tokens;
  std::int64_t num_tokens;
  std::int64_t itemsize;
  IntegerView offsets;    // [N], offset of each sequence in the .bin, in bytes
  IntegerView lengths;    // [N], length of each sequence in tokens
  IntegerView documents;  // sequence numbers in the order of the stream
  IntegerView samples;    // [2 * (n + 1)], position in documents and token offset of each sample's start
};

// Widens tokens of type Token to int64, and keeps the smallest and largest.
template <typename Token>
class TokenReader {
 public:
  explicit TokenReader(const SampleSource& source) : source_(source) {}

  void read_sample(std::int64_t row, std::int64_t width, std::int64_t* out) {
    if (row < 0 || row >= source_.samples.size() / 2 - 1) throw std::out_of_range("there is no such sample");
    std::int64_t position = source_.samples[2 * row], begin = source_.samples[2 * row + 1];
    for (std::int64_t filled = 0; filled < width; ++position, begin = 0) {
      if (position < 0 || position >= source_.documents.size())
        throw std::out_of_range("a sample leaves the document index");
      const std::int64_t sequence = source_.documents[position];
      if (sequence < 0 || sequence >= source_.lengths.size())
        throw std::out_of_range("a sequence number is outside the array of lengths");
      const std::int64_t length = source_.lengths[sequence];
      if (begin < 0 || begin > length) throw std::out_of_range("a sample starts outside its document");
      const std::int64_t count = std::min(length - begin, width - filled);
      const std::int64_t start = source_.offsets[sequence] / source_.itemsize;
      if (start < 0 || start > source_.num_tokens) throw std::out_of_range("a document leaves the .bin");
      copy(start + begin, count, out + filled);
      filled += count;
    }
  }

  std::pair<std::int64_t, std::int64_t> range() const { return {smallest_, largest_}; }

 private:
  void copy(std::int64_t first, std::int64_t count, std::int64_t* out) {
    if (count == 0) return;
    if (first < 0 || first > source_.num_tokens - count) throw std::out_of_range("a document leaves the .bin");
    const char* from = source_.tokens + first * source_.itemsize;
    Token smallest = std::numeric_limits<Token>::max(), largest = std::numeric_limits<Token>::min();
    for (std::int64_t i = 0; i < count; ++i) {
      Token token;
      std::memcpy(&token, from + i * static_cast<std::int64_t>(sizeof token), sizeof token);
      smallest = std::min(smallest, token);
      largest = std::max(largest, token);
      out[i] = static_cast<std::int64_t>(token);
    }
    smallest_ = std::min<std::int64_t>(smallest_, smallest);
    largest_ = std::max<std::int64_t>(largest_, largest);
  }

  const SampleSource& source_;
  std::int64_t smallest_ = std::numeric_limits<std::int64_t>::max();
  std::int64_t largest_ = std::numeric_limits<std::int64_t>::min();
};

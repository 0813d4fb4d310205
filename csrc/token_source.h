// Copies tokens from the mapped .bin files of a corpus: many samples per call, without an object for each document.

#pragma once

#include <pybind11/numpy.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "integer_view.h"

// A file of a corpus. The arrays come from files, so each number is checked before its use.
struct CorpusPart {
  const char* tokens;
  std::int64_t num_tokens;
  IntegerView offsets;          // [N], offset of each sequence in the .bin, in bytes
  IntegerView lengths;          // [N], length of each sequence in tokens
  std::int64_t first_sequence;  // number of the part's first sequence in the corpus
  std::int64_t first_token;
};

// The tokens of a corpus in one file or in several, which are alive as long as this object.
class TokenSource {
 public:
  using Arrays = std::tuple<pybind11::array, pybind11::array, pybind11::array>;  // tokens, offsets, lengths

  explicit TokenSource(std::vector<Arrays> parts) : arrays_(std::move(parts)) {
    if (arrays_.empty()) throw std::invalid_argument("a corpus has at least one part");
    const pybind11::array& first = std::get<0>(arrays_.front());
    kind_ = first.dtype().kind();
    itemsize_ = first.itemsize();
    for (const auto& [tokens, offsets, lengths] : arrays_) {
      if (tokens.ndim() != 1 || !(tokens.flags() & pybind11::array::c_style) || tokens.dtype().byteorder() == '>')
        throw std::invalid_argument("tokens must be a contiguous 1-d array");
      if (tokens.dtype().kind() != kind_ || tokens.itemsize() != itemsize_)
        throw std::invalid_argument("the parts of a corpus must be of one type");
      if (offsets.size() != lengths.size())
        throw std::invalid_argument("sequence_offsets and sequence_lengths must be of one size");
      parts_.push_back({static_cast<const char*>(tokens.data()), tokens.size(),
                        IntegerView(offsets, "sequence_offsets"), IntegerView(lengths, "sequence_lengths"),
                        num_sequences_, num_tokens_});
      num_sequences_ += lengths.size();
      num_tokens_ += tokens.size();
    }
  }

  char kind() const { return kind_; }
  std::int64_t itemsize() const { return itemsize_; }
  std::int64_t num_sequences() const { return num_sequences_; }
  std::int64_t num_tokens() const { return num_tokens_; }

  // Returns the part that holds a sequence, or a token: the last one that starts at it or before it.
  const CorpusPart* part_of(std::int64_t number, std::int64_t CorpusPart::*first) const {
    const auto starts_after = [first](std::int64_t value, const CorpusPart& part) { return value < part.*first; };
    const auto next = std::upper_bound(parts_.begin(), parts_.end(), number, starts_after);
    return parts_.data() + (next - parts_.begin()) - 1;
  }

 private:
  std::vector<Arrays> arrays_;
  std::vector<CorpusPart> parts_;
  char kind_;
  std::int64_t itemsize_, num_sequences_{0}, num_tokens_{0};
};

// Widens tokens of type Token to int64, and keeps the smallest and largest.
template <typename Token>
class TokenReader {
 public:
  explicit TokenReader(const TokenSource& source) : source_(source) {}

  // Copies `width` tokens from the start of a sample in the order of `documents`, the sequences of a stream. A row of
  // `samples`, [2 * (n + 1)], is a sample's position in documents and the offset of its first token there.
  void read_sample(const IntegerView& documents, const IntegerView& samples, std::int64_t row, std::int64_t width,
                   std::int64_t* out) {
    if (row < 0 || row >= samples.size() / 2 - 1) throw std::out_of_range("there is no such sample");
    std::int64_t position = samples[2 * row], begin = samples[2 * row + 1];
    for (std::int64_t filled = 0; filled < width; ++position, begin = 0) {
      if (position < 0 || position >= documents.size()) throw std::out_of_range("a sample leaves the document index");
      const std::int64_t sequence = documents[position];
      if (sequence < 0 || sequence >= source_.num_sequences())
        throw std::out_of_range("a sequence number is outside the array of lengths");
      const CorpusPart& part = *source_.part_of(sequence, &CorpusPart::first_sequence);
      const std::int64_t length = part.lengths[sequence - part.first_sequence];
      if (begin < 0 || begin > length) throw std::out_of_range("a sample starts outside its document");
      const std::int64_t count = std::min(length - begin, width - filled);
      const std::int64_t start = part.offsets[sequence - part.first_sequence] / source_.itemsize();
      if (start < 0 || start > part.num_tokens) throw std::out_of_range("a document leaves the .bin");
      copy(part, start + begin, count, out + filled);
      filled += count;
    }
  }

  // Copies `width` tokens of the corpus from its token `begin` on.
  void read_span(std::int64_t begin, std::int64_t width, std::int64_t* out) {
    if (begin < 0 || begin > source_.num_tokens() - width) throw std::out_of_range("a span leaves the corpus");
    const CorpusPart* part = source_.part_of(begin, &CorpusPart::first_token);
    for (std::int64_t filled = 0; filled < width; ++part) {
      const std::int64_t at = begin + filled - part->first_token;
      const std::int64_t count = std::min(part->num_tokens - at, width - filled);
      copy(*part, at, count, out + filled);
      filled += count;
    }
  }

  std::pair<std::int64_t, std::int64_t> range() const { return {smallest_, largest_}; }

 private:
  void copy(const CorpusPart& part, std::int64_t first, std::int64_t count, std::int64_t* out) {
    if (count == 0) return;
    if (first < 0 || first > part.num_tokens - count) throw std::out_of_range("a document leaves the .bin");
    const char* from = part.tokens + first * source_.itemsize();
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

  const TokenSource& source_;
  std::int64_t smallest_ = std::numeric_limits<std::int64_t>::max();
  std::int64_t largest_ = std::numeric_limits<std::int64_t>::min();
};

// Computes the start of each sample in a stream of documents: several threads walk over the documents' lengths.

#pragma once

#include <algorithm>
#include <cstdint>
#include <future>
#include <limits>
#include <stdexcept>
#include <vector>

#include "progress.h"

// Row 0 is (0, 0); row k is the document that holds token k * seq_length of the stream, and the offset in it.
//
// View returns integers by index, like an IntegerView; Index is the type of the rows.
template <typename View, typename Index>
class SampleIndex {
 public:
  SampleIndex(const View& lengths, const View& documents, std::int64_t seq_length, std::int64_t num_samples,
              Index* rows, Progress* progress)
      : lengths_(lengths),
        documents_(documents),
        seq_length_(seq_length),
        num_rows_(num_samples + 1),
        rows_(rows),
        progress_(progress) {}

  // Each of num_parts threads counts the tokens of its documents. Once it knows the number of tokens before them, it
  // walks them. A single thread walks at once.
  void fill(std::int64_t num_parts) {
    const std::int64_t size = documents_.size();
    const auto bound = [&](std::int64_t part) { return size / num_parts * part + size % num_parts * part / num_parts; };
    std::vector<std::int64_t> starts(static_cast<std::size_t>(num_parts) + 1, 0);
    if (num_parts > 1) {
      for_each_part(num_parts, [&](std::int64_t p) {
        starts[static_cast<std::size_t>(p) + 1] = num_tokens(bound(p), bound(p + 1));
      });
      for (std::size_t p = 1; p < starts.size(); ++p) starts[p] += starts[p - 1];
    }
    rows_[0] = rows_[1] = 0;
    for_each_part(num_parts, [&](std::int64_t p) {
      const std::int64_t start = starts[static_cast<std::size_t>(p)];
      const bool is_last = p + 1 == num_parts;
      const std::int64_t end_row = is_last ? num_rows_ : first_row(starts[static_cast<std::size_t>(p) + 1]);
      fill_rows(bound(p), bound(p + 1), start, end_row);
    });
  }

 private:
  static constexpr std::int64_t kMaxLength = std::numeric_limits<std::int32_t>::max();
  static constexpr std::int64_t kAhead = 32;  // documents to prefetch lengths for, from anywhere in memory

  static constexpr std::int64_t kTold = 1 << 16;  // documents between two updates of the progress

  template <typename Work>
  static void for_each_part(std::int64_t num_parts, const Work& work) {
    std::vector<std::future<void>> others;
    for (std::int64_t p = 1; p < num_parts; ++p)
      others.push_back(std::async(std::launch::async, [&work, p] { work(p); }));
    work(0);
    for (std::future<void>& other : others) other.get();  // rethrows a thread's exception
  }

  std::int64_t length_at(std::int64_t position) const {
    if (position + kAhead < documents_.size()) lengths_.prefetch(documents_[position + kAhead]);
    const std::int64_t document = documents_[position];
    if (document < 0 || document >= lengths_.size())
      throw std::out_of_range("a document number is outside the array of lengths");
    const std::int64_t length = lengths_[document];
    if (length < 0 || length > kMaxLength) throw std::out_of_range("a length is outside [0, 2**31)");
    return length;
  }

  std::int64_t num_tokens(std::int64_t first, std::int64_t last) const {
    std::int64_t sum = 0;
    for (std::int64_t position = first; position < last; ++position) sum += length_at(position);
    return sum;
  }

  // The first row after row 0 whose sample starts at this token or later.
  std::int64_t first_row(std::int64_t token) const {
    return std::clamp<std::int64_t>((token + seq_length_ - 1) / seq_length_, 1, num_rows_);
  }

  // Fills the rows below end_row whose samples start in these documents; `start` tokens come before the documents.
  void fill_rows(std::int64_t first, std::int64_t last, std::int64_t start, std::int64_t end_row) const {
    std::int64_t row = first_row(start);
    std::int64_t offset = row * seq_length_ - start;  // from this document's first token to the next sample's
    for (std::int64_t position = first; position < last && row < end_row; ++position) {
      if ((position - first) % kTold == kTold - 1) add_to(progress_, kTold);
      const std::int64_t length = length_at(position);
      // A document's first row is written before we know whether it starts a sample: most documents start at most
      // one, and whether they do is almost random, so a branch would often be mispredicted.
      do {
        rows_[2 * row] = static_cast<Index>(position);
        rows_[2 * row + 1] = static_cast<Index>(offset);
        const bool starts = offset < length;
        row += starts;
        offset += starts ? seq_length_ : 0;
      } while (offset < length && row < end_row);
      offset -= length;
    }
    if (row < end_row) throw std::out_of_range("the documents hold too few tokens for num_samples samples");
  }

  const View& lengths_;
  const View& documents_;
  std::int64_t seq_length_, num_rows_;
  Index* rows_;
  Progress* progress_;
};

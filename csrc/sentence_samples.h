// Selects the sentences of each sample of a BERT-like model: a walk over documents of sentences, then a shuffle.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <vector>

#include "integer_view.h"
#include "progress.h"

// A sample is the sentences [first, last) of one document, and its largest number of tokens.
struct SentenceSample {
  std::int64_t first, last, max_tokens;
};

// Samples have the same order as in megatron-core's build_mapping; tests compare both. A sample ends with the sentence
// that fills it, but does not leave a single sentence for the next sample. Some samples are made shorter. Whole epochs
// are read until there are num_samples. Unlike in megatron-core, empty sentences are not counted.
class SentenceSamples {
 public:
  SentenceSamples(const IntegerView& bounds, const IntegerView& lengths, std::int64_t max_tokens, double short_prob,
                  std::int64_t min_sentences, std::int64_t seed)
      : bounds_(bounds),
        lengths_(lengths),
        max_tokens_(max_tokens),
        short_ratio_(short_prob > 0 ? std::lround(1.0 / short_prob) : 0),
        min_sentences_(min_sentences),
        seed_(seed),
        random_(static_cast<std::uint32_t>(seed)) {}

  // Returns at least num_samples samples, in a shuffled order, or the samples of one epoch if num_samples is negative.
  // Returns none if no document has enough sentences.
  std::vector<SentenceSample> build(std::int64_t num_samples, Progress* progress) {
    std::vector<SentenceSample> samples;
    do {
      const std::size_t before = samples.size();
      add_epoch(samples, progress);
      if (samples.size() == before) break;
    } while (static_cast<std::int64_t>(samples.size()) < num_samples);
    std::mt19937_64 random(static_cast<std::uint64_t>(seed_ + 1));
    for (std::size_t i = samples.size(); i-- > 1;) std::swap(samples[i], samples[random() % (i + 1)]);
    return samples;
  }

 private:
  static constexpr std::int64_t kLongSentence = 512;  // tokens; a document with a longer sentence is skipped

  void add_epoch(std::vector<SentenceSample>& samples, Progress* progress) {
    const std::int64_t num_documents = bounds_.size() - 1;
    for (std::int64_t document = 0; document < num_documents; ++document) {
      const std::int64_t begin = bounds_[document], end = bounds_[document + 1];
      if (begin < 0 || begin > end || end > lengths_.size())
        throw std::out_of_range("a document lies outside the array of lengths");
      if (is_usable(begin, end)) add_document(samples, begin, end);
      add_to(progress, 1);
    }
  }

  std::int64_t num_sentences(std::int64_t begin, std::int64_t end) const {
    std::int64_t number = 0;
    for (std::int64_t i = begin; i < end; ++i) number += lengths_[i] > 0;
    return number;
  }

  bool is_usable(std::int64_t begin, std::int64_t end) const {
    const std::int64_t number = num_sentences(begin, end);
    if (number < std::max<std::int64_t>(min_sentences_, 1)) return false;
    if (number == 1) return true;  // one sentence may be long: it is cut
    for (std::int64_t i = begin; i < end; ++i)
      if (lengths_[i] > kLongSentence) return false;
    return true;
  }

  void add_document(std::vector<SentenceSample>& samples, std::int64_t begin, std::int64_t end) {
    std::int64_t first = begin, num_tokens = 0, number = 0, target = next_target();
    std::int64_t rest = num_sentences(begin, end);
    for (std::int64_t i = begin; i < end; ++i) {
      if (lengths_[i] == 0) continue;
      num_tokens += lengths_[i];
      number += 1;
      rest -= 1;
      const bool is_full = num_tokens >= target && rest > 1 && number >= min_sentences_;
      if (!is_full && rest > 0) continue;
      samples.push_back({first, i + 1, target});
      first = i + 1;
      num_tokens = number = 0;
      target = next_target();
    }
  }

  // One number is drawn for each sample, and one more after a document's last sample.
  std::int64_t next_target() {
    if (short_ratio_ == 0) return max_tokens_;
    const auto number = static_cast<std::int64_t>(random_());
    return number % short_ratio_ == 0 ? 2 + number % (max_tokens_ - 1) : max_tokens_;
  }

  const IntegerView& bounds_;
  const IntegerView& lengths_;
  std::int64_t max_tokens_, short_ratio_, min_sentences_, seed_;
  std::mt19937 random_;
};

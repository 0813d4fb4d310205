// The order of a blend: sample i comes from the dataset that is furthest behind its share, the first one on a tie.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "progress.h"

// Makes the same choices as a loop over all datasets, to the bit, but only looks at a few of them.
//
// A dataset's deficit, weight * i - taken, grows with i until the dataset is chosen. This also holds in floating
// point, because rounding keeps the order. So at the start of a block of samples we know which datasets stay below
// some bound until its end. If the choice among the others is not below the bound, it is the choice among all.
// Otherwise the block ends early, and the next block begins there with a lower bound.
//
// Compiled without fused multiply-subtract: it would round once instead of twice, and break ties differently.
class BlendOrder {
 public:
  // Takes at least one weight. Weights are finite and not negative. `owed` is how far each dataset is behind its share
  // before the first sample, of a blend that continues another one.
  BlendOrder(const std::vector<double>& weights, const std::vector<double>& owed)
      : weights_(weights),
        owed_(owed),
        taken_(negative(owed)),
        near_weights_(weights.size()),
        near_taken_(weights.size()),
        near_(weights.size()),
        reaches_(weights.size()) {}

  // Writes each sample's dataset and its number in that dataset.
  void fill(std::int64_t num_samples, std::int16_t* datasets, std::int64_t* samples, Progress* progress) {
    const std::size_t size = weights_.size();
    const std::int64_t block = size <= kFew ? kWholeBlock : size <= kMany ? kShortBlock : kLongBlock;
    for (std::int64_t i = 0; i < num_samples;) {
      const std::int64_t stop = std::min(num_samples, i + block);
      gather(stop - 1);
      const std::int64_t filled = fill_block(i, stop, datasets, samples);
      add_to(progress, filled - i);
      i = filled;
      for (std::size_t j = 0; j < num_near_; ++j) taken_[near_[j]] = near_taken_[j];
    }
  }

 private:
  static constexpr std::size_t kFew = 16, kMany = 256;  // datasets; for few, checking all is faster than skipping
  static constexpr std::int64_t kShortBlock = 16, kLongBlock = 32, kWholeBlock = 1 << 16;
  static constexpr double kMinSlack = 1e-3;

  static std::vector<double> negative(std::vector<double> values) {
    for (double& value : values) value = 0.0 - value;
    return values;
  }

  static double position(std::int64_t i) { return static_cast<double>(std::max<std::int64_t>(i, 1)); }

  // Copies the datasets that reach the bound by sample `last`, in order.
  void gather(std::int64_t last) {
    const double end = position(last), bound = bound_;
    const std::size_t size = weights_.size();
    const double *weights = weights_.data(), *taken = taken_.data();
    std::uint8_t* reaches = reaches_.data();
    for (std::size_t d = 0; d < size; ++d) reaches[d] = weights[d] * end - taken[d] >= bound;
    std::uint16_t* near = near_.data();
    std::size_t count = 0;
    for (std::size_t d = 0; d < size; ++d) {
      near[count] = static_cast<std::uint16_t>(d);
      count += reaches[d];
    }
    num_near_ = count;
    for (std::size_t j = 0; j < count; ++j) {
      near_weights_[j] = weights[near[j]];
      near_taken_[j] = taken[near[j]];
    }
  }

  // Fills samples i to stop, or up to a sample that may be a skipped dataset's; returns the first sample not filled.
  std::int64_t fill_block(std::int64_t i, std::int64_t stop, std::int16_t* datasets, std::int64_t* samples) {
    const double* weights = near_weights_.data();
    double* taken = near_taken_.data();
    double lowest = std::numeric_limits<double>::infinity();
    for (; i < stop; ++i) {
      const double at = position(i);
      double largest = -std::numeric_limits<double>::infinity();
      std::size_t furthest = 0;
      for (std::size_t j = 0; j < num_near_; ++j) {
        const double behind = weights[j] * at - taken[j];
        if (behind > largest) {
          largest = behind;
          furthest = j;
        }
      }
      if (largest < bound_ || num_near_ == 0) {
        slack_ *= 2;
        bound_ = largest - slack_;
        return i;
      }
      lowest = std::min(lowest, largest);
      datasets[i] = static_cast<std::int16_t>(near_[furthest]);
      samples[i] = std::llround(taken[furthest] + owed_[near_[furthest]]);
      taken[furthest] += 1.0;
    }
    slack_ = std::max(slack_ * 0.9, kMinSlack);
    bound_ = weights_.size() <= kFew ? -std::numeric_limits<double>::infinity() : lowest - slack_;
    return i;
  }

  std::vector<double> weights_, owed_;
  std::vector<double> taken_;  // samples taken, less those owed; whole numbers below 2**53 are exact in a double
  std::vector<double> near_weights_, near_taken_;
  std::vector<std::uint16_t> near_;
  std::vector<std::uint8_t> reaches_;
  std::size_t num_near_ = 0;
  double bound_ = -std::numeric_limits<double>::infinity();
  double slack_ = 0.01;  // distance of the next bound below the last block: large enough that most blocks complete
};

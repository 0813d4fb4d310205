// The two loops of the data layer that Python is too slow for: where each sample starts, and which dataset of a
// blend each sample comes from. Both run without the GIL. Inputs are checked here, because they come from files:
// a bad one raises, it never reads or writes outside an array.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

// A one-dimensional array of int32 or int64 that need not be aligned: the arrays of an .idx start at byte 34.
class IntegerView {
 public:
  IntegerView(const py::array& array, const char* name)
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

constexpr std::int64_t kMaxLength = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMaxSamples = std::numeric_limits<std::int64_t>::max() / 64;

// Row 0 is (0, 0); row k is the document that holds token k * seq_length of the stream, and the offset in it.
template <typename Index>
void fill_sample_index(const IntegerView& lengths, const IntegerView& documents, std::int64_t seq_length,
                       std::int64_t num_samples, Index* rows) {
  rows[0] = rows[1] = 0;
  std::int64_t row = 1;
  std::int64_t offset = seq_length;  // of the next sample's first token, from the start of this document
  for (std::int64_t position = 0; position < documents.size() && row <= num_samples; ++position) {
    const std::int64_t document = documents[position];
    if (document < 0 || document >= lengths.size())
      throw std::out_of_range("a document number is outside the array of lengths");
    const std::int64_t length = lengths[document];
    if (length < 0 || length > kMaxLength) throw std::out_of_range("a length is outside [0, 2**31)");
    for (; row <= num_samples && offset < length; ++row, offset += seq_length) {
      rows[2 * row] = static_cast<Index>(position);
      rows[2 * row + 1] = static_cast<Index>(offset);
    }
    offset -= length;
  }
  if (row <= num_samples) throw std::out_of_range("the documents hold too few tokens for num_samples samples");
}

template <typename Index>
py::array new_sample_index(const IntegerView& lengths, const IntegerView& documents, std::int64_t seq_length,
                           std::int64_t num_samples) {
  py::array_t<Index> rows(std::vector<py::ssize_t>{num_samples + 1, 2});
  Index* data = rows.mutable_data();
  {
    py::gil_scoped_release release;
    fill_sample_index(lengths, documents, seq_length, num_samples, data);
  }
  return rows;
}

py::array build_sample_index(const py::array& sequence_lengths, const py::array& document_index,
                             std::int64_t seq_length, std::int64_t num_samples, bool wide) {
  const IntegerView lengths(sequence_lengths, "sequence_lengths");
  const IntegerView documents(document_index, "document_index");
  if (seq_length < 1 || seq_length > kMaxLength) throw std::invalid_argument("seq_length must be in [1, 2**31)");
  if (num_samples < 0 || num_samples > kMaxSamples) throw std::invalid_argument("num_samples is out of range");
  if (!wide && documents.size() > kMaxLength) throw std::invalid_argument("document_index needs wide=True");
  return wide ? new_sample_index<std::int64_t>(lengths, documents, seq_length, num_samples)
              : new_sample_index<std::int32_t>(lengths, documents, seq_length, num_samples);
}

// Greedy: sample i comes from the dataset that is furthest behind its share; the first one on a tie.
void fill_blend(const std::vector<double>& weights, std::int64_t num_samples, std::int16_t* datasets,
                std::int64_t* samples) {
  std::vector<std::int64_t> taken(weights.size(), 0);
  for (std::int64_t i = 0; i < num_samples; ++i) {
    const double position = static_cast<double>(std::max<std::int64_t>(i, 1));
    std::size_t furthest = 0;
    double largest = -std::numeric_limits<double>::infinity();
    for (std::size_t d = 0; d < weights.size(); ++d) {
      // volatile: a fused multiply-subtract would round once instead of twice, and break ties otherwise.
      const volatile double share = weights[d] * position;
      const double behind = share - static_cast<double>(taken[d]);
      if (behind > largest) {
        largest = behind;
        furthest = d;
      }
    }
    datasets[i] = static_cast<std::int16_t>(furthest);
    samples[i] = taken[furthest]++;
  }
}

std::pair<py::array, py::array> build_blend_index(const std::vector<double>& weights, std::int64_t num_samples) {
  if (weights.empty() || weights.size() > 32767) throw std::invalid_argument("a blend takes 1 to 32767 datasets");
  if (num_samples < 0 || num_samples > kMaxSamples) throw std::invalid_argument("num_samples is out of range");
  py::array_t<std::int16_t> datasets(num_samples);
  py::array_t<std::int64_t> samples(num_samples);
  std::int16_t* dataset_data = datasets.mutable_data();
  std::int64_t* sample_data = samples.mutable_data();
  {
    py::gil_scoped_release release;
    fill_blend(weights, num_samples, dataset_data, sample_data);
  }
  return {std::move(datasets), std::move(samples)};
}

}  // namespace

PYBIND11_MODULE(_index_builder, module) {
  module.doc() = "Sample index and blend of megalite's datasets, in C++.";
  module.def("build_sample_index", &build_sample_index, py::arg("sequence_lengths"), py::arg("document_index"),
             py::arg("seq_length"), py::arg("num_samples"), py::arg("wide") = false,
             "Rows (position in document_index, token offset) where each sample starts, [num_samples + 1, 2].");
  module.def("build_blend_index", &build_blend_index, py::arg("weights"), py::arg("num_samples"),
             "For each sample of a blend its dataset (int16) and its number in that dataset (int64).");
}

// The loops of the data layer that Python is too slow for: the order of documents and samples, where each sample
// starts, which dataset of a blend it comes from, and its tokens. All run without the GIL. Inputs are checked
// here, because they come from files: a bad one raises, it never reads or writes outside an array.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "integer_view.h"
#include "legacy_random.h"
#include "sample_gather.h"

namespace py = pybind11;

namespace {

constexpr std::int64_t kMaxLength = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMaxSamples = std::numeric_limits<std::int64_t>::max() / 64;
constexpr std::int64_t kAhead = 32;  // documents whose lengths are on their way: they lie anywhere in memory

// Row 0 is (0, 0); row k is the document that holds token k * seq_length of the stream, and the offset in it.
template <typename View, typename Index>
void fill_sample_index(const View& lengths, const View& documents, std::int64_t seq_length,
                       std::int64_t num_samples, Index* rows) {
  rows[0] = rows[1] = 0;
  std::int64_t row = 1;
  std::int64_t offset = seq_length;  // of the next sample's first token, from the start of this document
  for (std::int64_t position = 0; position < documents.size() && row <= num_samples; ++position) {
    if (position + kAhead < documents.size()) lengths.prefetch(documents[position + kAhead]);
    const std::int64_t document = documents[position];
    if (document < 0 || document >= lengths.size())
      throw std::out_of_range("a document number is outside the array of lengths");
    const std::int64_t length = lengths[document];
    if (length < 0 || length > kMaxLength) throw std::out_of_range("a length is outside [0, 2**31)");
    // A document's first row is written before it is known to be one: most hold at most one, and whether they
    // do is as good as random, so that a branch would be guessed wrong.
    do {
      rows[2 * row] = static_cast<Index>(position);
      rows[2 * row + 1] = static_cast<Index>(offset);
      const bool starts = offset < length;
      row += starts;
      offset += starts ? seq_length : 0;
    } while (offset < length && row <= num_samples);
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
    if (lengths.is_packed_int32() && documents.is_packed_int32())
      fill_sample_index(PackedView(lengths), PackedView(documents), seq_length, num_samples, data);
    else
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
// Built without fused multiply-subtract, which would round once instead of twice, and break ties otherwise.
void fill_blend(const std::vector<double>& weights, std::int64_t num_samples, std::int16_t* datasets,
                std::int64_t* samples) {
  const std::size_t size = weights.size();
  std::vector<double> taken(size, 0.0);  // whole numbers below 2**53, exact in a double
  for (std::int64_t i = 0; i < num_samples; ++i) {
    const double position = static_cast<double>(std::max<std::int64_t>(i, 1));
    std::size_t furthest = 0;
    double largest = weights[0] * position - taken[0];
    for (std::size_t d = 1; d < size; ++d) {
      const double behind = weights[d] * position - taken[d];
      if (behind > largest) {
        largest = behind;
        furthest = d;
      }
    }
    datasets[i] = static_cast<std::int16_t>(furthest);
    samples[i] = static_cast<std::int64_t>(taken[furthest]);
    taken[furthest] += 1.0;
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

template <typename T>
void fill_shuffled_as(LegacyRandom& random, py::array& out, std::int64_t start, std::int64_t stop) {
  T* values = static_cast<T*>(out.mutable_data());
  const std::int64_t size = out.size();
  py::gil_scoped_release release;
  for (std::int64_t i = 0, next = start; i < size; ++i, next = next + 1 == stop ? start : next + 1)
    values[i] = static_cast<T>(next);
  random.shuffle(values, size);
}

void fill_shuffled(LegacyRandom& random, py::array& out, std::int64_t start, std::int64_t stop) {
  const char kind = out.dtype().kind(), order = out.dtype().byteorder();
  const bool wide = out.itemsize() == 8 && kind == 'i';
  const bool narrow = out.itemsize() == 4 && (kind == 'i' || kind == 'u');
  const bool aligned = reinterpret_cast<std::uintptr_t>(out.data()) % static_cast<std::uintptr_t>(out.itemsize()) == 0;
  if (out.ndim() != 1 || !(out.flags() & py::array::c_style) || !aligned || order != '=' || !(wide || narrow))
    throw std::invalid_argument("out must be a contiguous, aligned 1-d array of int32, uint32 or int64");
  const std::int64_t limit = wide ? std::numeric_limits<std::int64_t>::max()
                             : kind == 'i' ? kMaxLength + 1
                                           : std::int64_t{1} << 32;
  if (start < 0 || start > stop || stop > limit) throw std::invalid_argument("start or stop is out of range");
  if (out.size() != 0 && (start == stop || out.size() % (stop - start) != 0))
    throw std::invalid_argument("out must take whole epochs of stop - start numbers");
  if (wide)
    fill_shuffled_as<std::int64_t>(random, out, start, stop);
  else  // the same bits, signed or not
    fill_shuffled_as<std::uint32_t>(random, out, start, stop);
}

template <typename Token>
std::pair<std::int64_t, std::int64_t> gather_as(const SampleSource& source, const IntegerView& rows,
                                                std::int64_t width, std::int64_t* out) {
  py::gil_scoped_release release;
  TokenReader<Token> reader(source);
  for (std::int64_t i = 0; i < rows.size(); ++i) reader.read_sample(rows[i], width, out + i * width);
  return reader.range();
}

std::pair<std::int64_t, std::int64_t> gather_samples(const py::array& tokens, const py::array& sequence_offsets,
                                                     const py::array& sequence_lengths,
                                                     const py::array& document_index,
                                                     const py::array& sample_index, const py::array& rows,
                                                     py::array_t<std::int64_t>& out) {
  const IntegerView row_view(rows, "rows");
  const SampleSource source{static_cast<const char*>(tokens.data()),
                            tokens.size(),
                            tokens.itemsize(),
                            IntegerView(sequence_offsets, "sequence_offsets"),
                            IntegerView(sequence_lengths, "sequence_lengths"),
                            IntegerView(document_index, "document_index"),
                            IntegerView(sample_index, "sample_index")};
  if (tokens.ndim() != 1 || !(tokens.flags() & py::array::c_style) || tokens.dtype().byteorder() == '>')
    throw std::invalid_argument("tokens must be a contiguous 1-d array");
  if (source.offsets.size() != source.lengths.size())
    throw std::invalid_argument("sequence_offsets and sequence_lengths must be of one size");
  if (out.ndim() != 2 || out.shape(0) != row_view.size() || !(out.flags() & py::array::c_style))
    throw std::invalid_argument("out must be a contiguous array of one row a sample");
  const std::int64_t width = out.shape(1);
  std::int64_t* data = out.mutable_data();
  const char kind = tokens.dtype().kind();
  if (kind == 'i' && source.itemsize == 1) return gather_as<std::int8_t>(source, row_view, width, data);
  if (kind == 'i' && source.itemsize == 2) return gather_as<std::int16_t>(source, row_view, width, data);
  if (kind == 'i' && source.itemsize == 4) return gather_as<std::int32_t>(source, row_view, width, data);
  if (kind == 'i' && source.itemsize == 8) return gather_as<std::int64_t>(source, row_view, width, data);
  if (kind == 'u' && source.itemsize == 1) return gather_as<std::uint8_t>(source, row_view, width, data);
  if (kind == 'u' && source.itemsize == 2) return gather_as<std::uint16_t>(source, row_view, width, data);
  throw std::invalid_argument("tokens must be of a type that an indexed dataset holds");
}

}  // namespace

PYBIND11_MODULE(_index_builder, module) {
  module.doc() = "Orders, indices, blends and tokens of megalite's samples, in C++.";
  module.def("build_sample_index", &build_sample_index, py::arg("sequence_lengths"), py::arg("document_index"),
             py::arg("seq_length"), py::arg("num_samples"), py::arg("wide") = false,
             "Rows (position in document_index, token offset) where each sample starts, [num_samples + 1, 2].");
  module.def("build_blend_index", &build_blend_index, py::arg("weights"), py::arg("num_samples"),
             "For each sample of a blend its dataset (int16) and its number in that dataset (int64).");
  module.def("gather_samples", &gather_samples, py::arg("tokens"), py::arg("sequence_offsets"),
             py::arg("sequence_lengths"), py::arg("document_index"), py::arg("sample_index"), py::arg("rows"),
             py::arg("out").noconvert(),
             "Copies the samples of the given rows of sample_index, flattened, into out [b, width]; returns the "
             "smallest and the largest token.");
  py::class_<LegacyRandom>(module, "LegacyRandom", "numpy.random.RandomState(seed), as far as it shuffles.")
      .def(py::init<std::int64_t>(), py::arg("seed"))
      .def("fill_shuffled", &fill_shuffled, py::arg("out").noconvert(), py::arg("start"), py::arg("stop"),
           "Fills out with repetitions of [start, stop) and shuffles it, as numpy's shuffle does.");
}

// The parts of the data layer for which Python is too slow: the order of documents and samples, the start of each
// sample, its dataset in a blend, and its tokens. Also, reading a mapped file that became shorter, which Python cannot
// do. Loops run without the GIL. Inputs are checked here, because they come from files: a bad input raises, and never
// reads or writes outside an array.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "blend_order.h"
#include "integer_view.h"
#include "legacy_random.h"
#include "mapped_file.h"
#include "new_array.h"
#include "progress.h"
#include "sample_gather.h"
#include "sample_index.h"
#include "sentence_samples.h"

namespace py = pybind11;

namespace {

constexpr std::int64_t kMaxLength = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMaxSamples = std::numeric_limits<std::int64_t>::max() / 64;
constexpr std::int64_t kMaxThreads = 16;
constexpr std::int64_t kMinPart = 1 << 17;  // minimum number of documents per thread

template <typename Index>
py::array new_sample_index(const IntegerView& lengths, const IntegerView& documents, std::int64_t seq_length,
                           std::int64_t num_samples, Progress* progress) {
  py::array_t<Index> rows = new_array<Index>({num_samples + 1, 2});
  Index* data = rows.mutable_data();
  const auto fill = [&](const auto& length_view, const auto& document_view) {
    const std::int64_t num_threads = std::clamp<std::int64_t>(std::thread::hardware_concurrency(), 1, kMaxThreads);
    const std::int64_t num_parts = std::clamp<std::int64_t>(document_view.size() / kMinPart, 1, num_threads);
    SampleIndex(length_view, document_view, seq_length, num_samples, data, progress).fill(num_parts);
  };
  {
    py::gil_scoped_release release;
    if (lengths.is_packed_int32() && documents.is_packed_int32())
      fill(PackedView(lengths), PackedView(documents));
    else
      fill(lengths, documents);
  }
  return std::move(rows);
}

py::array build_sample_index(const py::array& sequence_lengths, const py::array& document_index,
                             std::int64_t seq_length, std::int64_t num_samples, bool wide, Progress* progress) {
  const IntegerView lengths(sequence_lengths, "sequence_lengths");
  const IntegerView documents(document_index, "document_index");
  if (seq_length < 1 || seq_length > kMaxLength) throw std::invalid_argument("seq_length must be in [1, 2**31)");
  if (num_samples < 0 || num_samples > kMaxSamples) throw std::invalid_argument("num_samples is out of range");
  if (!wide && documents.size() > kMaxLength) throw std::invalid_argument("document_index needs wide=True");
  return wide ? new_sample_index<std::int64_t>(lengths, documents, seq_length, num_samples, progress)
              : new_sample_index<std::int32_t>(lengths, documents, seq_length, num_samples, progress);
}

std::pair<py::array, py::array> build_blend_index(const std::vector<double>& weights, std::int64_t num_samples,
                                                  Progress* progress, std::vector<double> owed) {
  if (weights.empty() || weights.size() > 32767) throw std::invalid_argument("a blend takes 1 to 32767 datasets");
  for (const double weight : weights)
    if (!std::isfinite(weight) || weight < 0) throw std::invalid_argument("a weight must be finite and not negative");
  if (owed.empty()) owed.resize(weights.size());
  if (owed.size() != weights.size() || !std::all_of(owed.begin(), owed.end(), [](double x) { return std::isfinite(x); }))
    throw std::invalid_argument("owed must have a finite number for each weight");
  if (num_samples < 0 || num_samples > kMaxSamples) throw std::invalid_argument("num_samples is out of range");
  py::array_t<std::int16_t> datasets = new_array<std::int16_t>({num_samples});
  py::array_t<std::int64_t> samples = new_array<std::int64_t>({num_samples});
  std::int16_t* dataset_data = datasets.mutable_data();
  std::int64_t* sample_data = samples.mutable_data();
  {
    py::gil_scoped_release release;
    BlendOrder(weights, owed).fill(num_samples, dataset_data, sample_data, progress);
  }
  return {std::move(datasets), std::move(samples)};
}

py::array_t<std::int64_t> build_sentence_samples(const py::array& document_bounds, const py::array& sequence_lengths,
                                                 std::int64_t num_samples, std::int64_t max_tokens,
                                                 double short_prob, std::int64_t min_sentences, std::int64_t seed,
                                                 Progress* progress) {
  const IntegerView bounds(document_bounds, "document_bounds");
  const IntegerView lengths(sequence_lengths, "sequence_lengths");
  if (max_tokens < 2 || max_tokens > kMaxLength) throw std::invalid_argument("max_tokens must be in [2, 2**31)");
  if (!(short_prob >= 0 && short_prob <= 1)) throw std::invalid_argument("short_prob must be in [0, 1]");
  if (num_samples > kMaxSamples) throw std::invalid_argument("num_samples is out of range");
  std::vector<SentenceSample> samples;
  {
    py::gil_scoped_release release;
    samples = SentenceSamples(bounds, lengths, max_tokens, short_prob, min_sentences, seed).build(num_samples, progress);
  }
  py::array_t<std::int64_t> rows = new_array<std::int64_t>({static_cast<py::ssize_t>(samples.size()), 3});
  std::int64_t* data = rows.mutable_data();
  for (const SentenceSample& sample : samples) {
    *data++ = sample.first;
    *data++ = sample.last;
    *data++ = sample.max_tokens;
  }
  return rows;
}

template <typename T>
void fill_shuffled_as(LegacyRandom& random, py::array& out, std::int64_t start, std::int64_t stop,
                      Progress* progress) {
  T* values = static_cast<T*>(out.mutable_data());
  const std::int64_t size = out.size();
  py::gil_scoped_release release;
  for (std::int64_t i = 0, next = start; i < size; ++i, next = next + 1 == stop ? start : next + 1)
    values[i] = static_cast<T>(next);
  random.shuffle(values, size, progress);
}

void fill_shuffled(LegacyRandom& random, py::array& out, std::int64_t start, std::int64_t stop, Progress* progress) {
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
    fill_shuffled_as<std::int64_t>(random, out, start, stop, progress);
  else  // signed and unsigned have the same bits
    fill_shuffled_as<std::uint32_t>(random, out, start, stop, progress);
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

// The bytes of a mapped file, which stays mapped during the array's lifetime.
py::array_t<std::uint8_t> array_of(const py::object& self) {
  const MappedFile& file = self.cast<const MappedFile&>();
  py::array_t<std::uint8_t> bytes(static_cast<py::ssize_t>(file.size()), reinterpret_cast<std::uint8_t*>(file.data()), self);
  if (!file.is_writable()) bytes.attr("setflags")(py::arg("write") = false);
  return bytes;
}

bool all_unchanged(const std::vector<MappedFile*>& files, std::int64_t max_age_ms) {
  return std::all_of(files.begin(), files.end(),
                     [&](MappedFile* file) { return file->change(max_age_ms, false) == FileChange::kNone; });
}

}  // namespace

PYBIND11_MODULE(_index_builder, module) {
  module.doc() = "Orders, indices, blends, tokens and mapped files of megalite's samples, in C++.";
  py::class_<Progress>(module, "Progress", "How far a build is, to be asked from another thread.")
      .def(py::init<>())
      .def_property_readonly("done", &Progress::done, "Elements built so far, of all builds it was given to.");
  module.def("build_sample_index", &build_sample_index, py::arg("sequence_lengths"), py::arg("document_index"),
             py::arg("seq_length"), py::arg("num_samples"), py::arg("wide") = false,
             py::arg("progress") = py::none(),
             "Rows (position in document_index, token offset) where each sample starts, [num_samples + 1, 2]; counts "
             "documents.");
  module.def("build_sentence_samples", &build_sentence_samples, py::arg("document_bounds"),
             py::arg("sequence_lengths"), py::arg("num_samples"), py::arg("max_tokens"), py::arg("short_prob"),
             py::arg("min_sentences"), py::arg("seed"), py::arg("progress") = py::none(),
             "Rows (first sentence, sentence after the last, tokens at most) of shuffled samples, [n, 3], at least "
             "num_samples from whole epochs, or those of one if that is negative; counts documents.");
  module.def("build_blend_index", &build_blend_index, py::arg("weights"), py::arg("num_samples"),
             py::arg("progress") = py::none(), py::arg("owed") = std::vector<double>(),
             "For each sample of a blend its dataset (int16) and its number in that dataset (int64); counts samples. "
             "owed: how many samples each dataset is behind its share at the start.");
  module.def("gather_samples", &gather_samples, py::arg("tokens"), py::arg("sequence_offsets"),
             py::arg("sequence_lengths"), py::arg("document_index"), py::arg("sample_index"), py::arg("rows"),
             py::arg("out").noconvert(),
             "Copies the samples of the given rows of sample_index, flattened, into out [b, width]; returns the "
             "smallest and the largest token.");
  module.def("empty_bytes", [](std::size_t size) { return new_array<std::uint8_t>({static_cast<py::ssize_t>(size)}); },
             py::arg("size"), "An array of bytes of no particular values, quick to fill for the first time.");
  py::enum_<FileChange>(module, "FileChange", "What happened to a mapped file since it was opened.")
      .value("none", FileChange::kNone)
      .value("lost", FileChange::kLost, "It became shorter or unreadable: a part may have been read as zeros.")
      .value("longer", FileChange::kLonger)
      .value("modified", FileChange::kModified, "It was written to, or touched.")
      .value("rewritten", FileChange::kRewritten, "It was written to, and its modification time was set back.");
  py::class_<MappedFile>(module, "MappedFile", "A file's bytes in memory, which can be read after the file was cut.")
      .def(py::init<std::string, bool, bool>(), py::arg("path"), py::arg("writable") = false,
           py::arg("is_shared") = false)
      .def("array", &array_of, "All bytes, uint8; read-only unless the file was opened to be written.")
      .def("change", &MappedFile::change, py::arg("max_age_ms") = 0, py::arg("asks_server") = false,
           py::call_guard<py::gil_scoped_release>(),
           "What happened to the file; of one that is_shared, only that it became shorter. Its status is looked at "
           "unless that was done less than max_age_ms ago; a client of NFS relies on an old one unless it asks_server.");
  module.def("all_unchanged", &all_unchanged, py::arg("files"), py::arg("max_age_ms"),
             py::call_guard<py::gil_scoped_release>(),
             "Whether all that was read so far of these MappedFiles is what they held when they were opened, as `change`.");
  py::class_<LegacyRandom>(module, "LegacyRandom", "numpy.random.RandomState(seed), as far as it shuffles.")
      .def(py::init<std::int64_t>(), py::arg("seed"))
      .def("fill_shuffled", &fill_shuffled, py::arg("out").noconvert(), py::arg("start"), py::arg("stop"),
           py::arg("progress") = py::none(),
           "Fills out with repetitions of [start, stop) and shuffles it, as numpy's shuffle does.");
}

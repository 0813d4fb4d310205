// The parts of the data layer for which Python is too slow: the order of documents and samples, the start of each
// sample, its dataset in a blend, and its tokens. Also, reading a mapped file that became shorter, which Python cannot
// do. Loops run without the GIL. Inputs are checked here, because they come from files: a bad input raises, and never
// reads or writes outside an array.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
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
#include "permutation.h"
#include "progress.h"
#include "sample_index.h"
#include "sentence_samples.h"
#include "token_source.h"

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

using Extremes = std::pair<std::int64_t, std::int64_t>;  // the smallest and the largest token

// Calls read(reader, i, row) for each row of out, with a reader of the source's type, without the GIL.
template <typename Token, typename Read>
Extremes read_rows(const TokenSource& source, std::int64_t num_rows, std::int64_t width, std::int64_t* out,
                   const Read& read) {
  py::gil_scoped_release release;
  TokenReader<Token> reader(source);
  for (std::int64_t i = 0; i < num_rows; ++i) read(reader, i, out + i * width);
  return reader.range();
}

template <typename Read>
Extremes fill_rows(const TokenSource& source, std::int64_t num_rows, py::array_t<std::int64_t>& out, const Read& read) {
  if (out.ndim() != 2 || out.shape(0) != num_rows || !(out.flags() & py::array::c_style))
    throw std::invalid_argument("out must be a contiguous array of one row a sample");
  const std::int64_t width = out.shape(1);
  std::int64_t* data = out.mutable_data();
  const bool is_signed = source.kind() == 'i', is_unsigned = source.kind() == 'u';
  switch (source.itemsize()) {
    case 1:
      if (is_signed) return read_rows<std::int8_t>(source, num_rows, width, data, read);
      if (is_unsigned) return read_rows<std::uint8_t>(source, num_rows, width, data, read);
      break;
    case 2:
      if (is_signed) return read_rows<std::int16_t>(source, num_rows, width, data, read);
      if (is_unsigned) return read_rows<std::uint16_t>(source, num_rows, width, data, read);
      break;
    case 4:
      if (is_signed) return read_rows<std::int32_t>(source, num_rows, width, data, read);
      break;
    case 8:
      if (is_signed) return read_rows<std::int64_t>(source, num_rows, width, data, read);
      break;
  }
  throw std::invalid_argument("tokens must be of a type that an indexed dataset holds");
}

Extremes gather_samples(const TokenSource& source, const py::array& document_index, const py::array& sample_index,
                        const py::array& rows, py::array_t<std::int64_t>& out) {
  const IntegerView documents(document_index, "document_index"), samples(sample_index, "sample_index");
  const IntegerView row(rows, "rows");
  const std::int64_t width = out.ndim() == 2 ? out.shape(1) : 0;
  return fill_rows(source, row.size(), out, [&](auto& reader, std::int64_t i, std::int64_t* to) {
    reader.read_sample(documents, samples, row[i], width, to);
  });
}

Extremes gather_spans(const TokenSource& source, const py::array& begins, py::array_t<std::int64_t>& out) {
  const IntegerView begin(begins, "begins");
  const std::int64_t width = out.ndim() == 2 ? out.shape(1) : 0;
  return fill_rows(source, begin.size(), out, [&](auto& reader, std::int64_t i, std::int64_t* to) {
    reader.read_span(begin[i], width, to);
  });
}

// Walks sequences that must be back to back from byte `end` on. Returns the number of the first that is not, or of all,
// and the byte where the one before it ends.
std::pair<std::int64_t, std::int64_t> check_sequences(const py::array& lengths, const py::array& offsets,
                                                      std::int64_t itemsize, std::int64_t end) {
  const IntegerView length(lengths, "lengths"), offset(offsets, "offsets");
  if (length.size() != offset.size()) throw std::invalid_argument("lengths and offsets must be of one size");
  py::gil_scoped_release release;
  std::int64_t i = 0;
  for (std::int64_t size; i < length.size() && length[i] >= 0 && offset[i] == end; ++i)
    if (__builtin_mul_overflow(length[i], itemsize, &size) || __builtin_add_overflow(end, size, &end))
      throw std::overflow_error("the sequences are too long");
  return {i, end};
}

bool is_ascending(const py::array& values) {
  const IntegerView value(values, "values");
  py::gil_scoped_release release;
  for (std::int64_t i = 1; i < value.size(); ++i)
    if (value[i] < value[i - 1]) return false;
  return true;
}

// The bytes of a mapped file, which stays mapped during the array's lifetime.
py::array_t<std::uint8_t> array_of(const py::object& self) {
  const MappedFile& file = self.cast<const MappedFile&>();
  py::array_t<std::uint8_t> bytes(static_cast<py::ssize_t>(file.size()), reinterpret_cast<std::uint8_t*>(file.data()), self);
  if (!file.is_writable()) bytes.attr("setflags")(py::arg("write") = false);
  return bytes;
}

// Files that are read together. A call for each file and batch would take longer than reading the batch.
class FileSet {
 public:
  explicit FileSet(std::vector<std::shared_ptr<MappedFile>> files) : files_(std::move(files)) {}

  // Returns whether all files are unchanged. Their status is read unless a call did this at most max_age_ms ago.
  bool is_unchanged(std::int64_t max_age_ms) {
    const std::int64_t now = std::chrono::duration_cast<std::chrono::milliseconds>(
                                 std::chrono::steady_clock::now().time_since_epoch())
                                 .count();
    const std::int64_t num_lost = MappedRanges::num_lost.load();
    if (now - seen_at_.load() < max_age_ms && num_lost == num_lost_.load()) return true;
    for (const auto& file : files_)
      if (file->change(max_age_ms, false) != FileChange::kNone) return false;
    num_lost_ = num_lost;
    seen_at_ = now;
    return true;
  }

 private:
  std::vector<std::shared_ptr<MappedFile>> files_;
  std::atomic<std::int64_t> seen_at_{std::numeric_limits<std::int64_t>::min() / 2}, num_lost_{0};
};

py::array_t<std::int64_t> permute(const py::array& numbers, std::int64_t size, std::vector<std::uint64_t> keys) {
  const IntegerView number(numbers, "numbers");
  const Permutation permutation(size, std::move(keys));
  py::array_t<std::int64_t> images(number.size());
  std::int64_t* data = images.mutable_data();
  py::gil_scoped_release release;
  for (std::int64_t i = 0; i < number.size(); ++i) data[i] = permutation(number[i]);
  return images;
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
  py::class_<TokenSource>(module, "TokenSource", "The tokens of a corpus, in the mapped files of one or several parts.")
      .def(py::init<std::vector<TokenSource::Arrays>>(), py::arg("parts"),
           "parts: of each, in order, the tokens and the sequences' offsets in bytes and lengths.")
      .def("gather_samples", &gather_samples, py::arg("document_index"), py::arg("sample_index"), py::arg("rows"),
           py::arg("out").noconvert(),
           "Copies the samples of the given rows of sample_index, flattened, into out [b, width]; returns the smallest "
           "and the largest token.")
      .def("gather_spans", &gather_spans, py::arg("begins"), py::arg("out").noconvert(),
           "Copies the tokens from each begin on into out [b, width]; returns the smallest and the largest token.");
  module.def("check_sequences", &check_sequences, py::arg("lengths"), py::arg("offsets"), py::arg("itemsize"),
             py::arg("end"),
             "The number of sequences that are back to back from byte `end` on, and the byte where they end.");
  module.def("is_ascending", &is_ascending, py::arg("values"), "Whether no value is smaller than the one before it.");
  module.def("empty_bytes", [](std::size_t size) { return new_array<std::uint8_t>({static_cast<py::ssize_t>(size)}); },
             py::arg("size"), "An array of bytes of no particular values, quick to fill for the first time.");
  py::enum_<FileChange>(module, "FileChange", "What happened to a mapped file since it was opened.")
      .value("none", FileChange::kNone)
      .value("lost", FileChange::kLost, "It became shorter or unreadable: a part may have been read as zeros.")
      .value("longer", FileChange::kLonger)
      .value("modified", FileChange::kModified, "It was written to, or touched.")
      .value("rewritten", FileChange::kRewritten, "It was written to, and its modification time was set back.");
  py::class_<MappedFile, std::shared_ptr<MappedFile>>(module, "MappedFile", "A file's bytes in memory, which can be read after the file was cut.")
      .def(py::init<std::string, bool, bool>(), py::arg("path"), py::arg("writable") = false,
           py::arg("is_shared") = false)
      .def("release", &MappedFile::release, "Gives back the memory of the pages read so far; reading maps them again.")
      .def("read_randomly", &MappedFile::read_randomly, "Says that no pages beside those that are read will be needed.")
      .def("array", &array_of, "All bytes, uint8; read-only unless the file was opened to be written.")
      .def("change", &MappedFile::change, py::arg("max_age_ms") = 0, py::arg("asks_server") = false,
           py::call_guard<py::gil_scoped_release>(),
           "What happened to the file; of one that is_shared, only that it became shorter. Its status is looked at "
           "unless that was done less than max_age_ms ago; a client of NFS relies on an old one unless it asks_server.");
  py::class_<FileSet>(module, "FileSet", "MappedFiles that are read together.")
      .def(py::init<std::vector<std::shared_ptr<MappedFile>>>(), py::arg("files"))
      .def("is_unchanged", &FileSet::is_unchanged, py::arg("max_age_ms"), py::call_guard<py::gil_scoped_release>(),
           "Whether all that was read so far is what the files held when they were opened, as `change`.");
  module.def("permute", &permute, py::arg("numbers"), py::arg("size"), py::arg("keys"),
             "The images of numbers below size under the permutation of [0, size) with the keys of these rounds: a "
             "Feistel network with cycle walking.");
  py::class_<LegacyRandom>(module, "LegacyRandom", "numpy.random.RandomState(seed), as far as it shuffles.")
      .def(py::init<std::int64_t>(), py::arg("seed"))
      .def("fill_shuffled", &fill_shuffled, py::arg("out").noconvert(), py::arg("start"), py::arg("stop"),
           py::arg("progress") = py::none(),
           "Fills out with repetitions of [start, stop) and shuffles it, as numpy's shuffle does.");
}

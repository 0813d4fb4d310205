// libFuzzer target: hostile arrays, as a damaged .idx or index cache gives them, for all that index_builder.cpp
// exports. Each array lies in a heap block of its very size, so that AddressSanitizer sees any access outside.
// A call may throw; it must not read or write elsewhere, overflow, hang, or give a row outside its arrays.

#include <pybind11/embed.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "../../csrc/index_builder.cpp"

namespace {

// The fuzzer's bytes as numbers; zeros once they are used up.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  std::uint8_t byte() { return size_ == 0 ? 0 : (--size_, *data_++); }

  // Mostly small, now and then near an end of a type's range, or any 64 bits.
  std::int64_t number() {
    const std::uint8_t kind = byte();
    if (kind < 200) return kind % 16;
    switch (kind) {
      case 200: return std::numeric_limits<std::int64_t>::max() - byte() % 16;
      case 201: return std::numeric_limits<std::int64_t>::min() + byte() % 16;
      case 202: return (std::int64_t{1} << 31) - 8 + byte() % 16;
      case 203: return (std::int64_t{1} << 32) - 8 + byte() % 16;
      case 204: return -1 - byte() % 16;
    }
    std::uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value = value << 8 | byte();
    return static_cast<std::int64_t>(value);
  }

  std::int64_t count(std::int64_t limit) { return byte() % (limit + 1); }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
};

// An array of `count` elements that start `shift` bytes into a heap block which ends with them.
template <typename T, typename Fill>
py::array array_of(std::int64_t count, std::size_t shift, Fill fill) {
  const std::size_t size = static_cast<std::size_t>(count) * sizeof(T);
  auto* block = static_cast<char*>(std::malloc(shift + size + (shift + size == 0)));
  for (std::int64_t i = 0; i < count; ++i) {
    const T value = static_cast<T>(fill());
    std::memcpy(block + shift + static_cast<std::size_t>(i) * sizeof(T), &value, sizeof value);
  }
  const py::capsule owner(block, [](void* pointer) { std::free(pointer); });
  return py::array(py::dtype::of<T>(), std::vector<py::ssize_t>{count}, std::vector<py::ssize_t>{}, block + shift,
                   owner);
}

py::array integers(Input& input, std::int64_t limit) {
  const std::uint8_t kind = input.byte();
  const auto fill = [&input] { return input.number(); };
  const std::int64_t count = input.count(limit);
  return kind & 1 ? array_of<std::int64_t>(count, kind & 2, fill) : array_of<std::int32_t>(count, kind & 2, fill);
}

void require(bool condition) {
  if (!condition) std::abort();
}

// A number of samples small enough to allocate, or too large for any machine.
std::int64_t num_samples(Input& input) {
  const std::int64_t number = input.number();
  return number < 0 || number > (std::int64_t{1} << 50) ? number : number % 512;
}

void sample_index(Input& input) {
  const py::array lengths = integers(input, 12), documents = integers(input, 24);
  const bool wide = input.byte() & 1;
  const std::int64_t seq_length = input.number(), n = num_samples(input);
  const py::array rows = build_sample_index(lengths, documents, seq_length, n, wide, nullptr);
  const IntegerView length(lengths, "lengths"), document(documents, "documents");
  const IntegerView row(py::array(rows.attr("reshape")(-1)), "rows");
  for (std::int64_t k = 2; k < row.size(); k += 2) {
    require(row[k] >= 0 && row[k] < document.size());
    require(row[k + 1] >= 0 && row[k + 1] < length[document[row[k]]]);
    require(row[k] > row[k - 2] || (row[k] == row[k - 2] && row[k + 1] > row[k - 1]));
  }
  // So few documents are one thread's; several must give the same.
  std::vector<std::int64_t> again(static_cast<std::size_t>(row.size()));
  SampleIndex(length, document, seq_length, n, again.data(), nullptr).fill(2 + input.byte() % 2);
  for (std::int64_t i = 0; i < row.size(); ++i) require(again[static_cast<std::size_t>(i)] == row[i]);
}

// Hostile documents for several threads, which are checked before they are walked.
void sample_index_by_threads(Input& input) {
  const py::array lengths = integers(input, 12), documents = integers(input, 24);
  const IntegerView length(lengths, "lengths"), document(documents, "documents");
  const std::int64_t seq_length = std::max<std::int64_t>(input.number() & 0x7fffffff, 1), n = input.count(64);
  std::vector<std::int32_t> rows(2 * static_cast<std::size_t>(n) + 2);
  Progress progress;
  SampleIndex(length, document, seq_length, n, rows.data(), &progress).fill(2 + input.byte() % 2);
}

template <typename Token>
void gather(Input& input) {
  const py::array tokens = array_of<Token>(input.count(40), 0, [&input] { return input.byte(); });
  const py::array offsets = integers(input, 12), lengths = integers(input, 12), documents = integers(input, 24);
  const py::array samples = integers(input, 24), rows = integers(input, 4);
  py::array_t<std::int64_t> out(std::vector<py::ssize_t>{rows.size(), static_cast<py::ssize_t>(input.count(20))});
  const TokenSource source({{tokens, offsets, lengths}, {tokens, offsets, lengths}});
  if (input.byte() & 1)
    gather_samples(source, documents, samples, rows, out);
  else
    gather_spans(source, rows, out);
}

void index_checks(Input& input) {
  const py::array lengths = integers(input, 12), offsets = integers(input, 12);
  const auto [number, end] = check_sequences(lengths, offsets, input.byte() % 9, 0);
  require(number >= 0 && number <= lengths.size() && end >= 0);
  is_ascending(offsets);
}

void blend(Input& input) {
  std::vector<double> weights(static_cast<std::size_t>(input.count(40)));
  for (double& weight : weights) {
    const std::int64_t bits = input.number();
    if (input.byte() % 16 == 0)
      std::memcpy(&weight, &bits, sizeof weight);  // also infinite, or no number
    else
      weight = static_cast<double>(bits & 15) / 16;
  }
  const std::size_t size = weights.size();
  std::vector<double> owed(input.byte() % 2 ? size : 0);  // empty: a blend that continues no other
  for (double& each : owed) each = static_cast<double>(input.byte()) / 128 - 1;
  const auto [datasets, samples] = build_blend_index(weights, num_samples(input), nullptr, owed);
  owed.resize(size);
  std::vector<double> taken(size);
  for (std::size_t d = 0; d < size; ++d) taken[d] = 0.0 - owed[d];
  for (py::ssize_t i = 0; i < datasets.size(); ++i) {
    const auto dataset = *static_cast<const std::int16_t*>(datasets.data(i));
    require(dataset >= 0 && static_cast<std::size_t>(dataset) < size);
    const double position = static_cast<double>(std::max<py::ssize_t>(i, 1));
    const auto behind = [&](std::size_t d) { return weights[d] * position - taken[d]; };
    const auto chosen = static_cast<std::size_t>(dataset);
    for (std::size_t d = 0; d < size; ++d) require(d < chosen ? behind(d) < behind(chosen) : behind(d) <= behind(chosen));
    require(static_cast<double>(*static_cast<const std::int64_t*>(samples.data(i))) == taken[chosen] + owed[chosen]);
    taken[chosen] += 1.0;
  }
}

void shuffle(Input& input) {
  LegacyRandom random(input.number());
  py::array out = integers(input, 64);  // an array off its alignment is refused
  const std::int64_t start = input.number(), stop = input.number();
  fill_shuffled(random, out, start, stop, nullptr);
  const IntegerView value(out, "out");
  for (std::int64_t i = 0; i < value.size(); ++i) require(value[i] >= start && value[i] < stop);
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  py::initialize_interpreter(false);  // never ended: the fuzzer leaves by _exit
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  try {
    switch (input.byte() % 8) {
      case 0: sample_index(input); break;
      case 1: gather<std::uint16_t>(input); break;
      case 2: gather<std::int64_t>(input); break;
      case 3: gather<std::int8_t>(input); break;
      case 4: blend(input); break;
      case 5: shuffle(input); break;
      case 6: sample_index_by_threads(input); break;
      case 7: index_checks(input); break;
    }
  } catch (const std::exception&) {  // refused by name, or out of memory
  }
  return 0;
}

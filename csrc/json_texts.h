// Extracts the texts under some keys of JSON objects, one per line. It only supports JSON that corpora usually have.
// Python's json module accepts everything that is accepted here, with the same texts. Anything unusual (a name with an
// escape, half a surrogate pair, NaN, deep nesting, a missing or repeated key, an error) is left to that module.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

class JsonTexts {
 public:
  explicit JsonTexts(std::vector<std::string> keys) : keys_(std::move(keys)), texts_(keys_.size()) {}

  // Returns whether the line is an object with a text under every key; texts() then holds the texts in UTF-8.
  bool read(std::string_view line) {
    at_ = line.data();
    end_ = at_ + line.size();
    found_.assign(keys_.size(), false);
    skip_space();
    if (!object(0)) return false;
    skip_space();
    for (const bool found : found_)
      if (!found) return false;
    return at_ == end_;
  }

  const std::vector<std::string>& texts() const { return texts_; }

 private:
  static constexpr int kMaxDepth = 32;
  static constexpr std::ptrdiff_t kMaxNumber = 300;  // Python refuses to read integers of thousands of digits

  bool take(char c) {
    if (at_ == end_ || *at_ != c) return false;
    ++at_;
    return true;
  }

  void skip_space() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\r' || *at_ == '\t')) ++at_;
  }

  bool object(int depth) {
    if (depth == kMaxDepth || !take('{')) return false;
    skip_space();
    if (take('}')) return true;
    do {
      skip_space();
      const char* const begin = at_ + 1;
      if (!string(nullptr)) return false;
      const std::string_view name(begin, static_cast<std::size_t>(at_ - 1 - begin));
      skip_space();
      if (!take(':')) return false;
      skip_space();
      if (!(depth == 0 ? member(name) : value(depth))) return false;
      skip_space();
    } while (take(','));
    return take('}');
  }

  // A member of the outermost object.
  bool member(std::string_view name) {
    if (name.find('\\') != std::string_view::npos) return false;
    for (std::size_t k = 0; k < keys_.size(); ++k)
      if (name == keys_[k]) {
        if (found_[k]) return false;
        found_[k] = true;
        return string(&texts_[k]);
      }
    return value(0);
  }

  bool array(int depth) {
    if (depth == kMaxDepth || !take('[')) return false;
    skip_space();
    if (take(']')) return true;
    do {
      skip_space();
      if (!value(depth)) return false;
      skip_space();
    } while (take(','));
    return take(']');
  }

  bool value(int depth) {
    if (at_ == end_) return false;
    switch (*at_) {
      case '"': return string(nullptr);
      case '{': return object(depth + 1);
      case '[': return array(depth + 1);
      case 't': return word("true");
      case 'f': return word("false");
      case 'n': return word("null");
      default: return number();
    }
  }

  bool word(std::string_view expected) {
    if (static_cast<std::size_t>(end_ - at_) < expected.size()) return false;
    if (std::memcmp(at_, expected.data(), expected.size()) != 0) return false;
    at_ += expected.size();
    return true;
  }

  bool number() {
    const char* const begin = at_;
    take('-');
    if (!take('0') && !digits()) return false;
    if (take('.') && !digits()) return false;
    if (take('e') || take('E')) {
      if (!take('+')) take('-');
      if (!digits()) return false;
    }
    return at_ - begin <= kMaxNumber;
  }

  bool digits() {
    const char* const begin = at_;
    while (at_ != end_ && *at_ >= '0' && *at_ <= '9') ++at_;
    return at_ != begin;
  }

  // Parses a string from quote to quote, and stores it in `text` unless this is null.
  bool string(std::string* text) {
    if (!take('"')) return false;
    if (text) text->clear();
    for (;;) {
      const char* const begin = at_;
      skip_plain();
      if (text) text->append(begin, at_);
      if (at_ == end_) return false;
      const auto c = static_cast<unsigned char>(*at_);
      if (c == '"') {
        ++at_;
        return true;
      }
      if (c == '\\' ? !escape(text) : c < 0x20 || !wide_characters(text)) return false;
    }
  }

  // Advances to the next quote, backslash, control character or byte above ASCII, eight bytes at a time.
  void skip_plain() {
    constexpr std::uint64_t kOnes = 0x0101010101010101u, kHigh = 0x8080808080808080u;
    while (end_ - at_ >= 8) {
      std::uint64_t bytes;
      std::memcpy(&bytes, at_, 8);
      const std::uint64_t quote = bytes ^ (kOnes * '"'), backslash = bytes ^ (kOnes * '\\');
      // Sets the high bit of ASCII bytes that are zero, or below 0x20; may also set it in a byte after such a byte.
      const std::uint64_t special = (quote - kOnes) | (backslash - kOnes) | (bytes - kOnes * 0x20);
      if ((special | bytes) & kHigh) break;
      at_ += 8;
    }
    while (at_ != end_ && *at_ != '"' && *at_ != '\\' && static_cast<unsigned char>(*at_) >= 0x20 &&
           static_cast<unsigned char>(*at_) < 0x80)
      ++at_;
  }

  bool escape(std::string* text) {
    ++at_;
    if (at_ == end_) return false;
    const char c = *at_++;
    if (c == 'u') return unicode_escape(text);
    static constexpr std::string_view kNames = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
    const std::size_t i = kNames.find(c);
    if (i == std::string_view::npos) return false;
    if (text) text->push_back(kMeanings[i]);
    return true;
  }

  bool unicode_escape(std::string* text) {
    std::uint32_t code = 0, low = 0;
    if (!hexadecimal(&code)) return false;
    if (!text) return true;  // json accepts half a pair too, and this text is not used
    if (code >= 0xDC00 && code < 0xE000) return false;
    if (code >= 0xD800 && code < 0xDC00) {
      if (!take('\\') || !take('u') || !hexadecimal(&low) || low < 0xDC00 || low >= 0xE000) return false;
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    append_utf8(code, text);
    return true;
  }

  bool hexadecimal(std::uint32_t* code) {
    if (end_ - at_ < 4) return false;
    for (int i = 0; i < 4; ++i) {
      const char c = *at_++;
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) return false;
      *code = *code << 4 | static_cast<std::uint32_t>(digit);
    }
    return true;
  }

  static void append_utf8(std::uint32_t code, std::string* text) {
    const auto rest = [code](int shift) { return static_cast<char>(0x80 | (code >> shift & 0x3F)); };
    if (code < 0x80) {
      text->push_back(static_cast<char>(code));
    } else if (code < 0x800) {
      text->append({static_cast<char>(0xC0 | code >> 6), rest(0)});
    } else if (code < 0x10000) {
      text->append({static_cast<char>(0xE0 | code >> 12), rest(6), rest(0)});
    } else {
      text->append({static_cast<char>(0xF0 | code >> 18), rest(12), rest(6), rest(0)});
    }
  }

  // Parses the characters above ASCII from here on, if they are valid UTF-8 (Unicode 15, table 3-7).
  bool wide_characters(std::string* text) {
    const char* const begin = at_;
    while (at_ != end_ && static_cast<unsigned char>(*at_) >= 0x80) {
      const auto byte = [this](std::ptrdiff_t i) {
        return i < end_ - at_ ? static_cast<unsigned char>(at_[i]) : 0;
      };
      const auto follows = [&byte](std::ptrdiff_t i) { return (byte(i) & 0xC0) == 0x80; };
      const int first = byte(0), second = byte(1);
      std::ptrdiff_t size = 0;
      if (first >= 0xC2 && first <= 0xDF) {
        size = follows(1) ? 2 : 0;
      } else if (first >= 0xE0 && first <= 0xEF) {
        const bool shortest = first != 0xE0 || second >= 0xA0, surrogate = first == 0xED && second >= 0xA0;
        size = follows(1) && follows(2) && shortest && !surrogate ? 3 : 0;
      } else if (first >= 0xF0 && first <= 0xF4) {
        const bool shortest = first != 0xF0 || second >= 0x90, beyond = first == 0xF4 && second >= 0x90;
        size = follows(1) && follows(2) && follows(3) && shortest && !beyond ? 4 : 0;
      }
      if (size == 0) return false;
      at_ += size;
    }
    if (text) text->append(begin, at_);
    return true;
  }

  std::vector<std::string> keys_, texts_;
  std::vector<bool> found_;
  const char* at_ = nullptr;
  const char* end_ = nullptr;
};

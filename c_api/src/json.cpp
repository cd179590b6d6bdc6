#include "json.h"

#include <cctype>
#include <cmath>
#include <limits>
#include <locale>
#include <sstream>

#include "ops.h"

namespace mlx_h2o {

namespace {

// Deeper than any settings; a text of brackets alone must not use the stack up.
constexpr int kDeepest = 32;
// Letters that stand for bytes after a backslash, and these.
const std::string kLetters = "\"\\bfnrt/", kBytes = "\"\\\b\f\n\r\t/";

struct Parser {
  const std::string& text;
  size_t at = 0;

  void fail() const {
    check(false, "It is no JSON, from byte " + std::to_string(at) + " on.");
  }
  char next() {
    while (at < text.size() && std::string(" \t\r\n").find(text[at]) != std::string::npos) ++at;
    return at < text.size() ? text[at] : '\0';
  }
  bool takes(char wanted) {
    if (next() != wanted) return false;
    ++at;
    return true;
  }
  void must_take(char wanted) {
    if (!takes(wanted)) fail();
  }
  bool takes_word(const std::string& word) {
    if (text.compare(at, word.size(), word)) return false;
    at += word.size();
    return true;
  }

  Json value(int depth) {
    if (depth > kDeepest) fail();
    switch (next()) {
      case '{': return object(depth);
      case '[': return list(depth);
      case '"': return Json(words());
      case 't': return takes_word("true") ? Json(true) : (fail(), Json());
      case 'f': return takes_word("false") ? Json(false) : (fail(), Json());
      case 'n': return takes_word("null") ? Json() : (fail(), Json());
      default: return number();
    }
  }

  Json object(int depth) {
    Json::Object members;
    must_take('{');
    if (takes('}')) return members;
    do {
      if (next() != '"') fail();
      std::string name = words();
      must_take(':');
      members.insert_or_assign(std::move(name), value(depth + 1));
    } while (takes(','));
    must_take('}');
    return members;
  }

  Json list(int depth) {
    Json::List items;
    must_take('[');
    if (takes(']')) return items;
    do items.push_back(value(depth + 1));
    while (takes(','));
    must_take(']');
    return items;
  }

  Json number() {
    const size_t end = text.find_first_not_of("+-.0123456789eE", at);
    const std::string digits = text.substr(at, end == std::string::npos ? end : end - at);
    const bool whole = digits.find_first_of(".eE") == std::string::npos;
    std::istringstream stream(digits);
    stream.imbue(std::locale::classic());
    Json result;
    if (whole) {
      int64_t number = 0;
      stream >> number;
      result.value = number;
    } else {
      double number = 0;
      stream >> number;
      result.value = number;
    }
    if (digits.empty() || digits[0] == '+' || stream.fail() || stream.peek() != EOF) fail();
    at += digits.size();
    return result;
  }

  std::string words() {
    std::string result;
    for (++at; at < text.size() && text[at] != '"'; ++at) {
      if (static_cast<unsigned char>(text[at]) < ' ') fail();
      result += text[at] == '\\' ? escaped() : std::string(1, text[at]);
    }
    if (at >= text.size()) fail();
    ++at;
    return result;
  }

  std::string escaped() {
    if (++at >= text.size()) fail();
    const size_t which = kLetters.find(text[at]);
    if (which != std::string::npos) return {kBytes[which]};
    uint32_t letter = unit();
    if (letter >= 0xd800 && letter < 0xdc00) {  // the first of two that make one letter
      if (text.compare(++at, 1, "\\") || ++at >= text.size()) fail();
      const uint32_t second = unit();
      if (second < 0xdc00 || second > 0xdfff) fail();
      letter = 0x10000 + ((letter - 0xd800) << 10) + (second - 0xdc00);
    }
    return utf8(letter);
  }

  // The number in "uXXXX"; `at` is then at its last digit.
  uint32_t unit() {
    if (text[at] != 'u' || at + 4 >= text.size()) fail();
    uint32_t number = 0;
    for (int i = 0; i < 4; ++i) {
      const int digit = std::tolower(static_cast<unsigned char>(text[++at]));
      if (!std::isxdigit(digit)) fail();
      number = number << 4 | uint32_t(digit > '9' ? digit - 'a' + 10 : digit - '0');
    }
    return number;
  }

  static std::string utf8(uint32_t letter) {
    if (letter < 0x80) return {char(letter)};
    std::string bytes;
    int shift = letter < 0x800 ? 6 : letter < 0x10000 ? 12 : 18;
    bytes += char((letter < 0x800 ? 0xc0 : letter < 0x10000 ? 0xe0 : 0xf0) | letter >> shift);
    while (shift) bytes += char(0x80 | (letter >> (shift -= 6) & 0x3f));
    return bytes;
  }
};

std::string quoted(const std::string& words) {
  std::string all = "\"";
  for (char letter : words) {
    const size_t which = kBytes.find(letter);
    const unsigned code = static_cast<unsigned char>(letter);
    if (which < kBytes.find('/'))
      all += {'\\', kLetters[which]};
    else if (code < ' ')
      all += std::string("\\u00") + "01"[code >> 4] + "0123456789abcdef"[code & 15];
    else
      all += letter;
  }
  return all + '"';
}

std::string text_of(double number) {
  std::ostringstream stream;
  stream.imbue(std::locale::classic());
  stream.precision(std::numeric_limits<double>::max_digits10);
  stream << number;
  const std::string digits = stream.str();
  // A share of 0 must not become a count of 0.
  return digits.find_first_of(".e") == std::string::npos ? digits + ".0" : digits;
}

}  // namespace

Json Json::parsed(const std::string& text) {
  Parser parser{text};
  Json result = parser.value(0);
  if (parser.next()) parser.fail();
  return result;
}

std::string Json::text() const {
  std::string all;
  const auto joined = [&](const std::string& item) { all += (all.empty() ? "" : ", ") + item; };
  if (const bool* truth = std::get_if<bool>(&value)) return *truth ? "true" : "false";
  if (const int64_t* number = std::get_if<int64_t>(&value)) return std::to_string(*number);
  if (const double* number = std::get_if<double>(&value)) return text_of(*number);
  if (const std::string* words = std::get_if<std::string>(&value)) return quoted(*words);
  if (const List* items = std::get_if<List>(&value)) {
    for (const Json& item : *items) joined(item.text());
    return "[" + all + "]";
  }
  if (const Object* members = std::get_if<Object>(&value)) {
    for (const auto& [name, member] : *members) joined(quoted(name) + ": " + member.text());
    return "{" + all + "}";
  }
  return "null";
}

bool Json::truth(const std::string& name) const {
  const bool* held = std::get_if<bool>(&value);
  check(held, name + " must be true or false.");
  return *held;
}

int Json::whole(const std::string& name, int64_t least, int64_t most) const {
  const int64_t* held = std::get_if<int64_t>(&value);
  check(
      held && least <= *held && *held <= most,
      name + " must be a whole number from " + std::to_string(least) + " to " +
          std::to_string(most) + (held ? "; got " + std::to_string(*held) + "." : "."));
  return static_cast<int>(*held);
}

double Json::number(const std::string& name) const {
  const int64_t* whole = std::get_if<int64_t>(&value);
  const double* held = std::get_if<double>(&value);
  check(whole || (held && std::isfinite(*held)), name + " must be a number.");
  return whole ? double(*whole) : *held;
}

const std::string& Json::words(const std::string& name) const {
  const std::string* held = std::get_if<std::string>(&value);
  check(held, name + " must be a text.");
  return *held;
}

const Json::List& Json::list(const std::string& name) const {
  const List* held = std::get_if<List>(&value);
  check(held, name + " must be a list.");
  return *held;
}

const Json::Object& Json::object(const std::string& name) const {
  const Object* held = std::get_if<Object>(&value);
  check(held, name + " must be an object.");
  return *held;
}

std::vector<int> Json::wholes(const std::string& name, int64_t least, int64_t most) const {
  std::vector<int> numbers;
  for (const Json& item : list(name)) numbers.push_back(item.whole(name, least, most));
  return numbers;
}

const Json& member(const Json::Object& object, const std::string& name, bool optional) {
  static const Json nothing;
  const auto it = object.find(name);
  check(optional || it != object.end(), "There is no " + name + ".");
  return it == object.end() ? nothing : it->second;
}

}  // namespace mlx_h2o

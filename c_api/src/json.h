// JSON: what a saved cache's settings are written in.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

namespace mlx_h2o {

// A value. Whole numbers are told from others, as in Python.
struct Json {
  using List = std::vector<Json>;
  using Object = std::map<std::string, Json>;

  std::variant<std::nullptr_t, bool, int64_t, double, std::string, List, Object> value = nullptr;

  Json() = default;
  Json(bool truth) : value(truth) {}
  Json(int number) : value(int64_t(number)) {}
  Json(double number) : value(number) {}
  Json(const char* words) : value(std::string(words)) {}
  Json(std::string words) : value(std::move(words)) {}
  Json(List list) : value(std::move(list)) {}
  Json(Object object) : value(std::move(object)) {}
  explicit Json(const std::vector<int>& numbers) : value(List(numbers.begin(), numbers.end())) {}

  // Raises for what is no JSON.
  static Json parsed(const std::string& text);
  std::string text() const;

  bool is_null() const {
    return value.index() == 0;
  }
  // What it must be; raise, with the name that it has, for others.
  bool truth(const std::string& name) const;
  int whole(const std::string& name, int64_t least, int64_t most) const;
  double number(const std::string& name) const;
  const std::string& words(const std::string& name) const;
  const List& list(const std::string& name) const;
  const Object& object(const std::string& name) const;
  std::vector<int> wholes(const std::string& name, int64_t least, int64_t most) const;
};

// A member. Raises where there is none; `optional`: null then.
const Json& member(const Json::Object& object, const std::string& name, bool optional = false);

}  // namespace mlx_h2o

// Structs of mlx_h2o.h that begin with their size: programs of earlier and of later versions.
#pragma once

#include <algorithm>
#include <cstring>

#include "../ops.h"

namespace mlx_h2o {

// Raises for a struct of fewer bytes than that of the first version.
inline void check_size(size_t size, size_t least, const std::string& name) {
  check(
      size >= least,
      name + ".size is that of the struct; got " + std::to_string(size) + " bytes, of at least " +
          std::to_string(least) + ".");
}

// The fields that the program knows, and `defaults` of the others. Raises for fields that this
// version does not know, unless they are 0.
template <class S>
S complete(const S& given, S defaults, size_t least, const std::string& name) {
  check_size(given.size, least, name);
  const size_t known = std::min(given.size, sizeof(S));
  std::memcpy(static_cast<void*>(&defaults), &given, known);
  const char* const bytes = reinterpret_cast<const char*>(&given);
  check(
      std::all_of(bytes + known, bytes + given.size, [](char byte) { return !byte; }),
      "The program sets fields of " + name + " that this version does not have.");
  return defaults;
}

// Fills as much of a program's struct of `size` bytes as there is, and the rest with 0.
template <class S>
void fill(S* res, size_t size, S values, size_t least, const std::string& name) {
  check_size(size, least, name);
  values.size = size;
  std::memset(static_cast<void*>(res), 0, size);
  std::memcpy(static_cast<void*>(res), &values, std::min(size, sizeof(S)));
}

}  // namespace mlx_h2o

// Safetensors files: a header that is checked against the file's bytes before any array is made of
// it, and files that are written whole or not at all.
//
// MLX's own reader believes the header, and its errors end a program that has set no handler.
// Layout: https://github.com/huggingface/safetensors#format.
#pragma once

#include <map>
#include <string>

#include "packed.h"

namespace mlx_h2o {

using Texts = std::map<std::string, std::string>;

struct Safetensors {
  Fields arrays;
  Texts metadata;  // a SHA-256 of all the rest, as Python computes it, is not among them
};

// Raises for what is no such file, was changed, or has arrays of dtypes that no cache has.
Safetensors read_safetensors(const std::string& path);
// Writes beside the file first and replaces it when all is on disk: if anything fails, the file
// stays what it was. The digest is added to it.
void write_safetensors(const std::string& path, const Fields& arrays, Texts metadata);

}  // namespace mlx_h2o

// A verdict in a file of its own, for the next process.
#pragma once

#include "verdicts.h"

namespace mlx_h2o {

struct Verdict {
  bool held;           // whether the variant is used
  std::string why;     // why not, or where the largest error was
  double error = 0;    // the largest, in units of what is tolerated
  double seconds = 0;  // that the check took, compiling included

  // With the variant's name; an error that is not finite is null.
  Json::Object json(const std::string& variant) const;
};

class VerdictFile {
 public:
  // Of a variant on the GPU of the stream of the call. No folder: nothing is kept.
  VerdictFile(
      const std::string& folder, const std::string& variant,
      const std::vector<const char*>& kernels);

  // What was kept, or that a process ended while it checked; nothing: it is to be checked.
  std::optional<Verdict> read() const;
  // In one piece or not at all. Where nothing can be kept, the next process checks again.
  void write(const Json::Object& content) const;
  // That this process is checking now.
  void mark() const;

 private:
  std::string path_;  // "": none
};

// The user's cache folder by the XDG base directories, or "" if none is set.
std::string user_cache_folder();

}  // namespace mlx_h2o

// Verdicts on kernel variants: asked once, kept for the next process, told where they are bad
// (python/mlx_h2o/attention/backends/verification/verdicts.py).
//
// A verdict belongs to a device, a system, a version of MLX and the kernels' text; the variant is
// checked again when one of them changes. The file says while a check is running. If the kernel
// ends the process, that mark remains, and the next process does not use the kernel.
#pragma once

#include <functional>

#include "../json.h"
#include "../ops.h"

namespace mlx_h2o {

// The worst of a check: in units of what is tolerated, above 1 it is too much; which output it is
// of, and what is wrong there.
struct Deviation {
  double size = 0;
  std::string where;
};

// Whether a variant may be used on the GPU of the stream of the call; checked at its first use.
// Raises where MLX_H2O_VERIFY says what there is not.
//
// `variant` names all that decides which texts it compiles, and `kernels` the files in metal/ that
// these are of. `check` runs it on a small case, beside the definition, and may raise.
bool usable(
    const std::string& variant, const std::vector<const char*>& kernels,
    const std::function<Deviation()>& check);

// Every verdict of this process, in order, as mlx_h2o_verdicts gives them.
Json::List verdicts();

// Where verdicts are kept; "": nowhere; none: in the user's cache folder.
void set_cache_folder(std::optional<std::string> folder);

// Is told of the first variant of this process that is not used.
void set_notice(void (*notice)(void* context, const char* message), void* context);

}  // namespace mlx_h2o

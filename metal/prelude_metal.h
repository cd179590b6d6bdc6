// Metal's prelude: the kernels' dialect is Metal Shading Language, so little is left to say.
// The other preludes define MLX_H2O_PRELUDE first, and then this one says nothing.
#ifndef MLX_H2O_PRELUDE
#define MLX_H2O_PRELUDE

#include <metal_simdgroup>
#include <metal_stdlib>

using namespace metal;

#define THREADGROUP_ARRAY(type, name, size) threadgroup type name[size]
#define UNROLL _Pragma("clang loop unroll(full)")

#endif

// Between the handles and structs of mlx_h2o.h and the classes that do the work.
#pragma once

#include "operands.h"
#include "step.h"

namespace mlx_h2o {

// What a cache's handle points to.
struct CacheHandle {
  std::unique_ptr<Core> core;
  // As mlx_h2o_cache_get_options hands them out.
  mutable std::vector<int> filling;
  mutable mlx_h2o_rope rope;
};
// Null for an empty one.
inline CacheHandle* handle_of(mlx_h2o_cache handle) {
  return static_cast<CacheHandle*>(handle.ctx);
}
// Has the handle stand for this cache, and no longer for the one that it stood for.
void give(mlx_h2o_cache* res, std::unique_ptr<Core> cache);
void give(mlx_h2o_policy* res, Policy policy);
void give(mlx_string* res, const std::string& words);
void give(mlx_map_string_to_array* res, const Fields& arrays);
void give(mlx_vector_array* res, const std::vector<mx::array>& arrays);
Fields fields_of(const mlx_map_string_to_array arrays);
// What a handle of a conversation's file points to. Raises for an empty one.
const std::shared_ptr<ConversationRows>& of(mlx_h2o_spill handle);

// A policy of a program's own; null for an empty handle. Raises for one of the library's.
const Policy* own_of(mlx_h2o_policy handle);

// What a handle stands for. Raise for an empty one.
Policy& of(mlx_h2o_policy handle);
Core& of(mlx_h2o_cache handle);
// One that the call changes, be it only where its arrays are. Raises for one that is broken.
Core& changed(mlx_h2o_cache handle);

// Its axes are B, Hk, D and Dv.
Remainder of(mlx_h2o_remainder handles, Operands& operands);
// One of each KV head; null: the default. Raises for what is none.
Saturations saturations_of(const float* given, int n_kv_heads);
void give(mlx_h2o_remainder* res, const Remainder& value);

// How queries see keys, as mlx-c says it. Raises for what is no mask.
Masking masking(const char* mode, mlx_array mask);

// Its axes are B, Hk, N, D and Dv.
Slots of(const mlx_h2o_slots* given, const Policy& policy, Operands& operands);
// What the slots of a prompt are worth [B, Hk, N].
mx::array prompt_priority(
    const Policy& policy, const Slots& seen, mlx_array window_mass, Operands& operands);

}  // namespace mlx_h2o

// A cache as arrays by name and settings as JSON, as Python saves it
// (python/mlx_h2o/layer/saved_state.py, layer/layer_factory.py).
//
// Both may come from anywhere: whatever they say, what is made of them has shapes that fit
// together, indices that lie in their buffers, and needs no more memory than a cache of its size
// does. What does not raises.
#pragma once

#include <memory>

#include "json.h"
#include "layer.h"

namespace mlx_h2o {

// What a cache was made with, and what a layer holds; null: it has seen no rows.
Json saved_settings(const CacheSettings& settings, const BoundedLayer* layer);

// All arrays of a layer by name, with the frame's.
Fields saved_arrays(const CacheSettings& settings, BoundedLayer* layer);

// The settings that were saved; with `own`, unless null, as the policy, whose name it must have.
CacheSettings settings_of(const Json::Object& saved, const Fields& arrays, const Policy* own);

// The layer that was saved, of a cache with these settings, which must outlive it; none: it had
// seen no rows.
std::optional<BoundedLayer> layer_of(
    const Json::Object& saved, const Fields& arrays, const CacheSettings& settings);

}  // namespace mlx_h2o

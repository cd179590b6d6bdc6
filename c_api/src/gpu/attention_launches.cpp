#include "attention_launches.h"

#include <algorithm>

#include "row_buffers.h"
#include "tiling.h"

namespace mlx_h2o {

namespace {

constexpr int kMergeSimdgroups = 8;

// out [B, Hk, G * L, Dv] and lse [B, Hk, G * L] of the results of blocks.
Buffers merged(
    const mx::array& params, const mx::array& partials, const mx::array& lses, int heads) {
  const int B = partials.shape(0), rows = partials.shape(2) * partials.shape(3);
  const int Dv = partials.shape(4);
  return launch(
      "attention_merge", {{"params", params}, {"partials", partials}, {"partial_lses", lses}},
      {{"out", {{B, heads, rows, Dv}, partials.dtype()}}, {"lse", {{B, heads, rows}, mx::float32}}},
      {{"DV", Dv}, {"SIMDS", kMergeSimdgroups}}, {rows, heads, B}, kMergeSimdgroups * kSimdgroup);
}

}  // namespace

const std::vector<std::string> kRemainderBuffers{"counts", "mean_keys", "var_keys", "mean_values"};

void add_remainder(Buffers& buffers, const Remainder& remainder) {
  const Remainder& r = remainder;
  size_t i = 0;
  for (const mx::array* statistics : {&r.count, &r.mean_key, &r.var_key, &r.mean_value})
    buffers.emplace(kRemainderBuffers[i++], mx::contiguous(*statistics));
}

bool vector_kernel_takes(const mx::array& q, const Stored& k, const Stored& v) {
  return q.shape(2) <= kMostQueries && is_kernel_width(k.width()) && is_kernel_width(v.width()) &&
      q.dtype() == row_dtype(k) && q.dtype() == row_dtype(v);
}

KernelMask kernel_mask(const Masking& mask, int batch, int query_heads, int queries, int slots) {
  if (!mask.array) return {mask.causal && queries > 1 ? 1 : 0};
  const mx::array& m = *mask.array;
  const int last = m.ndim() ? m.shape(-1) : 1, columns = last > 1 ? last : slots;
  const mx::Shape shape = m.shape();
  mx::Shape whole(4 - m.ndim(), 1);
  whole.insert(whole.end(), shape.begin(), shape.end());
  return {
      2, columns, mx::broadcast_to(mx::reshape(m, whole), {batch, query_heads, queries, columns})};
}

namespace {

// Buffers by name, but for the table of the work.
Buffers inputs_of(
    const mx::array& q, const Stored& k, const Stored& v, const VectorCall& call,
    const KernelMask& mask, const mx::array& params) {
  Buffers inputs{{"params", params}, {"factors", mx::array({call.scale})}, {"queries", q}};
  add_buffers(inputs, "keys", k);
  add_buffers(inputs, "values", v);
  if (mask.array) inputs.emplace("mask", *mask.array);
  if (call.sinks) inputs.emplace("sinks", mx::contiguous(*call.sinks));
  if (call.remainder) {
    add_remainder(inputs, *call.remainder);
    const int heads = static_cast<int>(call.saturations.size());
    inputs.emplace("saturation", mx::array(call.saturations.begin(), {heads}, mx::float32));
  }
  if (call.frame_scale) inputs.emplace("frame_scale", *call.frame_scale);
  if (call.means) inputs.emplace("means", mx::contiguous(*call.means));
  if (call.after) inputs.emplace("after", *call.after);
  return inputs;
}

// What the kernels wrote, per slot where heads are alike.
VectorResult attended_of(
    const Buffers& written, const VectorCall& call, const mx::Shape& q, int Hk) {
  const int B = q[0], Hq = q[1], L = q[2], Dv = written.at("out").shape(-1);
  const auto if_written = [&](const char* name) {
    const auto at = written.find(name);
    return at == written.end() ? std::nullopt : std::optional(at->second);
  };
  VectorResult attended{
      mx::reshape(written.at("out"), {B, Hq, L, Dv}), if_written("lse"), if_written("logits"),
      if_written("distances")};
  if (attended.lse) attended.lse = mx::reshape(*attended.lse, {B, Hq, L});
  if (call.ranges) return attended;
  if (attended.logits) attended.logits = mx::reshape(*attended.logits, {B, Hq, L, -1});
  if (attended.distances) attended.distances = mx::reshape(*attended.distances, {B, Hk, -1});
  return attended;
}

}  // namespace

VectorResult vector_attend(
    const mx::array& q, const Stored& flat_k, const Stored& flat_v, const VectorCall& call) {
  const Stored k = call.ranges ? as_one_head(flat_k) : flat_k;
  const Stored v = call.ranges ? as_one_head(flat_v) : flat_v;
  const int B = q.shape(0), Hq = q.shape(1), L = q.shape(2), D = q.shape(3), Dv = v.width();
  const int N = k.arrays[0].shape(2), itemsize = static_cast<int>(mx::size_of(row_dtype(k)));
  std::vector<int> lengths(call.ranges ? call.ranges->size() : k.arrays[0].shape(1), N);
  for (size_t head = 0; call.ranges && head < lengths.size(); ++head)
    lengths[head] = (*call.ranges)[head].second;
  const int Hk = static_cast<int>(lengths.size()), G = Hq / Hk;
  const bool packed = k.bits || v.bits;
  const auto stored = packed ? std::optional(row_bytes(k) + row_bytes(v)) : std::nullopt;
  const auto block = slots_per_block(lengths, G, L, D, Dv, itemsize, call.architecture, stored);
  const Work work(lengths, call.ranges, block);
  const int longest = *std::max_element(lengths.begin(), lengths.end());
  const KernelMask mask = kernel_mask(call.mask, B, Hq, L, longest);

  const Buffers inputs = inputs_of(q, k, v, call, mask, work.params(L, mask.columns));
  const VectorExport wanted = block ? std::max(call.wanted, VectorExport::lse) : call.wanted;
  Outputs outputs{{"out", {{B, work.items, G, L, Dv}, q.dtype()}}};
  if (wanted >= VectorExport::lse)
    outputs.emplace("lse", std::pair(mx::Shape{B, work.items, G, L}, mx::float32));
  if (wanted == VectorExport::logits)
    outputs.emplace("logits", std::pair(mx::Shape{B, G * L * work.slots}, mx::float32));
  if (call.means) outputs.emplace("distances", std::pair(mx::Shape{B, work.slots}, mx::float32));
  const Tiling tiles = tiling(D, Dv, G, L, itemsize, packed);
  Buffers written = launch(
      "attention_vector", inputs, outputs,
      joined_lists<Template::value_type>(
          {{{"T", row_dtype(k)}, {"D", D}, {"DV", Dv}},
           packing_of("keys", k),
           packing_of("values", v),
           {{"G", G},
            {"QUERIES", tiles.queries},
            {"ROWS", tiles.rows},
            {"ROW_GROUPS", tiles.row_groups},
            {"SIMDS", tiles.simdgroups},
            {"KEYS", tiles.keys},
            {"MASK", mask.kind},
            {"SINKS", call.sinks.has_value()},
            {"REMAINDER", call.remainder.has_value()},
            {"DISTANCES", call.means.has_value()},
            {"FRAME", call.frame_scale.has_value()},
            {"EXPORT", static_cast<int>(wanted)}}}),
      {1, work.items, B * tiles.row_blocks}, tiles.simdgroups * kSimdgroup);
  if (block)
    for (const auto& [name, array] :
         merged(inputs.at("params"), written.at("out"), written.at("lse"), Hk))
      written.insert_or_assign(name, array);

  return attended_of(written, call, q.shape(), Hk);
}

}  // namespace mlx_h2o

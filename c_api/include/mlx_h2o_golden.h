// The steps of mlx-h2o one by one, as golden vectors replay them (docs/reference/golden.md).
//
// What the library does with these a cache does in order (mlx_h2o.h, whose conventions hold here
// too). They are exported for tests: this header is not installed, and they may change with any
// version.
#ifndef MLX_H2O_GOLDEN_H
#define MLX_H2O_GOLDEN_H

#include "mlx_h2o.h"

#ifdef __cplusplus
extern "C" {
#endif

// -- the mass of attention ------------------------------------------------------------------------

// The attention that each key received: sum over queries, mean over the query heads of a KV head,
// of exp(score - lse). scores [B, Hq, L, N], lse [B, Hq, L] -> [B, Hk, N].
MLX_H2O_API int mlx_h2o_attention_mass(
    mlx_array* res, const mlx_array scores, const mlx_array lse, int n_kv_heads,
    const mlx_stream s);

// -- the remainder --------------------------------------------------------------------------------

// Statistics of no rows.
MLX_H2O_API int mlx_h2o_remainder_empty(
    mlx_h2o_remainder* res, int batch, int n_kv_heads, int key_width, int value_width,
    const mlx_stream s);

// After rows keys [B, Hk, M, D] and values [B, Hk, M, Dv], floating, were added, in any order or
// grouping. weights, if not empty, says how often each row counts and broadcasts to [B, Hk, M].
MLX_H2O_API int mlx_h2o_remainder_fold(
    mlx_h2o_remainder* res, const mlx_h2o_remainder remainder, const mlx_array keys,
    const mlx_array values, const mlx_array weights, const mlx_stream s);

// The logit [B, Hq, L] with which the evicted answer q [B, Hq, L, D]; minus infinity while there
// are none. saturation is that of mlx_h2o_cache_options, n_kv_heads numbers or NULL.
MLX_H2O_API int mlx_h2o_remainder_column(
    mlx_array* res, const mlx_h2o_remainder remainder, const mlx_array q, float scale,
    const float* saturation, const mlx_stream s);

// Attention and one more column together. out [B, Hq, L, Dv] floating, lse and logits [B, Hq, L],
// values [B, Hk, Dv] (a remainder's mean_value) -> out and lse of the joint softmax.
MLX_H2O_API int mlx_h2o_remainder_join(
    mlx_array* res_out, mlx_array* res_lse, const mlx_array out, const mlx_array lse,
    const mlx_array logits, const mlx_array values, const mlx_stream s);

// The remainder as ordinary rows, for attention that is not ours: keys [B, Hk, rows, D] and values
// [B, Hk, rows, Dv]; add log(count / rows) to their logits. rows is 1 or even, and at most 1024.
MLX_H2O_API int mlx_h2o_remainder_rows(
    mlx_array* keys, mlx_array* values, const mlx_h2o_remainder remainder, int rows,
    const mlx_stream s);

// -- policies -------------------------------------------------------------------------------------

// What each slot is worth keeping after a decode step, [B, Hk, N]; the lowest goes first.
MLX_H2O_API int mlx_h2o_priority(
    mlx_array* res, const mlx_h2o_policy policy, const mlx_h2o_slots* slots, const mlx_stream s);

// The same for a prompt. window_mass [B, Hk, N] is the mass that its last queries gave; empty where
// the policy's prompt is "full".
MLX_H2O_API int mlx_h2o_prompt_priority(
    mlx_array* res, const mlx_h2o_policy policy, const mlx_h2o_slots* slots,
    const mlx_array window_mass, const mlx_stream s);

// The `count` slots to free, [B, Hk, count] int32, worst first, ties to the oldest position.
// priority, positions (int32) and evictable (bool) are [B, Hk, N], with at least `count` evictable
// in each head. per_layer: the heads' mean priority decides for all.
MLX_H2O_API int mlx_h2o_select_victims(
    mlx_array* res, const mlx_array priority, const mlx_array positions, const mlx_array evictable,
    int count, bool per_layer, const mlx_stream s);

// The `count` slots to keep, [B, Hk, count] int32, in order of position; protected ones are always
// among them.
MLX_H2O_API int mlx_h2o_select_kept(
    mlx_array* res, const mlx_array priority, const mlx_array positions, const mlx_array evictable,
    int count, bool per_layer, const mlx_stream s);

// -- a prompt that is read twice ------------------------------------------------------------------

// The greatest weight that each row of a layer received in the second reading so far, [B, Hk, N],
// in the order of its slots; then 0 for heads with fewer rows.
MLX_H2O_API int mlx_h2o_second_reading_worths(
    mlx_array* res, const mlx_h2o_two_readings readings, size_t layer, const mlx_stream s);

// How many rows each of H heads keeps, res [H]: its own [H], from 0 on, and as many as it has among
// the best of the other rows, `whole` in all. worths [H, T], each head's best first.
MLX_H2O_API int mlx_h2o_shared_out(
    int* res, const mlx_array worths, int whole, const int* own, const mlx_stream s);

// -- slots ----------------------------------------------------------------------------------------

// Overwrites rows of a buffer [B, S, ...] at index [B or 1, M] int32, from 0 to S - 1, with rows
// [B, M, ...] of the buffer's dtype (or both floating). In place if no other handle holds the
// buffer: free yours, or let `res` be it.
MLX_H2O_API int mlx_h2o_write_rows(
    mlx_array* res, const mlx_array buffer, const mlx_array index, const mlx_array rows,
    const mlx_stream s);

// Packs rows [B, M, width], floating, and writes them into packed buffers at index [B or 1, M]
// int32, from 0 to S - 1: w [B, S, width * bits / 32] uint32, scales and biases [B, S, width /
// group_size].
MLX_H2O_API int mlx_h2o_quantize_append(
    mlx_array* res_w, mlx_array* res_scales, mlx_array* res_biases, const mlx_array w,
    const mlx_array scales, const mlx_array biases, const mlx_array index, const mlx_array rows,
    int bits, int group_size, const mlx_stream s);

// -- files of rows --------------------------------------------------------------------------------

// Rows of one KV head out of a conversation's file, once all whole blocks of 8 positions that came
// are in it: [M, width] by field, at positions [M] int32 within these.
MLX_H2O_API int mlx_h2o_spill_rows(
    mlx_map_string_to_array* res, mlx_h2o_spill spill, size_t layer, int head,
    const mlx_array positions, const mlx_stream s);

#ifdef __cplusplus
}
#endif

#endif

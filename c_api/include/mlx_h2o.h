// mlx-h2o for C: bounded KV memory that keeps what matters, in the conventions of mlx-c.
//
// Arrays are mlx_array handles of one reference; the caller frees those that it gets, and keeps
// those that it gives. Results come first, as pointers to handles: an empty handle
// (mlx_array_new()) or one that may be replaced, whose old array is released. The stream comes
// last. A function returns 0, or 1 after an error, which leaves results, policies and caches as
// they were (unless memory ran out); what went wrong is in mlx_h2o_last_error(), and of which kind
// it was in mlx_h2o_last_error_code(). Errors are: a null pointer or an empty handle where
// something is wanted, an array of another shape or dtype than is said here, an axis of length 0, a
// number out of its range or not finite, a cache that is changed while a function is traced
// (mlx_compile ...; over mlx-c alone it is not noticed). Nothing here exits or prints, and mlx-c's
// error handler is called only where MLX itself fails (memory that ran out) and by
// mlx_h2o_report_error. As in mlx-c, a handle that was freed is not noticed.
//
// Arrays are lazy, as everywhere in MLX: evaluate the outputs of each step (mlx_array_eval), and
// all that the step changed is evaluated with them. Their numbers are not looked at (a NaN gives
// NaNs), but for indices, which are evaluated when they are given.
//
// On CPU streams the CPU kernels compute (a library over mlx-c alone has none), on those of Apple
// GPUs the kernels of metal/, elsewhere and without kernels (mlx_h2o_use_kernels, or a cache's
// `kernels`) plain MLX operations. A cache and a policy may be used by one thread at a time.
//
// Structs whose first field is their size may have more fields in later versions: a program that
// was compiled with fewer goes on, with the defaults of the others.
//
// Shapes: B batch, Hq query heads, Hk KV heads (Hq is a multiple), L queries, N keys, D and Dv the
// widths of keys and values, S slots of all heads. "Floating" is float32, float16 or bfloat16; what
// is not said to be otherwise is float32. An array that may be left out is an empty handle then.
//
// The steps that a cache is made of, one by one, are in mlx_h2o_golden.h, which is not installed.
#ifndef MLX_H2O_H
#define MLX_H2O_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mlx/c/mlx.h"

#if defined(__GNUC__)
#define MLX_H2O_API __attribute__((visibility("default")))
#else
#define MLX_H2O_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// -- the library ----------------------------------------------------------------------------------

// The version, "major.minor.patch"; not to be freed.
MLX_H2O_API const char* mlx_h2o_version(void);

// What went wrong in the last call of this thread that returned non-zero; "" before any. Valid
// until the thread's next call that fails; not to be freed.
MLX_H2O_API const char* mlx_h2o_last_error(void);

// What kind of thing went wrong. Later versions may have more kinds.
typedef enum mlx_h2o_error_ {
  MLX_H2O_ERROR_NONE = 0,
  MLX_H2O_ERROR_ARGUMENT = 1,  // a wrong argument: the caller's mistake
  MLX_H2O_ERROR_SETTINGS = 2,  // settings, budgets or pins that make no policy or no cache
  MLX_H2O_ERROR_STATE = 3,     // not of this cache, or not now: no token yet, too many to take back
  MLX_H2O_ERROR_SAVED = 4,     // arrays and settings that are no saved cache
  MLX_H2O_ERROR_PROGRAM = 5,   // a function of the program's own (evaluator, policy) failed
  MLX_H2O_ERROR_INTERNAL = 6,  // MLX failed, or memory ran out
  MLX_H2O_ERROR_FILE = 7       // a file that cannot be read or written
} mlx_h2o_error;

// Of the same call as mlx_h2o_last_error.
MLX_H2O_API mlx_h2o_error mlx_h2o_last_error_code(void);

// Gives a message to mlx-c's error handler, as an operation of MLX does that fails: for a caller
// that can give no error back itself. mlx-c's own handler ends the process. An error is a null
// pointer.
MLX_H2O_API int mlx_h2o_report_error(const char* message);

// Whether kernels compute where there are some (true at first). With false plain MLX operations do,
// everywhere: slower, and good for comparing. A cache has a switch of its own beside this one.
MLX_H2O_API int mlx_h2o_use_kernels(bool use);

// Kernels prove themselves: the first time that a variant (kernels, dtypes, widths, bits, the form
// of the policy) is used on a GPU, it runs on a small case beside the definition. One that fails,
// gives a NaN or differs by more than is tolerated is not used: MLX's own operations do its work.
// MLX_H2O_VERIFY in the environment may be "once" (in every process), as usual, or "never".
// Anything else is an error (MLX_H2O_ERROR_SETTINGS).
//
// Over mlx-c alone a kernel that does not compile is MLX's error, and mlx-c's handler of errors,
// unless the program has set another, ends the process; mlx_h2o_use_kernels(false) does without it.

// Has the first variant of this process that is not used told to a function, in the thread that
// wants to use it, with what is wrong with it. It must not call the library. NULL: none, as at
// first.
typedef void (*mlx_h2o_notice)(void* context, const char* message);
MLX_H2O_API int mlx_h2o_set_notice(mlx_h2o_notice notice, void* context);

// Every verdict of this process, in order, as a JSON list of objects: "variant" in words, "usable"
// (whether it is used), "why" (why not, or where it differs most), "error" in units of what is
// tolerated (null: beyond all) and "seconds" that the check took. res is replaced.
MLX_H2O_API int mlx_h2o_verdicts(mlx_string* res);

// Evaluates arrays, which stay the library's: 0, or another number if it could not.
typedef int (*mlx_h2o_evaluator)(void* context, const mlx_vector_array arrays);

// Has all that the library itself evaluates go through this function, from the threads that call
// it: where MLX is shared behind a lock that an evaluation must take. `context` is handed to it.
// NULL: mlx_eval, as at first.
//
// Evaluated are the numbers that are looked at (a frame's, indices, positions where tokens are
// pinned) and, on a GPU, what fused steps wrote last when the arrays are taken back from them, and
// the small cases of kernels that prove themselves.
MLX_H2O_API int mlx_h2o_set_evaluator(mlx_h2o_evaluator evaluator, void* context);

// -- attention ------------------------------------------------------------------------------------

// Softmax attention, its logits and their log-sum-exp.
//
// q [B, Hq, L, D], k [B, Hk, N, D], v [B, Hk, N, Dv], all floating. mask_mode is "" (none, or
// mask_arr if that is not empty), "causal" (the last query sees all N keys) or "array". mask_arr is
// boolean (true is visible) or floating (added; the dtype's lowest number hides), and broadcasts to
// [B, Hq, L, N]. sinks [Hq], if not empty, are logits of an extra softmax column without a value.
//
// out [B, Hq, L, Dv] in q's dtype; scores [B, Hq, L, N], minus infinity where masked; lse
// [B, Hq, L], minus infinity in rows that see nothing (whose out is zero).
MLX_H2O_API int mlx_h2o_attention_with_scores(
    mlx_array* out, mlx_array* scores, mlx_array* lse, const mlx_array q, const mlx_array k,
    const mlx_array v, float scale, const char* mask_mode, const mlx_array mask_arr,
    const mlx_array sinks, const mlx_stream s);

// The same, with the mass that each key received, mass [B, Hk, N], in the place of [L, N] scores.
MLX_H2O_API int mlx_h2o_attention_with_mass(
    mlx_array* out, mlx_array* mass, mlx_array* lse, const mlx_array q, const mlx_array k,
    const mlx_array v, float scale, const char* mask_mode, const mlx_array mask_arr,
    const mlx_array sinks, const mlx_stream s);

// mlx_h2o_attention_with_scores over packed keys and values, as mlx_quantize packs them: words
// [B, Hk, N, width * bits / 32] uint32, scales and biases [B, Hk, N, width / group_size] floating.
// Bits are 2, 3, 4, 5, 6 or 8, group_size is 32, 64 or 128.
MLX_H2O_API int mlx_h2o_attention_quantized_with_scores(
    mlx_array* out, mlx_array* scores, mlx_array* lse, const mlx_array q, const mlx_array k_w,
    const mlx_array k_scales, const mlx_array k_biases, const mlx_array v_w,
    const mlx_array v_scales, const mlx_array v_biases, float scale, int k_bits, int v_bits,
    int group_size, const char* mask_mode, const mlx_array mask_arr, const mlx_array sinks,
    const mlx_stream s);

// -- policies and prompts -------------------------------------------------------------------------

// A way to choose what to forget (docs/reference/policies.md).
typedef struct mlx_h2o_policy_ {
  void* ctx;
} mlx_h2o_policy;

// An empty handle, to be filled.
MLX_H2O_API mlx_h2o_policy mlx_h2o_policy_new(void);
MLX_H2O_API int mlx_h2o_policy_free(mlx_h2o_policy policy);

// A policy or preset by name, with its default settings: "distinct", "salient", "h2o", "ema",
// "ema-logits", "tova", "streaming", "keydiff"; "paper", "h2o-paper".
MLX_H2O_API int mlx_h2o_policy_named(mlx_h2o_policy* res, const char* name);

// Changes a setting, written as on the command line: ("recent", "0.25") is a share, ("recent",
// "64") a count, ("unit", "layer"), ("age_normalised", "true"), ("evict_every", "4") ... A cache
// keeps the settings it was made with.
MLX_H2O_API int mlx_h2o_policy_set(mlx_h2o_policy policy, const char* setting, const char* value);

// How many of the last positions a head of `budget` slots protects.
MLX_H2O_API int mlx_h2o_policy_recent_slots(int* res, const mlx_h2o_policy policy, int budget);

// The policy's scores [B, Hk, N] after attention: scores [B, Hk, N] from before (0 for new slots),
// logits [B, Hq, L, N] and lse [B, Hq, L].
MLX_H2O_API int mlx_h2o_accumulate(
    mlx_array* res, const mlx_h2o_policy policy, const mlx_array scores, const mlx_array logits,
    const mlx_array lse, const mlx_stream s);

// Slots as a policy sees them. Handles are borrowed.
typedef struct mlx_h2o_slots_ {
  size_t size;                 // of this struct
  mlx_array keys;              // [B, Hk, N, D] floating
  mlx_array values;            // [B, Hk, N, Dv] floating
  mlx_array positions;         // [B, Hk, N] int32, logical, all different within a head
  mlx_array scores;            // [B, Hk, N]; empty for policies that accumulate none
  mlx_array evictable;         // [B, Hk, N] bool (mlx_h2o_evictable)
  mlx_array evicted_mean_key;  // [B, Hk, D]; zeros while nothing was evicted
  int offset;                  // the next logical position
  int evicted;                 // tokens that each head has lost
} mlx_h2o_slots;

// What one call of the attention tells about N slots. Handles are borrowed.
typedef struct mlx_h2o_observation_ {
  size_t size;           // of this struct, as the library knows it
  mlx_array logits;      // [B, Hq, L, N], minus infinity where masked
  mlx_array lse;         // [B, Hq, L], of every column that answered
  mlx_array mass;        // [B, Hk, N], the attention that each slot received of all L queries
  mlx_array stands_for;  // [N], how many queries each of these stands for; empty: 1
} mlx_h2o_observation;

// A policy of a program's own. Functions get handles that stay the library's, fill `res`, an empty
// handle, with an array [B, Hk, N] float32, and return 0, or another number if they could not. They
// build lazy arrays on the stream that they are given, and must not use the cache.
typedef struct mlx_h2o_policy_functions_ {
  size_t size;           // of this struct; functions behind its end are NULL
  bool needs_attention;  // whether there are scores; without, it can serve in any model
  void* context;         // handed to the functions
  // Scores after an observation, of those before it. NULL: the mass is summed.
  int (*accumulate)(
      void* context, mlx_array* res, const mlx_array scores, const mlx_h2o_observation* seen,
      const mlx_stream s);
  // What each slot is worth keeping; the lowest goes first.
  int (*priority)(void* context, mlx_array* res, const mlx_h2o_slots* slots, const mlx_stream s);
  // Called once, when no policy and no cache has the context any longer. NULL: nothing is done. Not
  // called where mlx_h2o_policy_own fails.
  void (*destroy)(void* context);
} mlx_h2o_policy_functions;

// Makes one. It has the settings that all policies have ("recent" 0.5, ...). Its steps go operation
// by operation. Where a function fails the call fails (MLX_H2O_ERROR_PROGRAM), and the cache, of
// which a part was changed, can only be freed: every other call fails (MLX_H2O_ERROR_STATE). The
// name, which files say, may not be one of the library's (MLX_H2O_ERROR_SETTINGS).
MLX_H2O_API int mlx_h2o_policy_own(
    mlx_h2o_policy* res, const char* name, const mlx_h2o_policy_functions* functions);

// True [B, Hk, N] where a slot is neither a sink nor among the last `recent` positions.
MLX_H2O_API int mlx_h2o_evictable(
    mlx_array* res, const mlx_array positions, int offset, int sink, int recent,
    const mlx_stream s);

// Prompt compression: the `count` rows that the policy keeps of a prompt, [B, Hk, count] int32, in
// order of position. window_mass [B, Hk, N] is the mass that its last queries gave
// (mlx_h2o_attention_with_mass of those); empty where the policy's prompt is "full".
MLX_H2O_API int mlx_h2o_compress_prompt(
    mlx_array* res, const mlx_h2o_policy policy, const mlx_h2o_slots* slots,
    const mlx_array window_mass, int count, const mlx_stream s);

// -- a layer's cache ------------------------------------------------------------------------------

// The bounded KV cache of one layer, which does all of the above in order.
typedef struct mlx_h2o_cache_ {
  void* ctx;
} mlx_h2o_cache;

// A plain RoPE: the first `dims` channels of a key are turned in pairs, by scale * base^(-2i /
// dims) a position. A pair's channels are neighbours (traditional) or dims / 2 apart.
typedef struct mlx_h2o_rope_ {
  size_t size;  // of this struct
  int dims;     // even
  float base, scale;
  bool traditional;
} mlx_h2o_rope;

typedef struct mlx_h2o_cache_options_ {
  size_t size;      // of this struct, as the program knows it
  bool remainder;   // whether evicted tokens go on answering
  bool attending;   // whether mlx_h2o_cache_update_and_attend attends, or the model by itself
  int k_bits;       // of packed keys: 2, 3, 4, 5, 6 or 8; 0: in their own dtype
  int v_bits;       // of packed values
  int group_size;   // 32, 64 or 128
  int recent_bits;  // of the newest tokens where they differ; 16: in their own dtype; 0: no
  int undo;         // steps that mlx_h2o_cache_trim can take back after evictions (attending only)
  // Where the remainder's second-order term turns from x to sqrt(t x), t for each KV head, 0 for
  // first order; NULL: 4 for all. Copied (attending only).
  const float* saturation;
  // Of packed keys, [Hk, D] each, or empty: stored are (k - centre) / scale, for centre a channel's
  // mean and scale its greatest distance from that, above 0. Borrowed and looked at (attending
  // only; beside attention sinks the centre must be zeros).
  mlx_array frame_centre;
  mlx_array frame_scale;
  // Slots that follow as the conversation grows, n_stages rows [n_stages, 1 + n_kv_heads] of a
  // number of tokens, above the one before, and the slots of each KV head once more tokens than
  // that have come. So a short conversation can keep all its tokens in every head, until the memory
  // is full and slots are shared out by need. Steps before a stage cannot be taken back any more:
  // with undo it begins between drafts. NULL: none. Copied (attending only).
  const int* filling;
  size_t n_stages;
  bool kernels;  // whether kernels compute for this cache where there are some
  // The RoPE of the keys, for rolling positions: queries see the keys without the gaps that evicted
  // tokens left, so that a conversation can go on beyond the positions that the model was trained
  // for. NULL: positions are absolute. Copied (attending only, without remainder and packed rows;
  // no step is fused).
  const mlx_h2o_rope* rope;
} mlx_h2o_cache_options;

// The remainder on, attention ours, nothing packed, groups of 64, no undo, with kernels, absolute
// positions. `size` is that of the struct, of which so much is filled.
MLX_H2O_API int mlx_h2o_cache_options_init(mlx_h2o_cache_options* res, size_t size);
// The same as a value, of the size that the program knows. Start from these.
static inline mlx_h2o_cache_options mlx_h2o_cache_options_default(void) {
  mlx_h2o_cache_options options;
  mlx_h2o_cache_options_init(&options, sizeof options);
  return options;
}

// An empty handle, to be filled.
MLX_H2O_API mlx_h2o_cache mlx_h2o_cache_new(void);
MLX_H2O_API int mlx_h2o_cache_free(mlx_h2o_cache cache);

// A cache with so many slots for each of n_kv_heads KV heads. The policy's settings are copied.
// Batch, widths and dtypes are those of the first rows. options NULL: the defaults.
MLX_H2O_API int mlx_h2o_cache_make(
    mlx_h2o_cache* res, const mlx_h2o_policy policy, const int* budgets, size_t n_kv_heads,
    const mlx_h2o_cache_options* options);

// What it was made with, as far as that has not changed since (filling: the stages to come).
// res->size is given. Pointers and arrays are the cache's, until it is changed or freed.
MLX_H2O_API int mlx_h2o_cache_get_options(mlx_h2o_cache_options* res, mlx_h2o_cache cache);
// The slots of each KV head, [n_kv_heads], as they are now. n_kv_heads is the number of places in
// res; where res is NULL, it becomes the number of heads.
MLX_H2O_API int mlx_h2o_cache_budgets(int* res, size_t* n_kv_heads, const mlx_h2o_cache cache);
// Its pins, [n_spans, 2], in order, with n_spans as above.
MLX_H2O_API int mlx_h2o_cache_pins(int* res, size_t* n_spans, const mlx_h2o_cache cache);

// What its rows are like; others are refused.
typedef struct mlx_h2o_row_types_ {
  size_t size;  // of this struct, as the program knows it
  int batch, n_kv_heads, key_width, value_width;
  mlx_dtype key_dtype, value_dtype;  // before they are packed
} mlx_h2o_row_types;
// An error before the first rows. res->size is given.
MLX_H2O_API int mlx_h2o_cache_row_types(mlx_h2o_row_types* res, const mlx_h2o_cache cache);

// Whether kernels compute for it from now on, as options.kernels.
MLX_H2O_API int mlx_h2o_cache_use_kernels(mlx_h2o_cache cache, bool use);

// One call of a layer's attention: takes new rows in, attends to all that is held and, through the
// remainder, to what was evicted, and chooses what to forget.
//
// q [B, Hq, L, D], keys [B, Hk, L, D] with RoPE applied at mlx_h2o_cache_offset, values
// [B, Hk, L, Dv], floating; sinks [Hq] floating, or empty. L > 1 is a prompt chunk, L = 1 a decode
// step; with options.undo, 1 < L <= undo + 1 tokens are L decode steps, so that a draft is verified
// as plain decoding would have gone. out [B, Hq, L, Dv] in q's dtype.
//
// mask_mode is "causal", "" (every query sees all rows) or "array": mask_arr is boolean (true is
// visible) or floating (added; the dtype's lowest number hides), and broadcasts to [B, Hq, L, M]:
// the last L of its M columns are for the new rows, and what was held before is always visible; one
// column alone is for all rows. With an array no step is fused.
MLX_H2O_API int mlx_h2o_cache_update_and_attend(
    mlx_array* out, mlx_h2o_cache cache, const mlx_array q, const mlx_array keys,
    const mlx_array values, float scale, const char* mask_mode, const mlx_array mask_arr,
    const mlx_array sinks, const mlx_stream s);

// The mask that n new tokens will need, for a model that asks before it makes them. res_mode is one
// of the modes above (static) and res the array of "array", or an empty handle: "" for one token,
// "causal" for more, or booleans [n, size + n] where an array is asked for. Where the model attends
// by itself and tokens were evicted it is what mlx_h2o_cache_update_and_fetch will give, whatever
// was asked for: [1, 1, n, N] to be added.
MLX_H2O_API int mlx_h2o_cache_make_mask(
    const char** res_mode, mlx_array* res, mlx_h2o_cache cache, int n, bool as_array,
    const mlx_stream s);

// The same for a model that attends by itself (options.attending false; a policy that looks at keys
// only, all heads alike, nothing packed): takes new rows in, chooses what to forget, and gives out
// what to attend to, the evicted as plain rows that come first and are taken from the budget.
//
// keys [B, Hk, L, D], values [B, Hk, L, Dv], floating. res_keys [B, Hk, N, D] and res_values
// [B, Hk, N, Dv]; res_mask [1, 1, L, N] in the keys' dtype, to be added to the logits, or an empty
// handle: then L = 1 needs no mask, and L > 1 a causal one aligned at the end.
MLX_H2O_API int mlx_h2o_cache_update_and_fetch(
    mlx_array* res_keys, mlx_array* res_values, mlx_array* res_mask, mlx_h2o_cache cache,
    const mlx_array keys, const mlx_array values, const mlx_stream s);

// The next logical position: how many tokens came.
MLX_H2O_API int mlx_h2o_cache_offset(int* res, const mlx_h2o_cache cache);
// Tokens held by the head that holds most.
MLX_H2O_API int mlx_h2o_cache_size(int* res, const mlx_h2o_cache cache);
// Tokens dropped, mean over KV heads, rounded down.
MLX_H2O_API int mlx_h2o_cache_evicted(int64_t* res, const mlx_h2o_cache cache);
// Bytes of everything held: rows, what belongs to them, remainder, victims, frame, undo, and of a
// file's less than a block of rows, and the last queries. Beyond
// 32,768 tokens a position takes 4 bytes, not 2: a stage of `filling` there can make up for it.
MLX_H2O_API int mlx_h2o_cache_nbytes(size_t* res, const mlx_h2o_cache cache);

// How many of the newest tokens mlx_h2o_cache_trim can take back: those of the last steps that undo
// remembers (a prompt chunk makes it forget them), and all while nothing was evicted before those.
// Right after a longer chunk up to `undo` of its last tokens can be, as if it had ended before
// them: it is kept until the next token comes, with the cache before it, and mlx_h2o_cache_nbytes
// counts both.
MLX_H2O_API int mlx_h2o_cache_trimmable(int* res, const mlx_h2o_cache cache);
// Takes the newest n tokens back. Those that undo remembers exactly: rows, positions, scores,
// remainder and victims are, bit for bit, what they were before. Of older ones, which nothing
// evicted, the rows go and the attention that they gave stays in the scores of others. An error,
// and nothing is taken back, if n is more than mlx_h2o_cache_trimmable.
MLX_H2O_API int mlx_h2o_cache_trim(mlx_h2o_cache cache, int n, const mlx_stream s);

// A cache that holds the same and goes on by itself, for a conversation that branches: no memory is
// copied until one of the two changes it. The copy has no file of rows. res: an empty handle, or a
// cache that it replaces.
MLX_H2O_API int mlx_h2o_cache_copy(mlx_h2o_cache* res, mlx_h2o_cache cache, const mlx_stream s);

// Gives each KV head other slots, and slots that follow from there, as options.filling (NULL and 0:
// none). What no longer fits goes into the remainder, and steps before this cannot be taken back
// any more. An error, and nothing is changed, for slots that mlx_h2o_cache_make refuses, or without
// room for the pins.
MLX_H2O_API int mlx_h2o_cache_resize(
    mlx_h2o_cache cache, const int* budgets, size_t n_kv_heads, const int* filling, size_t n_stages,
    const mlx_stream s);

// Never evicts the tokens at some logical positions, those held and those to come, whatever the
// policy: a system prompt, a definition. spans [n_spans, 2] are first positions and those one past
// the last. Pins count against the budget and stay with their positions, also when tokens are taken
// back; steps before this cannot be taken back any more. res_missing, unless NULL: at how many of
// the positions some head has lost its token already, and cannot pin it. A head that is too small
// for the pins gets slots of the others; an error, and nothing is changed, if all have too few.
MLX_H2O_API int mlx_h2o_cache_pin(
    int* res_missing, mlx_h2o_cache cache, const int* spans, size_t n_spans, const mlx_stream s);
// At which positions the last mlx_h2o_cache_pin found that some head had lost its token,
// [n_spans, 2], in order, with n_spans as of mlx_h2o_cache_pins.
MLX_H2O_API int mlx_h2o_cache_missing(int* res, size_t* n_spans, const mlx_h2o_cache cache);
// Lets all pinned tokens go as any others.
MLX_H2O_API int mlx_h2o_cache_unpin(mlx_h2o_cache cache, const mlx_stream s);

// Says at the beginning of a turn how much of what was attended to before still counts, from 0
// (all that is held is as if it came just now) to 1 (all of it, as without this call): scores speak
// of that part of the steps that they spoke of. Steps before this cannot be taken back any more.
MLX_H2O_API int mlx_h2o_cache_new_turn(mlx_h2o_cache cache, double carry, const mlx_stream s);

// All that it holds: arrays by name, and the rest as JSON, in the form in which Python's caches are
// saved (H2OKVCache.state), so that what one wrote the other goes on with. Steps to undo, and
// options.kernels, are not in it. res and res_settings are new or replaced. While fused steps go on
// upon a GPU the arrays are copies.
MLX_H2O_API int mlx_h2o_cache_arrays(
    mlx_map_string_to_array* res, mlx_string* res_settings, mlx_h2o_cache cache,
    const mlx_stream s);
// A cache that holds what was saved. res: an empty handle, or a cache that it replaces. An error
// (MLX_H2O_ERROR_SAVED) for anything that no cache can have saved, whatever it is: all names,
// shapes, dtypes, numbers and indices are checked, the latter evaluated; for kinds of caches that
// only Python has; and for a cache that had seen no rows and does not say its slots. policy: an
// empty handle, or a policy of the program's own where the cache was saved with one of that name.
MLX_H2O_API int mlx_h2o_cache_restore(
    mlx_h2o_cache* res, const mlx_h2o_policy policy, const mlx_map_string_to_array arrays,
    const char* settings, const mlx_stream s);

// Writes the caches of a model's layers into a prompt-cache file, which Python's load_prompt_cache
// and Swift's loadCaches read too. It is written beside the file of that name, which it replaces
// once all is on disk: where that fails (MLX_H2O_ERROR_FILE) the old file stays. metadata: texts to
// keep with them, or an empty handle.
MLX_H2O_API int mlx_h2o_save_prompt_cache(
    const char* file, const mlx_h2o_cache* caches, size_t n_caches,
    const mlx_map_string_to_string metadata, const mlx_stream s);
// The caches of such a file, in order. res [n_caches]: empty handles, or caches that are replaced.
// res_metadata: NULL, or the texts that were kept. policy: as of mlx_h2o_cache_restore. An error,
// and nothing is changed, for a file that cannot be read (MLX_H2O_ERROR_FILE) and for one that is
// truncated, was changed since (it has a SHA-256 of all its parts), is foreign or of another
// version, holds another number of caches, or such as only Python and Swift have
// (MLX_H2O_ERROR_SAVED).
MLX_H2O_API int mlx_h2o_load_prompt_cache(
    mlx_h2o_cache* res, size_t n_caches, mlx_map_string_to_string* res_metadata, const char* file,
    const mlx_h2o_policy policy, const mlx_stream s);

// The parts of such a file, for a program that has other caches beside these: arrays
// "<i>.<name>" of the i-th cache, and as `entries` a JSON list of one object for each, of these
// caches {"class": "H2OKVCache", "config": what mlx_h2o_cache_arrays gives}. Checked as above.
MLX_H2O_API int mlx_h2o_write_prompt_cache(
    const char* file, const mlx_map_string_to_array arrays, const char* entries,
    const mlx_map_string_to_string metadata, const mlx_stream s);
MLX_H2O_API int mlx_h2o_read_prompt_cache(
    mlx_map_string_to_array* res, mlx_string* res_entries, mlx_map_string_to_string* res_metadata,
    const char* file, const mlx_stream s);

// All arrays held; of what kernels change in place, what they wrote last. A program that evaluates
// these after each prompt chunk, or with every token, has evaluated all that the cache holds.
MLX_H2O_API int mlx_h2o_cache_inner_state(mlx_vector_array* res, const mlx_h2o_cache cache);

// Whether kernels have what it holds, as from a fused step on until something else is asked of it.
// Then mlx_h2o_cache_arrays copies all of it, and mlx_h2o_cache_inner_state nothing.
MLX_H2O_API int mlx_h2o_cache_is_fused(bool* res, const mlx_h2o_cache cache);

// Readers of what is held. On a GPU they do not interrupt fused steps; their results are evaluated.
//
// Positions held [B, Hk, size] int32, ascending per head, then -1; and their scores in the same
// order, then 0.
MLX_H2O_API int mlx_h2o_cache_kept(mlx_array* res, mlx_h2o_cache cache, const mlx_stream s);
MLX_H2O_API int mlx_h2o_cache_scores(mlx_array* res, mlx_h2o_cache cache, const mlx_stream s);

// Keys [B, Hk, size, D] and values [B, Hk, size, Dv] in the same order, unpacked, in the frame if
// there is one; then zeros; with their positions.
MLX_H2O_API int mlx_h2o_cache_rows(
    mlx_array* res_keys, mlx_array* res_values, mlx_array* res_positions, mlx_h2o_cache cache,
    const mlx_stream s);

// Statistics of evicted rows, in the frame if there is one: count [B, Hk], mean_key and var_key
// [B, Hk, D], mean_value [B, Hk, Dv]. A plain struct of four handles.
typedef struct mlx_h2o_remainder_ {
  mlx_array count;
  mlx_array mean_key;
  mlx_array var_key;
  mlx_array mean_value;
} mlx_h2o_remainder;

// Four empty handles, to be filled.
MLX_H2O_API mlx_h2o_remainder mlx_h2o_remainder_new(void);
MLX_H2O_API int mlx_h2o_remainder_free(mlx_h2o_remainder remainder);

// Statistics of the evicted.
MLX_H2O_API int mlx_h2o_cache_remainder(
    mlx_h2o_remainder* res, mlx_h2o_cache cache, const mlx_stream s);

// -- a prompt that is read twice ------------------------------------------------------------------

// A prompt that is longer than the slots is read once by caches that have room for all of it; then
// the model is asked to repeat it, and reads it again, while it is noted how much weight each row
// receives. The rows that received most are kept, those of all layers and heads competing for a
// part of the slots; the others go into the remainder, and the kept values are fitted to the
// attention that all rows gave. In between the caches hold all of the prompt, and queries of it.
//
//   mlx_h2o_two_readings_begin(&readings, caches, n_layers, length, 16, s);
//   the model reads the prompt as ever: mlx_h2o_cache_update_and_attend in each layer
//   for each chunk of it, the model reads the tokens of a request ("\n\nRepeat the previous context
//   exactly:\n\n") and then the chunk, with RoPE applied at mlx_h2o_cache_offset, which stays:
//   mlx_h2o_second_reading_attend in each layer, in the place of the other
//   mlx_h2o_two_readings_finish(readings, s), or mlx_h2o_two_readings_abandon
//
// The caches are those of one conversation, must outlive this, and are used by one thread at a
// time. They attend (options.attending), with absolute positions, without recent_bits, and each
// head by itself (not the policy's unit "layer"). Of a conversation with a file of rows only the
// first prompt can be read so, and no values are fitted.
typedef struct mlx_h2o_two_readings_ {
  void* ctx;
} mlx_h2o_two_readings;

// An empty handle, to be filled.
MLX_H2O_API mlx_h2o_two_readings mlx_h2o_two_readings_new(void);
// Of readings that are not over the caches keep their room.
MLX_H2O_API int mlx_h2o_two_readings_free(mlx_h2o_two_readings readings);

// Makes room in the caches of all layers, in order, for a prompt of `length` tokens, from 1 on.
// What they hold keeps a part of the slots in proportion to its length, by the policy. `room` slots
// of each head, from 0 on, stay free for tokens after the prompt (its last ones, with the question,
// are best read once, after this). An error (MLX_H2O_ERROR_SETTINGS), and nothing is changed, for
// other caches than those above and for too few slots. res: an empty handle, or readings that are
// over.
MLX_H2O_API int mlx_h2o_two_readings_begin(
    mlx_h2o_two_readings* res, const mlx_h2o_cache* caches, size_t n_layers, int length, int room,
    const mlx_stream s);

// One call of a layer's attention in the second reading: to all that its cache holds, the evicted
// and, causally, the chunk itself, of which nothing is stored. Shapes are those of
// mlx_h2o_cache_update_and_attend. An error (MLX_H2O_ERROR_STATE), and nothing is changed, before
// the cache has read the whole prompt once, or if it was changed in between.
MLX_H2O_API int mlx_h2o_second_reading_attend(
    mlx_array* out, mlx_h2o_two_readings readings, size_t layer, const mlx_array q,
    const mlx_array keys, const mlx_array values, float scale, const mlx_array sinks,
    const mlx_stream s);
// All arrays that the second reading has made. A program that evaluates these after each chunk need
// not compute the model's logits.
MLX_H2O_API int mlx_h2o_second_reading_state(
    mlx_vector_array* res, const mlx_h2o_two_readings readings);

// Keeps the rows worth most, and fits their values; all is evaluated. A head's slots are from now
// on those of its rows and the room. An error (MLX_H2O_ERROR_STATE), and nothing is changed, unless
// all layers have read the prompt twice; of a failure of another kind the caches are as after
// mlx_h2o_two_readings_abandon.
MLX_H2O_API int mlx_h2o_two_readings_finish(mlx_h2o_two_readings readings, const mlx_stream s);
// Gives the caches the slots that they would have without this, whatever they have read of the
// prompt: what does not fit is evicted by the policy.
MLX_H2O_API int mlx_h2o_two_readings_abandon(mlx_h2o_two_readings readings, const mlx_stream s);

// -- a file of all rows ---------------------------------------------------------------------------

// The file behind the caches of one conversation, one for each layer: every row that comes is
// written to it, evicted or not, and evicted rows that are wanted again come back from it. It is
// scratch: it has no name, and goes with its handle or with the process. A step waits for the disk
// only where rows come faster than it takes them. If anything goes wrong (no space, a disk that is
// too slow, several sequences in one cache), the conversation goes on without its file, as if there
// had been none: mlx_h2o_spill_failure tells.
//
// The caches of a conversation are used by one thread at a time. A cache that is copied or restored
// goes on without a file.
typedef struct mlx_h2o_spill_ {
  void* ctx;
} mlx_h2o_spill;

// How rows come back: while decoding every `every` tokens, and before each prompt chunk, to caches
// whose policy sees attention. They take slots from others, which are evicted.
typedef struct mlx_h2o_returns_ {
  size_t size;  // of this struct, as the program knows it
  int every;    // 1 to 65536 tokens
  int window;   // 1 to 65536 of the last queries say what is wanted
  int pages;    // 1 to 65536 pages of 16 tokens are read for a KV head, and as many behind them
  int rows;     // 1 to 65536 come back to a KV head, at most
  double room;  // the part of a head's evictable slots that they may take, above 0 to 1
  int ahead;    // so many rows behind a wanted one are wanted, too; 0 to 65536
} mlx_h2o_returns;

// Every 32 tokens, 8 queries, 12 pages, 64 rows, room 0.5, 16 ahead. `size` is that of the struct.
MLX_H2O_API int mlx_h2o_returns_init(mlx_h2o_returns* res, size_t size);
// The same as a value. Start from these.
static inline mlx_h2o_returns mlx_h2o_returns_default(void) {
  mlx_h2o_returns returns;
  mlx_h2o_returns_init(&returns, sizeof returns);
  return returns;
}

// An empty handle, to be filled.
MLX_H2O_API mlx_h2o_spill mlx_h2o_spill_new(void);
// Removes the file; the caches go on without it.
MLX_H2O_API int mlx_h2o_spill_free(mlx_h2o_spill spill);

// For a conversation of so many layers, a file in this folder. It is made, with the folder if there
// is none (mode 0700), when the first rows of all layers have come. returns NULL: the defaults.
MLX_H2O_API int mlx_h2o_spill_make(
    mlx_h2o_spill* res, const char* folder, size_t n_layers, const mlx_h2o_returns* returns);
// Has a cache that has seen no token be a layer's, from 0 on. returning [n_kv_heads]: whether rows
// come back to each of its KV heads; NULL and 0: to all.
MLX_H2O_API int mlx_h2o_cache_spill_to(
    mlx_h2o_cache cache, const mlx_h2o_spill spill, size_t layer, const bool* returning,
    size_t n_kv_heads);

// Why there is no file, or why it gets no more rows; "" while all is well. It is valid until the
// next call with this handle or one of its caches; not to be freed.
MLX_H2O_API int mlx_h2o_spill_failure(const char** res, const mlx_h2o_spill spill);
// How many rows came back to a cache so far, over all its KV heads.
MLX_H2O_API int mlx_h2o_cache_returned(int64_t* res, const mlx_h2o_cache cache);

#ifdef __cplusplus
}
#endif

#endif

// What policies accumulate and choose.
#include <string.h>

#include "replays.h"

void replay_accumulate(Replay* r) {
  // They describe how the stored inputs were made.
  const char* const made_with[] = {"seed", "batch",     "query_heads", "kv_heads", "queries",
                                   "keys", "key_width", "scale",       "sinks"};
  for (size_t i = 0; i < sizeof made_with / sizeof *made_with; ++i) text_of(r->c, made_with[i]);
  mlx_h2o_policy policy = policy_of(r->c);
  mlx_array scores = golden(r, "in", "scores"), logits = golden(r, "in", "logits");
  mlx_array lse = golden(r, "in", "lse"), after = kNone;
  TRY(mlx_h2o_accumulate(&after, policy, scores, logits, lse, r->s));
  expect(r, "scores", after);
  mlx_array_free(scores), mlx_array_free(logits), mlx_array_free(lse), mlx_array_free(after);
  mlx_h2o_policy_free(policy);
}

void replay_selection(Replay* r) {
  Case* c = r->c;
  const char* kind = text_of(c, "kind");
  const int B = int_of(c, "batch"), H = int_of(c, "kv_heads"), N = int_of(c, "slots");
  const int D = int_of(c, "key_width"), Dv = int_of(c, "value_width");
  const int count = int_of(c, "count"), evicted = int_of(c, "evicted");
  const int k_shape[] = {B, H, N, D}, v_shape[] = {B, H, N, Dv}, mean_shape[] = {B, H, D};
  const bool per_layer = !strcmp(text_of(c, "policy.unit"), "layer");
  text_or_null(c, "scores");  // how the stored ones were made
  mlx_h2o_policy policy = policy_of(c);
  int recent;
  TRY(mlx_h2o_policy_recent_slots(&recent, policy, N));
  mlx_h2o_slots slots = {
      sizeof slots,
      tensor(r, K, k_shape, 4, MLX_FLOAT32, 0),
      tensor(r, V, v_shape, 4, MLX_FLOAT32, 0),
      golden(r, "in", "positions"),
      golden(r, "in", "scores"),
      mlx_array_new(),
      tensor(r, MEAN_KEY, mean_shape, 3, MLX_FLOAT32, 0),
      N + evicted,
      evicted};
  TRY(mlx_h2o_evictable(
      &slots.evictable, slots.positions, slots.offset, int_of(c, "policy.sink"), recent, r->s));
  mlx_array priority = kNone, chosen = kNone, mass = golden(r, "in", "window_mass");
  if (!strcmp(kind, "kept")) {
    TRY(mlx_h2o_prompt_priority(&priority, policy, &slots, mass, r->s));
    expect(r, "priority", priority);
    TRY(mlx_h2o_select_kept(
        &chosen, priority, slots.positions, slots.evictable, count, per_layer, r->s));
    expect(r, "kept", chosen);
    TRY(mlx_h2o_compress_prompt(&chosen, policy, &slots, mass, count, r->s));
    expect(r, "kept", chosen);
  } else {
    if (strcmp(kind, "extremes")) {
      TRY(mlx_h2o_priority(&priority, policy, &slots, r->s));
      expect(r, "priority", priority);
    } else {
      priority = golden(r, "in", "priority");
    }
    TRY(mlx_h2o_select_victims(
        &chosen, priority, slots.positions, slots.evictable, count, per_layer, r->s));
    expect(r, "victims", chosen);
  }
  const mlx_array all[] = {slots.keys,   slots.values,    slots.positions,
                           slots.scores, slots.evictable, slots.evicted_mean_key,
                           priority,     chosen,          mass};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) mlx_array_free(all[i]);
  mlx_h2o_policy_free(policy);
}

// Replays golden vectors through the C API:
//
//   replay GOLDEN [--group NAME] [--case NAME] [--every N] [--plain] [--steps N]
//
// --group replays one group only, --case those cases (given several times), --every each N-th case;
// --plain computes without kernels;
// --steps N decodes N tokens afterwards and fails if memory grows. Ends with 0 if all agree, 1 if
// something differs, 2 if it could not be tried.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "replays.h"

typedef struct Group_ {
  const char* name;
  void (*replay)(Replay*);
} Group;

static const Group kGroups[] = {
    {"attention", replay_attention}, {"quantized", replay_quantized},
    {"remainder", replay_remainder}, {"accumulate", replay_accumulate},
    {"selection", replay_selection}, {"trajectory", replay_trajectory},
    {"framed", replay_trajectory},   {"turns", replay_trajectory},
    {"filling", replay_trajectory},  {"returning", replay_trajectory},
    {"twice", replay_twice},         {"model", NULL},  // models are Python's and Swift's
};

// The cases that were asked for; all if none were.
static const char* wanted[32];
static size_t wanted_count = 0;

static bool is_wanted(const char* name) {
  bool found = !wanted_count;
  for (size_t i = 0; i < wanted_count; ++i) found = found || !strcmp(wanted[i], name);
  return found;
}

static void replay_group(Replay* r, const char* folder, const Group* group, int every) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s.safetensors", folder, group->name);
  mlx_map_string_to_string metadata = mlx_map_string_to_string_new();
  r->arrays = mlx_map_string_to_array_new();
  if (mlx_load_safetensors(&r->arrays, &metadata, path, r->s)) exit(2);
  const char* schema = NULL;
  if (mlx_map_string_to_string_get(&schema, metadata, "schema") || strcmp(schema, "1")) {
    fprintf(stderr, "replay: %s has another schema\n", path);
    exit(2);
  }
  const int before = r->differences;
  int replayed = 0, seen = 0;
  r->worst = 0;
  for (size_t i = 0; i < r->cases.count; ++i) {
    r->c = &r->cases.cases[i];
    if (strcmp(r->c->group, group->name) || !is_wanted(r->c->name) || seen++ % every) continue;
    group->replay(r);
    ++replayed;
    text_or_null(r->c, "seed"), text_or_null(r->c, "kind");
    if (unread(r->c)) differs(r, unread(r->c), "is a parameter that this replayer does not know");
  }
  printf(
      "%-10s %3d cases, worst error %.2f of what is tolerated, %d differences\n", group->name,
      replayed, r->worst, r->differences - before);
  if (!replayed) exit(2);
  mlx_map_string_to_array_free(r->arrays);
  mlx_map_string_to_string_free(metadata);
}

static void print_error(const char* message, void* data) {
  (void)data;
  fprintf(stderr, "replay: mlx-c: %s\n", message);
}

int main(int argc, char** argv) {
  const char *folder = NULL, *only = NULL;
  int steps = 0, every = 1;
  for (int i = 1; i < argc; ++i) {
    if (!strcmp(argv[i], "--plain"))
      mlx_h2o_use_kernels(false);
    else if (!strcmp(argv[i], "--steps") && i + 1 < argc)
      steps = atoi(argv[++i]);
    else if (!strcmp(argv[i], "--every") && i + 1 < argc)
      every = atoi(argv[++i]);
    else if (!strcmp(argv[i], "--group") && i + 1 < argc)
      only = argv[++i];
    else if (!strcmp(argv[i], "--case") && i + 1 < argc && wanted_count < 32)
      wanted[wanted_count++] = argv[++i];
    else
      folder = argv[i];
  }
  if (!folder || every < 1) {
    fprintf(
        stderr, "replay GOLDEN [--group NAME] [--case NAME] [--every N] [--plain] [--steps N]\n");
    return 2;
  }
  mlx_set_error_handler(print_error, NULL, NULL);
  char path[4096];
  snprintf(path, sizeof path, "%s/cases.txt", folder);
  Replay r = {.s = mlx_default_cpu_stream_new(), .cases = cases_read(path)};
  for (size_t i = 0; i < r.cases.count; ++i) {
    bool known = false;
    for (size_t g = 0; g < sizeof kGroups / sizeof *kGroups; ++g)
      known = known || !strcmp(kGroups[g].name, r.cases.cases[i].group);
    if (!known) {
      fprintf(stderr, "replay: the group %s is unknown\n", r.cases.cases[i].group);
      return 2;
    }
  }
  int groups = 0;
  for (size_t g = 0; g < sizeof kGroups / sizeof *kGroups; ++g)
    if (kGroups[g].replay && (!only || !strcmp(only, kGroups[g].name))) {
      replay_group(&r, folder, &kGroups[g], every);
      ++groups;
    }
  if (!groups) return 2;
  int failures = r.differences + check_errors(&r) + check_write_rows(&r);
  if (steps) failures += check_flat_memory(&r, steps);
  cases_free(r.cases);
  mlx_stream_free(r.s);
  return failures ? 1 : 0;
}

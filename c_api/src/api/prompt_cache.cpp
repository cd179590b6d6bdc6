// mlx_h2o.h: a model's caches in a file.
#include "../prompt_cache.h"

#include "handles.h"

namespace mlx_h2o {

namespace {

constexpr size_t kMostCaches = 4096;

Texts texts_of(mlx_map_string_to_string given) {
  Texts all;
  if (!given.ctx) return all;
  const mlx_map_string_to_string_iterator it = mlx_map_string_to_string_iterator_new(given);
  const char *name = nullptr, *words = nullptr;
  while (!mlx_map_string_to_string_iterator_next(&name, &words, it)) all.emplace(name, words);
  mlx_map_string_to_string_iterator_free(it);
  return all;
}

void give(mlx_map_string_to_string* res, const Texts& texts) {
  const mlx_map_string_to_string all = mlx_map_string_to_string_new();
  int status = 0;
  for (const auto& [name, words] : texts)
    status = status || mlx_map_string_to_string_insert(all, name.c_str(), words.c_str());
  status = status || mlx_map_string_to_string_set(res, all);
  mlx_map_string_to_string_free(all);
  check(!status, "MLX could not list the texts.", Blame::internal);
}

}  // namespace

}  // namespace mlx_h2o

using namespace mlx_h2o;

extern "C" {

int mlx_h2o_save_prompt_cache(
    const char* file, const mlx_h2o_cache* caches, size_t n_caches,
    const mlx_map_string_to_string metadata, const mlx_stream s) {
  return guarded_on(s, [&] {
    check(file && caches, "A prompt cache is a file and caches; a pointer is null.");
    check_within("The number of caches", int64_t(n_caches), 1, kMostCaches);
    std::vector<Core*> all;
    for (size_t i = 0; i < n_caches; ++i) all.push_back(&changed(caches[i]));
    write_prompt_cache(file, parts_of(all, texts_of(metadata)));
  });
}

int mlx_h2o_load_prompt_cache(
    mlx_h2o_cache* res, size_t n_caches, mlx_map_string_to_string* res_metadata, const char* file,
    const mlx_h2o_policy policy, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res);
    refuse_tracing();
    check(file, "The file is missing: a pointer is null.");
    const PromptCache parts = read_prompt_cache(file);
    std::vector<std::unique_ptr<Core>> caches = caches_of(parts, own_of(policy));
    check(
        caches.size() == n_caches,
        std::string(file) + " holds " + std::to_string(caches.size()) + " caches; got place for " +
            std::to_string(n_caches) + ": it is another model's.",
        Blame::saved);
    if (res_metadata) give(res_metadata, parts.metadata);
    for (size_t i = 0; i < n_caches; ++i) give(&res[i], std::move(caches[i]));
  });
}

int mlx_h2o_write_prompt_cache(
    const char* file, const mlx_map_string_to_array arrays, const char* entries,
    const mlx_map_string_to_string metadata, const mlx_stream s) {
  return guarded_on(s, [&] {
    check(file && entries && arrays.ctx, "A prompt cache is a file, entries and arrays.");
    write_prompt_cache(file, {fields_of(arrays), entries, texts_of(metadata)});
  });
}

int mlx_h2o_read_prompt_cache(
    mlx_map_string_to_array* res, mlx_string* res_entries, mlx_map_string_to_string* res_metadata,
    const char* file, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res, res_entries, res_metadata);
    check(file, "The file is missing: a pointer is null.");
    const PromptCache parts = read_prompt_cache(file);
    give(res_metadata, parts.metadata);
    give(res, parts.arrays);
    give(res_entries, parts.entries);
  });
}

}  // extern "C"

#include "prompt_cache.h"

#include "json.h"

namespace mlx_h2o {

namespace {

const char* const kFormat = "mlx-h2o prompt cache";
const char* const kVersion = "1";

const std::string& text_of(const Texts& metadata, const std::string& name) {
  static const std::string nothing;
  const auto it = metadata.find(name);
  return it == metadata.end() ? nothing : it->second;
}

std::unique_ptr<Core> cache_of(
    const Json& entry, const std::string& prefix, const Fields& arrays, const Policy* own) {
  const Json::Object& described = entry.object("A cache");
  const std::string& kind = member(described, "class").words("class");
  check(kind == "H2OKVCache", "It holds a " + kind + ", which only Python and Swift have.");
  Fields fields;
  for (auto it = arrays.lower_bound(prefix); it != arrays.end(); ++it) {
    if (it->first.compare(0, prefix.size(), prefix)) break;
    fields.emplace(it->first.substr(prefix.size()), it->second);
  }
  return Core::restored(fields, member(described, "config").text(), own);
}

}  // namespace

void write_prompt_cache(const std::string& path, const PromptCache& parts) {
  Json::Object texts;
  for (const auto& [name, words] : parts.metadata) texts.emplace(name, words);
  write_safetensors(
      path, parts.arrays,
      {{"format", kFormat},
       {"version", kVersion},
       {"metadata", Json(texts).text()},
       {"entries", parts.entries}});
}

PromptCache read_prompt_cache(const std::string& path) {
  const std::string cannot = path + " cannot be loaded: ";
  Safetensors file = read_safetensors(path);
  check(
      text_of(file.metadata, "format") == kFormat, cannot + "it was not written by mlx-h2o.",
      Blame::saved);
  const std::string& version = text_of(file.metadata, "version");
  check(
      version == kVersion,
      cannot + "it has format version " + version + "; this library reads " + kVersion + ".",
      Blame::saved);
  return blaming(Blame::saved, [&] {
    PromptCache parts{std::move(file.arrays), text_of(file.metadata, "entries"), {}};
    const Json metadata = Json::parsed(text_of(file.metadata, "metadata"));
    for (const auto& [name, words] : metadata.object("metadata"))
      parts.metadata.emplace(name, words.words(name));
    return parts;
  });
}

PromptCache parts_of(const std::vector<Core*>& caches, Texts metadata) {
  PromptCache parts{{}, "[", std::move(metadata)};
  for (size_t i = 0; i < caches.size(); ++i) {
    const auto [own, settings] = caches[i]->saved();
    for (const auto& [name, array] : own)
      parts.arrays.emplace(std::to_string(i) + "." + name, array);
    parts.entries += i ? ", " : "";
    parts.entries += "{\"class\": \"H2OKVCache\", \"config\": " + settings + "}";
  }
  parts.entries += "]";
  return parts;
}

std::vector<std::unique_ptr<Core>> caches_of(const PromptCache& parts, const Policy* own) {
  return blaming(Blame::saved, [&] {
    std::vector<std::unique_ptr<Core>> caches;
    const Json entries = Json::parsed(parts.entries);
    for (const Json& entry : entries.list("entries"))
      caches.push_back(cache_of(entry, std::to_string(caches.size()) + ".", parts.arrays, own));
    return caches;
  });
}

}  // namespace mlx_h2o

#include "handles.h"

using namespace mlxc;

namespace {

template <class Map>
struct Iterator {
  typename Map::iterator next;
};
using Arrays = Pointee<mlx_map_string_to_array>::type;
using Strings = Pointee<mlx_map_string_to_string>::type;

// As mlx-c: 2 says that there is none (and is no error).
constexpr int NONE = 2;

// The entry that the iterator stands before, or the end.
template <class Map, class Handle, class Give>
int advance(Handle it, Give give) {
  auto& map = *static_cast<Map*>(it.map_ctx);
  auto& next = static_cast<Iterator<Map>*>(it.ctx)->next;
  if (next == map.end()) return NONE;
  give(*next);
  ++next;
  return 0;
}

}  // namespace

extern "C" {

mlx_vector_array mlx_vector_array_new(void) {
  return make<mlx_vector_array>({});
}
mlx_vector_array mlx_vector_array_new_data(const mlx_array* data, size_t size) {
  auto vec = mlx_vector_array_new();
  mlx_vector_array_append_data(vec, data, size);
  return vec;
}
mlx_vector_array mlx_vector_array_new_value(const mlx_array val) {
  return mlx_vector_array_new_data(&val, 1);
}
int mlx_vector_array_set(mlx_vector_array* vec, const mlx_vector_array src) {
  return guard([&] { set(vec, get(src)); });
}
int mlx_vector_array_free(mlx_vector_array vec) {
  release(vec);
  return 0;
}
int mlx_vector_array_append_data(mlx_vector_array vec, const mlx_array* data, size_t size) {
  return guard([&] {
    for (size_t i = 0; i < size; ++i) get(vec).push_back(get(data[i]));
  });
}
int mlx_vector_array_append_value(mlx_vector_array vec, const mlx_array val) {
  return mlx_vector_array_append_data(vec, &val, 1);
}
size_t mlx_vector_array_size(mlx_vector_array vec) {
  return guarded<size_t>(0, [&] { return get(vec).size(); });
}
int mlx_vector_array_get(mlx_array* res, const mlx_vector_array vec, size_t idx) {
  return guard([&] { set(res, get(vec).at(idx)); });
}

mlx_vector_string mlx_vector_string_new(void) {
  return make<mlx_vector_string>({});
}
mlx_vector_string mlx_vector_string_new_data(const char** data, size_t size) {
  return make<mlx_vector_string>(std::vector<std::string>(data, data + size));
}
mlx_vector_string mlx_vector_string_new_value(const char* val) {
  return mlx_vector_string_new_data(&val, 1);
}
int mlx_vector_string_free(mlx_vector_string vec) {
  release(vec);
  return 0;
}
int mlx_vector_string_append_value(mlx_vector_string vec, const char* val) {
  return guard([&] { get(vec).push_back(val); });
}
size_t mlx_vector_string_size(mlx_vector_string vec) {
  return guarded<size_t>(0, [&] { return get(vec).size(); });
}
int mlx_vector_string_get(char** res, const mlx_vector_string vec, size_t idx) {
  return guard([&] { *res = get(vec).at(idx).data(); });
}

mlx_map_string_to_array mlx_map_string_to_array_new(void) {
  return make<mlx_map_string_to_array>({});
}
int mlx_map_string_to_array_set(mlx_map_string_to_array* map, const mlx_map_string_to_array src) {
  return guard([&] { set(map, get(src)); });
}
int mlx_map_string_to_array_free(mlx_map_string_to_array map) {
  release(map);
  return 0;
}
int mlx_map_string_to_array_insert(
    mlx_map_string_to_array map, const char* key, const mlx_array value) {
  return guard([&] { get(map).insert_or_assign(key, get(value)); });
}
int mlx_map_string_to_array_get(
    mlx_array* value, const mlx_map_string_to_array map, const char* key) {
  int status = 0;
  int failed = guard([&] {
    auto entry = get(map).find(key);
    if (entry == get(map).end())
      status = NONE;
    else
      set(value, entry->second);
  });
  return failed ? failed : status;
}
mlx_map_string_to_array_iterator mlx_map_string_to_array_iterator_new(mlx_map_string_to_array map) {
  return guarded<mlx_map_string_to_array_iterator>({nullptr, nullptr}, [&] {
    return mlx_map_string_to_array_iterator{new Iterator<Arrays>{get(map).begin()}, map.ctx};
  });
}
int mlx_map_string_to_array_iterator_free(mlx_map_string_to_array_iterator it) {
  delete static_cast<Iterator<Arrays>*>(it.ctx);
  return 0;
}
int mlx_map_string_to_array_iterator_next(
    const char** key, mlx_array* value, mlx_map_string_to_array_iterator it) {
  return advance<Arrays>(it, [&](auto& entry) {
    *key = entry.first.c_str();
    set(value, entry.second);
  });
}

mlx_map_string_to_string mlx_map_string_to_string_new(void) {
  return make<mlx_map_string_to_string>({});
}
int mlx_map_string_to_string_set(
    mlx_map_string_to_string* map, const mlx_map_string_to_string src) {
  return guard([&] { set(map, get(src)); });
}
int mlx_map_string_to_string_free(mlx_map_string_to_string map) {
  release(map);
  return 0;
}
int mlx_map_string_to_string_insert(
    mlx_map_string_to_string map, const char* key, const char* value) {
  return guard([&] { get(map).insert_or_assign(key, value); });
}
int mlx_map_string_to_string_get(
    const char** value, const mlx_map_string_to_string map, const char* key) {
  int status = 0;
  int failed = guard([&] {
    auto entry = get(map).find(key);
    if (entry == get(map).end())
      status = NONE;
    else
      *value = entry->second.c_str();
  });
  return failed ? failed : status;
}
mlx_map_string_to_string_iterator mlx_map_string_to_string_iterator_new(
    mlx_map_string_to_string map) {
  return guarded<mlx_map_string_to_string_iterator>({nullptr, nullptr}, [&] {
    return mlx_map_string_to_string_iterator{new Iterator<Strings>{get(map).begin()}, map.ctx};
  });
}
int mlx_map_string_to_string_iterator_free(mlx_map_string_to_string_iterator it) {
  delete static_cast<Iterator<Strings>*>(it.ctx);
  return 0;
}
int mlx_map_string_to_string_iterator_next(
    const char** key, const char** value, mlx_map_string_to_string_iterator it) {
  return advance<Strings>(it, [&](auto& entry) {
    *key = entry.first.c_str();
    *value = entry.second.c_str();
  });
}

}  // extern "C"

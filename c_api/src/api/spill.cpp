// mlx_h2o.h: a file of all rows.
#include <algorithm>

#include "../evaluation.h"
#include "../operands.h"
#include "../step.h"
#include "handles.h"
#include "mlx_h2o_golden.h"
#include "sized.h"

namespace mlx_h2o {

namespace {

// What a handle points to.
struct Spill {
  std::shared_ptr<ConversationRows> rows;
  std::string failure;  // as it was handed out last
};

Spill& spill_of(mlx_h2o_spill handle) {
  check(handle.ctx, "The file of rows is missing: a handle is empty.");
  return *static_cast<Spill*>(handle.ctx);
}

// Of the first version, which every program knows.
constexpr size_t kLeastReturns = offsetof(mlx_h2o_returns, ahead) + sizeof(int);

mlx_h2o_returns usual_returns() {
  const Returns usual;
  mlx_h2o_returns returns = {};
  returns.every = usual.every, returns.window = usual.window, returns.pages = usual.pages;
  returns.rows = usual.rows, returns.room = usual.room, returns.ahead = usual.ahead;
  return returns;
}

Returns returns_of(const mlx_h2o_returns* given) {
  if (!given) return {};
  const mlx_h2o_returns returns = complete(*given, usual_returns(), kLeastReturns, "returns");
  return {returns.every, returns.window, returns.pages, returns.rows, returns.room, returns.ahead};
}

}  // namespace

const std::shared_ptr<ConversationRows>& of(mlx_h2o_spill handle) {
  return spill_of(handle).rows;
}

}  // namespace mlx_h2o

using namespace mlx_h2o;

extern "C" {

int mlx_h2o_returns_init(mlx_h2o_returns* res, size_t size) {
  return guarded([&] {
    wants(res);
    fill(res, size, usual_returns(), kLeastReturns, "returns");
  });
}

mlx_h2o_spill mlx_h2o_spill_new(void) {
  return {};
}

int mlx_h2o_spill_free(mlx_h2o_spill spill) {
  Spill* const open = static_cast<Spill*>(spill.ctx);
  if (open) open->rows->close();
  delete open;
  return 0;
}

int mlx_h2o_spill_make(
    mlx_h2o_spill* res, const char* folder, size_t n_layers, const mlx_h2o_returns* returns) {
  return guarded([&] {
    wants(res);
    check(folder, "The folder for files of rows is missing: a pointer is null.");
    check(n_layers > 0 && n_layers <= 4096, "A conversation has 1 to 4096 layers.");
    auto made = std::make_unique<Spill>();
    made->rows = std::make_shared<ConversationRows>(folder, int(n_layers), returns_of(returns));
    mlx_h2o_spill_free(*res);
    res->ctx = made.release();
  });
}

int mlx_h2o_cache_spill_to(
    mlx_h2o_cache cache, const mlx_h2o_spill spill, size_t layer, const bool* returning,
    size_t n_kv_heads) {
  return guarded([&] {
    Core& core = changed(cache);
    const std::shared_ptr<ConversationRows>& rows = of(spill);
    check(
        returning ? n_kv_heads == core.heads() : !n_kv_heads,
        "This cache has " + std::to_string(core.heads()) + " KV heads; got " +
            std::to_string(n_kv_heads) + (returning ? "." : " and a null pointer."));
    std::vector<bool> heads(core.heads(), true);
    if (returning) heads.assign(returning, returning + n_kv_heads);
    core.spill_to(rows, int(std::min(layer, size_t(1) << 30)), std::move(heads));
  });
}

int mlx_h2o_spill_failure(const char** res, const mlx_h2o_spill spill) {
  return guarded([&] {
    wants(res);
    Spill& open = spill_of(spill);
    open.failure = open.rows->failure();
    *res = open.failure.c_str();
  });
}

int mlx_h2o_cache_returned(int64_t* res, const mlx_h2o_cache cache) {
  return guarded([&] {
    wants(res);
    *res = of(cache).returned();
  });
}

int mlx_h2o_spill_rows(
    mlx_map_string_to_array* res, mlx_h2o_spill spill, size_t layer, int head,
    const mlx_array positions, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res);
    RowFile* const file = of(spill)->well() ? of(spill)->file() : nullptr;
    check(file && file->flush(), "There is no file: " + of(spill)->failure(), Blame::state);
    check(layer < file->layout().layers().size(), "This file has no such layer.");
    Operands operands;
    const std::vector<int> at = ints_of(operands.take("positions", positions, "M", Kind::int32));
    Fields all;
    const RowBytes rows = file->rows(int(layer), head, {at.begin(), at.end()});
    for (const RowField& field : file->layout().layers()[layer].fields) {
      const mx::Shape shape{int(at.size()), int(field.row_bytes())};
      const mx::array bytes(rows.at(field.name).data(), shape, mx::uint8);
      all.emplace(field.name, mx::view(bytes, field.dtype));
    }
    give(res, all);
  });
}

}  // extern "C"

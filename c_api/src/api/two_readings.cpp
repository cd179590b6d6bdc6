// mlx_h2o.h: a prompt that is read twice.
#include "../evaluation.h"
#include "../twice.h"
#include "handles.h"
#include "mlx_h2o_golden.h"

namespace mlx_h2o {

namespace {

// More layers than any model has: a number that went wrong, as -1 does.
constexpr size_t kMostLayers = 1 << 12;

// What a handle points to; the caches are the program's.
struct Readings {
  std::vector<mlx_h2o_cache> caches;
  TwoReadings two;

  std::vector<Core*> cores() const {
    std::vector<Core*> all;
    for (mlx_h2o_cache cache : caches) all.push_back(&changed(cache));
    return all;
  }
};

Readings& of(mlx_h2o_two_readings handle) {
  check(handle.ctx, "The two readings are missing: a handle is empty.");
  return *static_cast<Readings*>(handle.ctx);
}

void check_layer(const Readings& readings, size_t layer) {
  check(
      layer < readings.caches.size(),
      "These readings have " + std::to_string(readings.caches.size()) + " layers; got number " +
          std::to_string(layer) + ".");
}

}  // namespace

}  // namespace mlx_h2o

using namespace mlx_h2o;

extern "C" {

mlx_h2o_two_readings mlx_h2o_two_readings_new(void) {
  return {};
}

int mlx_h2o_two_readings_free(mlx_h2o_two_readings readings) {
  delete static_cast<Readings*>(readings.ctx);
  return 0;
}

int mlx_h2o_two_readings_begin(
    mlx_h2o_two_readings* res, const mlx_h2o_cache* caches, size_t n_layers, int length, int room,
    const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res);
    check(caches, "The caches are missing: a pointer is null.");
    check_within("The number of layers", int64_t(n_layers), 1, kMostLayers);
    check_within("length", length, 1, kMostTokens);
    check_within("room", room, 0, kMostTokens);
    const std::vector<mlx_h2o_cache> all(caches, caches + n_layers);
    std::vector<Core*> cores;
    for (mlx_h2o_cache cache : all) cores.push_back(&changed(cache));
    auto made = std::make_unique<Readings>(Readings{all, TwoReadings(cores, length, room)});
    mlx_h2o_two_readings_free(*res);
    res->ctx = made.release();
  });
}

int mlx_h2o_second_reading_attend(
    mlx_array* out, mlx_h2o_two_readings readings, size_t layer, const mlx_array q,
    const mlx_array keys, const mlx_array values, float scale, const mlx_array sinks,
    const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(out);
    Readings& of_all = of(readings);
    check_layer(of_all, layer);
    check_scale(scale);
    Core& core = changed(of_all.caches[layer]);
    const KernelScope kernels(core.settings().kernels);
    give(out, of_all.two.look(layer, core, {of(q), scale, maybe(sinks)}, of(keys), of(values)));
  });
}

int mlx_h2o_second_reading_state(mlx_vector_array* res, const mlx_h2o_two_readings readings) {
  return guarded([&] {
    wants(res);
    give(res, of(readings).two.state());
  });
}

int mlx_h2o_two_readings_finish(mlx_h2o_two_readings readings, const mlx_stream s) {
  return guarded_on(s, [&] { of(readings).two.finish(of(readings).cores()); });
}

int mlx_h2o_two_readings_abandon(mlx_h2o_two_readings readings, const mlx_stream s) {
  return guarded_on(s, [&] {
    // One of them may be broken.
    refuse_tracing();
    std::vector<Core*> cores;
    for (mlx_h2o_cache cache : of(readings).caches) cores.push_back(&of(cache));
    of(readings).two.abandon(cores);
  });
}

int mlx_h2o_second_reading_worths(
    mlx_array* res, const mlx_h2o_two_readings readings, size_t layer, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res);
    check_layer(of(readings), layer);
    const std::vector<mx::array>& of_runs = of(readings).two.worths(layer);
    int most = 0;
    for (const mx::array& run : of_runs) most = std::max(most, run.shape(2));
    std::vector<mx::array> padded;
    for (const mx::array& run : of_runs)
      padded.push_back(mx::pad(run, {{0, 0}, {0, 0}, {0, most - run.shape(2)}}, number(0)));
    give(res, join_along(std::move(padded), 1));
  });
}

int mlx_h2o_shared_out(
    int* res, const mlx_array worths, int whole, const int* own, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res, own);
    check_within("whole", whole, 0, kMostTokens);
    Operands operands;
    const std::vector<float> all = floats_of(operands.take("worths", worths, "H T", Kind::float32));
    const int H = operands["H"], T = operands["T"];
    std::vector<std::vector<float>> of_heads;
    for (int head = 0; head < H; ++head) {
      const auto first = all.begin() + size_t(head) * T;
      of_heads.emplace_back(first, first + T);
      check_within("own", own[head], 0, kMostTokens);
    }
    const std::vector<int> counts = shared_out(of_heads, whole, {own, own + H});
    std::copy(counts.begin(), counts.end(), res);
  });
}

}  // extern "C"

// mlx_h2o._ext: the CPU kernels for Python. backends/cpu.py is what calls it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "blas.h"
#include "mlx/version.h"
#include "primitives/attention.h"
#include "primitives/decoding_layer.h"
#include "primitives/pack.h"
#include "primitives/ranged_arrays.h"
#include "primitives/undo_record.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mlx_h2o;

namespace {

using RecentTuple = std::tuple<int, int, bool>;
using HeadTuple = std::tuple<int64_t, int, int, int, int, bool>;
using TokenTuple = std::tuple<int, std::vector<HeadTuple>, std::optional<RecentTuple>, int>;

TokenPlan token_plan(const TokenTuple& tuple) {
  const auto& [offset, heads, recent, aged_from] = tuple;
  TokenPlan plan{offset, {}, {}, aged_from};
  plan.heads.reserve(heads.size());
  for (const auto& [start, length, victim, recent, evicted, choose] : heads)
    plan.heads.push_back({start, length, victim, recent, evicted, choose});
  if (recent) plan.recent = {std::get<0>(*recent), std::get<1>(*recent), std::get<2>(*recent)};
  return plan;
}

std::vector<std::vector<std::pair<int, mx::array>>> journal_of(const DecodingLayer& layer) {
  mx::array last = layer.last_step();
  mx::eval(last);
  std::vector<std::vector<std::pair<int, mx::array>>> steps;
  for (const auto& step : layer.journal()) {
    steps.emplace_back();
    if (step->has_slots()) steps.back().emplace_back(-1, step->slots());
    for (const UndoPart& part : step->parts()) steps.back().emplace_back(part.field, part.before);
  }
  return steps;
}

}  // namespace

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

NB_MODULE(_ext, m) {
  m.doc() = "CPU kernels of mlx-h2o as MLX primitives.";
  m.attr("built_for_mlx") =
      TEXT(MLX_VERSION_MAJOR) "." TEXT(MLX_VERSION_MINOR) "." TEXT(MLX_VERSION_PATCH);

  nb::enum_<Export>(m, "Export")
      .value("none", Export::none)
      .value("logits", Export::logits)
      .value("mass", Export::mass);
  nb::enum_<Score>(m, "Score")
      .value("none", Score::none)
      .value("sum", Score::sum)
      .value("ema", Score::ema)
      .value("ema_logits", Score::ema_logits)
      .value("last", Score::last);
  nb::enum_<Priority>(m, "Priority")
      .value("score", Priority::score)
      .value("age", Priority::age)
      .value("distance", Priority::distance)
      .value("direction", Priority::direction)
      .value("salience", Priority::salience);

  nb::class_<Stored>(m, "Stored")
      .def(
          "__init__",
          [](Stored* self, std::vector<mx::array> arrays, int bits, int group_size) {
            new (self) Stored{std::move(arrays), bits, group_size};
          },
          "arrays"_a, "bits"_a = 0, "group_size"_a = 0,
          "Keys or values: [array], or [words, scales, biases] in the format of mx.quantize.");

  m.def(
      "attention", &attention, "q"_a, "k"_a, "v"_a, nb::kw_only(), "scale"_a, "causal"_a = false,
      "mask"_a = nb::none(), "sinks"_a = nb::none(), "seed"_a = nb::none(), "ranges"_a = nb::none(),
      "wanted"_a = Export::none, "stream"_a = nb::none(),
      "Attention over [B, Hk, N, D], or [B, S, D] with (start, length) per head in `ranges`.\n\n"
      "Returns [out, lse] and, if wanted, logits or mass.");

  m.def(
      "pack", &pack, "rows"_a, "bits"_a, "group_size"_a, "stream"_a = nb::none(),
      "Words, scales and biases of rows [..., width].");

  m.def("ranges_fit_mlx", &ranges_fit_mlx, "Whether MLX allocates as its CPU builds do.");
  m.def(
      "reserved",
      [](const std::vector<std::vector<int>>& shapes, const std::vector<mx::Dtype>& dtypes) {
        if (shapes.size() != dtypes.size()) throw std::invalid_argument("One dtype for each shape");
        std::vector<mx::Shape> of;
        for (const auto& shape : shapes) of.emplace_back(shape.begin(), shape.end());
        return reserved_arrays(of, dtypes);
      },
      "shapes"_a, "dtypes"_a,
      "Zeros in one reserved range, which take memory where they are written.");
  m.def(
      "is_elsewhere", &is_elsewhere, "array"_a,
      "Whether an array has memory that is no reserved range's.");
  m.def(
      "put_rows", &put_rows, "fields"_a, "index"_a, "rows"_a, "unused"_a = std::vector<Slots>{},
      "stream"_a = nb::none(),
      "Fields [B, S, ...] with rows [B, M, ...] at slots [B or 1, M]; memory of the unused slots, "
      "(first, last) of every sequence, is given back.");
  m.def(
      "reserved_bytes", &ReservedRange::resident_in_all,
      "Resident bytes of all ranges: their own, and those of pages that copies share.");

  nb::class_<KernelPolicy>(m, "KernelPolicy")
      .def(
          "__init__",
          [](KernelPolicy* self, Score score, Priority priority, bool per_layer,
             bool age_normalised, int sink, int evict_every, float decay, float distance_weight,
             float mass_weight, float value_weight, float age_weight) {
            new (self) KernelPolicy{score,       priority,     per_layer, age_normalised,
                                    sink,        evict_every,  decay,     distance_weight,
                                    mass_weight, value_weight, age_weight};
          },
          nb::kw_only(), "score"_a, "priority"_a, "per_layer"_a, "age_normalised"_a, "sink"_a,
          "evict_every"_a, "decay"_a, "distance_weight"_a, "mass_weight"_a, "value_weight"_a,
          "age_weight"_a);

  nb::class_<Recent>(m, "Recent")
      .def(
          "__init__",
          [](Recent* self, Stored keys, Stored values, mx::array scores,
             std::optional<mx::array> value_lengths) {
            new (self) Recent{
                std::move(keys), std::move(values), std::move(scores), std::move(value_lengths)};
          },
          "keys"_a, "values"_a, "scores"_a, "value_lengths"_a = nb::none(),
          "The newest tokens, stored apart.");

  nb::class_<Frame>(m, "Frame")
      .def(
          "__init__",
          [](Frame* self, mx::array centre, mx::array scale) {
            new (self) Frame{std::move(centre), std::move(scale)};
          },
          "centre"_a, "scale"_a, "What keys are stored relative to.");

  nb::class_<DecodingLayer>(m, "DecodingLayer")
      .def(
          nb::init<
              const Stored&, const Stored&, std::vector<mx::array>, KernelPolicy, bool, bool,
              std::vector<float>, const std::optional<Recent>&, mx::StreamOrDevice,
              const std::optional<Frame>&, int>(),
          "keys"_a, "values"_a, "fields"_a, "policy"_a, nb::kw_only(), "remembers"_a, "answers"_a,
          "saturation"_a, "recent"_a = nb::none(), "stream"_a = nb::none(), "frame"_a = nb::none(),
          "undo"_a = 0)
      .def(
          "take_back", &DecodingLayer::take_back, "count"_a,
          "Undo the last steps, in place; waits for those that have not run yet.")
      .def(
          "journal", &journal_of,
          "What each step that can be taken back changed, as it was, oldest first: pairs of a "
          "field's place in the order of `close`, or -1 for slots [B, Hk], and an array.")
      .def_prop_ro(
          "journal_bytes",
          [](const DecodingLayer& self) {
            size_t bytes = 0;
            for (const auto& step : self.journal()) bytes += step->nbytes();
            return bytes;
          })
      .def(
          "close", &DecodingLayer::close, "stream"_a = nb::none(),
          "The fields as arrays again; no step may follow.");

  m.def(
      "step",
      [](const std::vector<DecodingLayer*>& layers, const mx::array& q, const mx::array& k,
         const mx::array& v, float scale, const std::optional<mx::array>& sinks,
         const std::vector<std::vector<TokenTuple>>& tokens, mx::StreamOrDevice s) {
        std::vector<std::vector<TokenPlan>> planned(tokens.size());
        for (size_t i = 0; i < tokens.size(); ++i)
          for (const auto& token : tokens[i]) planned[i].push_back(token_plan(token));
        return DecodingLayer::step(layers, q, k, v, scale, sinks, std::move(planned), s);
      },
      "layers"_a, "q"_a, "k"_a, "v"_a, nb::kw_only(), "scale"_a, "sinks"_a = nb::none(), "tokens"_a,
      "stream"_a = nb::none(),
      "The next tokens of several layers. Of each layer its tokens, (offset, heads, recent, "
      "aged_from); heads are (start, length, victim, recent, evicted, choose), recent is (slot, "
      "length, leaving).");

  m.def(
      "tracing",
      [] {
        // MLX does not export its own answer; an array marked as a tracer has it.
        static const mx::array* const probe = [] {
          auto* marked = new mx::array(0);
          marked->set_tracer(true);
          return marked;
        }();
        return probe->is_tracer();
      },
      "Whether a function is being traced (mx.compile, mx.grad, mx.vmap) and not run.");

  m.def("isa", [] { return kernels().name; }, "The instruction set in use.");
  m.def("threads", [] { return mlx_h2o::ThreadPool::shared().size(); });
  m.def(
      "set_threads", [](int threads) { mlx_h2o::ThreadPool::shared().resize(threads); },
      "threads"_a);

  m.def("blas_file", &blas_file, "The file whose matrix products MLX calls; empty: unknown.");
  m.def(
      "redirect_blas", &redirect_blas, "library"_a, "prefix"_a,
      "Make MLX call another BLAS and LAPACK; returns how many functions changed.");
  m.def("restore_blas", &restore_blas, "Make MLX call the BLAS that it was linked with.");
}

#include "step_launches.h"

#include "row_buffers.h"

namespace mlx_h2o {

namespace {

constexpr int kKeptKeysSimdgroups = 8;
constexpr int kUpdateSimdgroups = 16;

const std::vector<std::string> kRemainderOut{
    "counts_out", "mean_keys_out", "var_keys_out", "mean_values_out"};

mx::array kept_keys(
    const StepPlan& plan, const Stored& keys, const mx::array& written, const std::string& wanted,
    const mx::Shape& shape) {
  Buffers inputs{{"plan", plan.integers}, {"slots", written}};
  add_buffers(inputs, "keys", keys);
  return launch(
             "kept_keys", inputs, {{wanted, {shape, mx::float32}}},
             joined_lists<Template::value_type>(
                 {{{"D", keys.width()}},
                  packing_of("keys", keys),
                  {{"DIRECTIONS", wanted == "worth"}, {"SIMDS", kKeptKeysSimdgroups}}}),
             {1, static_cast<int>(plan.token.heads.size()), keys.arrays[0].shape(0)},
             kKeptKeysSimdgroups * kSimdgroup)
      .at(wanted);
}

// What is kept of the values' sizes.
void add_of_values(Buffers& inputs, const SlotArrays& slots) {
  if (slots.norms) inputs.emplace("norms", *slots.norms);
  if (slots.value_lengths) inputs.emplace("value_lengths", *slots.value_lengths);
}

// Decay of the averages; of distance, mass, value and age, as in metal/priority.h.
mx::array weights_of(const KernelPolicy& policy) {
  return mx::array(
      {policy.decay, policy.distance_weight, policy.mass_weight, policy.value_weight,
       -policy.age_weight});
}

}  // namespace

StepPlan::StepPlan(TokenPlan of_token, int slots, int sink, int evict_every)
    : token(std::move(of_token)), integers(0) {
  const std::vector<HeadPlan>& heads = token.heads;
  std::vector<int> lines;
  for (const HeadPlan& head : heads) {
    const int start = static_cast<int>(head.start);
    ranges.emplace_back(head.start, head.length);
    lines.insert(
        lines.end(),
        {start, head.length, attended, head.recent, head.victim, int(head.choose), 0, 0});
    attended += head.length;
  }
  std::vector<int> all{token.offset, slots, attended,        static_cast<int>(heads.size()),
                       evict_every,  sink,  token.aged_from, 0};
  all.insert(all.end(), lines.begin(), lines.end());
  integers = mx::array(all.begin(), {static_cast<int>(all.size())}, mx::int32);
}

mx::array overwrite(
    const StepPlan& plan, const SlotArrays& slots, const mx::array& victims,
    const mx::array& new_keys, const mx::array& new_values, std::optional<Remainder>& remainder,
    const std::optional<Frame>& frame) {
  const int B = new_keys.shape(0), H = new_keys.shape(1);
  Buffers inputs{
      {"plan", plan.integers},
      {"victims", victims},
      {"new_keys", new_keys},
      {"new_values", new_values},
      {"positions", slots.positions}};
  add_buffers(inputs, "keys", slots.keys);
  add_buffers(inputs, "values", slots.values);
  add_of_values(inputs, slots);
  if (frame) {
    inputs.emplace("frame_centre", frame->centre);
    inputs.emplace("frame_scale", frame->scale);
  }
  Outputs outputs{{"slots_out", {{B, H}, mx::int32}}};
  if (remainder) {
    add_remainder(inputs, *remainder);
    for (size_t i = 0; i < kRemainderOut.size(); ++i)
      outputs.emplace(
          kRemainderOut[i], std::pair(inputs.at(kRemainderBuffers[i]).shape(), mx::float32));
  }
  const Buffers written = launch(
      "overwrite", inputs, outputs,
      joined_lists<Template::value_type>(
          {{{"T", row_dtype(slots.keys)}, {"D", new_keys.shape(3)}, {"DV", new_values.shape(3)}},
           packing_of("keys", slots.keys),
           packing_of("values", slots.values),
           {{"REMEMBERS", remainder.has_value()},
            {"NORMS", slots.norms.has_value()},
            {"LENGTHS", slots.value_lengths.has_value()},
            {"POSITION", slots.positions.dtype()},
            {"FRAME", frame.has_value()}}}),
      {1, H, B}, kSimdgroup);
  if (remainder)
    remainder = Remainder{
        written.at(kRemainderOut[0]), written.at(kRemainderOut[1]), written.at(kRemainderOut[2]),
        written.at(kRemainderOut[3])};
  return written.at("slots_out");
}

mx::array mean_kept_keys(const StepPlan& plan, const Stored& keys, const mx::array& written) {
  const int heads = static_cast<int>(plan.token.heads.size());
  return kept_keys(plan, keys, written, "means", {keys.arrays[0].shape(0), heads, keys.width()});
}

mx::array unlike_directions(const StepPlan& plan, const Stored& keys, const mx::array& written) {
  return kept_keys(plan, keys, written, "worth", {keys.arrays[0].shape(0), plan.attended});
}

mx::array update(
    const StepPlan& plan, const SlotArrays& slots, const KernelPolicy& policy,
    const VectorResult& attended, const mx::array& victims, const mx::array& written,
    const std::optional<mx::array>& means, const std::optional<mx::array>& worth) {
  const int B = victims.shape(0), H = victims.shape(1);
  const bool scored = policy.score != Score::none;
  Buffers inputs{{"plan", plan.integers}, {"weights", weights_of(policy)}, {"victims", victims},
                 {"lse", *attended.lse},  {"positions", slots.positions},  {"slots", written}};
  const auto add = [&](const char* name, const std::optional<mx::array>& array) {
    if (array) inputs.emplace(name, *array);
  };
  add("logits", scored ? attended.logits : std::nullopt);
  add("distances", worth ? worth : attended.distances);
  add("means", means);
  add("scores", scored ? slots.scores : std::nullopt);
  add_of_values(inputs, slots);
  bool ranks = false;
  for (const HeadPlan& head : plan.token.heads) ranks = ranks || head.choose;
  int ranges = 0, levels = 0;
  if (ranks && policy.priority == Priority::salience && slots.values.bits) {
    inputs.emplace("value_scales", slots.values.arrays[1]);
    ranges = slots.values.arrays[1].shape(-1), levels = (1 << slots.values.bits) - 1;
  }
  return launch(
             "update", inputs, {{"victims_out", {victims.shape(), mx::int32}}},
             {{"D", slots.keys.width()},
              {"G", attended.lse->shape(1) / H},
              {"SCORE", static_cast<int>(policy.score)},
              {"PRIORITY", static_cast<int>(ranks ? policy.priority : Priority::age)},
              {"AGE", policy.age_normalised},
              {"VALUES", slots.norms.has_value()},
              {"RANGES", ranges},
              {"LEVELS", levels},
              {"HEADS", policy.per_layer ? H : 1},
              {"SIMDS", kUpdateSimdgroups}},
             {1, policy.per_layer ? 1 : H, B}, kUpdateSimdgroups * kSimdgroup)
      .at("victims_out");
}

}  // namespace mlx_h2o

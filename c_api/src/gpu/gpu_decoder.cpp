#include "gpu_decoder.h"

#include "../evaluation.h"
#include "../packed.h"
#include "../policy.h"
#include "launcher.h"
#include "step_launches.h"
#include "tiling.h"

namespace mlx_h2o {

namespace {

// MLX passes shorter arrays as constants, which cannot be written.
constexpr int kFewestSlots = 8;

// The same values in memory of their own: copied if there is another reference.
mx::array own(const mx::array& field) {
  const int slots = field.shape(1);
  const mx::array zero = mx::zeros({}, field.dtype());
  if (slots >= kFewestSlots) return mx::where(mx::array(true), field, zero);
  std::vector<std::pair<int, int>> more(field.ndim(), {0, 0});
  more[1].second = kFewestSlots - slots;
  return mx::pad(field, more, zero);
}

Stored own(const Stored& rows) {
  Stored mine{{}, rows.bits, rows.group_size};
  for (const mx::array& a : rows.arrays) mine.arrays.push_back(own(a));
  return mine;
}

// The kernels change these very arrays. MLX knows nothing of that, so every kernel that reads slots
// takes an array that the one before it wrote, and `close` waits for the last of them.
class GPUDecoder : public Decoder {
 public:
  GPUDecoder(const Lent& lent, const CacheSettings& settings)
      : packing_(settings.packing),
        policy_(settings.policy.kernel_policy()),
        remembers_(settings.remembers()),
        answers_(settings.remainder),
        saturations_(settings.saturations),
        frame_(settings.frame),
        count_(lent.fields.at("positions").shape(1)),
        slots_{
            own(packing_.rows("keys", lent.fields)), own(packing_.rows("values", lent.fields)),
            own(lent.fields.at("positions"))},
        remainder_(lent.remainder),
        victims_(lent.victims) {
    if (policy_.score != Score::none) slots_.scores = own(lent.fields.at("scores"));
    if (settings.policy.keeps_value_lengths(packing_))
      slots_.value_lengths = own(lent.fields.at("value_lengths"));
    if (settings.policy.value_weighted)
      slots_.norms = mx::sqrt(mx::sum(mx::square(f32(dense(slots_.values))), -1));
  }

  mx::array step(DecodeStep step) override {
    const mx::array &q = step.call.q, &k = step.keys, &v = step.values;
    const StepPlan plan{
        std::move(step.plan), slots_.keys.arrays[0].shape(1), policy_.sink, policy_.evict_every};
    const bool choose = plan.token.chooses();
    std::optional<Remainder> remembered;
    if (remembers_) remembered = remainder_;
    const mx::array written = overwrite(plan, slots_, victims_, k, v, remembered, frame_);
    if (remembered) remainder_ = *remembered;
    std::optional<mx::array> means, worth;
    const bool by_terms =
        policy_.priority == Priority::distance || policy_.priority == Priority::salience;
    if (choose && by_terms) means = evicted_means(plan, written);
    if (choose && policy_.priority == Priority::direction)
      worth = unlike_directions(plan, slots_.keys, written);
    VectorCall call{step.call.scale, {}, step.call.sinks};
    if (answers_ && plan.token.evicts()) call.remainder = remainder_;
    call.saturations = saturations_;
    if (frame_) call.frame_scale = frame_->scale;
    call.means = means;
    call.ranges = plan.ranges;
    call.wanted = policy_.score == Score::none ? VectorExport::lse : VectorExport::logits;
    call.architecture = *gpu_architecture();
    call.after = written;
    const VectorResult attended =
        vector_attend(mx::astype(q, k.dtype()), slots_.keys, slots_.values, call);
    victims_ = update(plan, slots_, policy_, attended, victims_, written, means, worth);
    // Evaluating the output evaluates all of the step.
    return mx::depends({mx::astype(attended.out, q.dtype())}, {victims_})[0];
  }

  std::vector<mx::array> last() const override {
    std::vector<mx::array> written = remainder_.arrays();
    written.push_back(victims_);
    return written;
  }

  Lent end() override {
    evaluate(last());
    return {held_fields(), remainder_, victims_, std::nullopt};
  }

  // Nothing of it is read before the last kernel has written.
  std::optional<Lent> look() const override {
    Fields fields = held_fields();
    for (auto& [name, field] : fields) field = mx::depends({field}, last())[0];
    return Lent{std::move(fields), remainder_, victims_, std::nullopt};
  }

 private:
  Fields held_fields() const {
    Fields fields;
    packing_.put(fields, "keys", held(slots_.keys));
    packing_.put(fields, "values", held(slots_.values));
    fields.emplace("positions", held(slots_.positions));
    if (slots_.scores) fields.emplace("scores", held(*slots_.scores));
    if (slots_.value_lengths) fields.emplace("value_lengths", held(*slots_.value_lengths));
    return fields;
  }

  // Without what `own` added.
  mx::array held(const mx::array& field) const {
    return part(field, 1, 0, count_);
  }

  Stored held(const Stored& rows) const {
    Stored kept{{}, rows.bits, rows.group_size};
    for (const mx::array& a : rows.arrays) kept.arrays.push_back(held(a));
    return kept;
  }

  // The mean evicted key, or that of the kept ones while too few were evicted.
  mx::array evicted_means(const StepPlan& plan, const mx::array& written) const {
    bool any = false;
    std::vector<bool> few;
    for (const HeadPlan& head : plan.token.heads) few.push_back(head.evicted < kFewestForAMean);
    for (const bool one : few) any = any || one;
    if (!any) return remainder_.mean_key;
    const mx::array marks(few.begin(), {static_cast<int>(few.size()), 1}, mx::bool_);
    return mx::where(marks, mean_kept_keys(plan, slots_.keys, written), remainder_.mean_key);
  }

  const Packing packing_;
  const KernelPolicy policy_;
  const bool remembers_, answers_;
  const Saturations saturations_;
  const std::optional<Frame> frame_;
  const int count_;
  SlotArrays slots_;
  Remainder remainder_;
  mx::array victims_;
};

bool tried_in_place() {
  const StepPlan plan{{1, {{0, 1, -1, 0, 0, false}}, {}}, kFewestSlots, 0, 1};
  const auto zeros = [] { return mx::zeros({1, kFewestSlots, 32}); };
  const SlotArrays slots{{{zeros()}}, {{zeros()}}, mx::zeros({1, kFewestSlots}, mx::int32)};
  evaluate({slots.keys.arrays[0], slots.values.arrays[0], slots.positions});
  const mx::array row = mx::ones({1, 1, 1, 32});
  std::optional<Remainder> none;
  evaluate({overwrite(plan, slots, mx::zeros({1, 1, 1}, mx::int32), row, row, none, {})});
  const auto sum = [](const Stored& rows) {
    return mx::sum(mx::reshape(part(rows.arrays[0], 1, 0, 1), {-1}), 0);
  };
  const mx::array of_keys = sum(slots.keys), of_values = sum(slots.values);
  evaluate({of_keys, of_values});
  return of_keys.item<float>() == 32 && of_values.item<float>() == 32;
}

}  // namespace

bool gpu_has_step(const mx::array& keys, const mx::array& values) {
  return is_kernel_width(keys.shape(-1)) && is_kernel_width(values.shape(-1));
}

bool gpu_writes_in_place() {
  static const bool in_place = tried_in_place();
  return in_place;
}

std::unique_ptr<Decoder> gpu_decoder_for(const Lent& lent, const CacheSettings& settings) {
  return std::make_unique<GPUDecoder>(lent, settings);
}

}  // namespace mlx_h2o

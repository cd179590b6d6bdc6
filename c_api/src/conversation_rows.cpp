#include "conversation_rows.h"

#include <algorithm>
#include <filesystem>

#include "evaluation.h"
#include "layer_rows.h"
#include "ops.h"

namespace mlx_h2o {

namespace {

constexpr int kMostReturns = 1 << 16, kMostLayers = 4096;

void check_count(const char* name, int number, int least) {
  check(
      number >= least && number <= kMostReturns,
      std::string(name) + " must be from " + std::to_string(least) + " to " +
          std::to_string(kMostReturns) + "; got " + std::to_string(number) + ".",
      Blame::settings);
}

}  // namespace

void Returns::check_all() const {
  check_count("every", every, 1), check_count("window", window, 1), check_count("pages", pages, 1);
  check_count("rows", rows, 1), check_count("ahead", ahead, 0);
  check(room > 0 && room <= 1, "room must be above 0 and at most 1.", Blame::settings);
}

ConversationRows::ConversationRows(std::string folder, int layers, const Returns& returns)
    : returns(returns),
      digests(folder),
      folder_(std::move(folder)),
      forms_(layers),
      attached_(layers),
      rows_(layers) {
  returns.check_all();
  check(
      layers > 0 && layers <= kMostLayers,
      "A conversation has 1 to " + std::to_string(kMostLayers) + " layers.");
  check(!folder_.empty(), "The folder for files of rows has no name.");
}

void ConversationRows::attach(int layer) {
  check(
      layer >= 0 && layer < layers(),
      "This conversation has layers 0 to " + std::to_string(layers() - 1) + "; got " +
          std::to_string(layer) + ".");
  check(!attached_[layer], "Another cache is this layer's already.", Blame::state);
  attached_[layer] = true;
}

void ConversationRows::come(int layer, LayerForm form) {
  forms_[layer] = std::move(form);
  const bool all = std::all_of(forms_.begin(), forms_.end(), [](const auto& f) { return !!f; });
  if (!all || file_ || !failure_.empty()) return;
  std::vector<LayerForm> known;
  for (const std::optional<LayerForm>& one : forms_) known.push_back(*one);
  try {
    if (!std::filesystem::exists(folder_)) {
      std::filesystem::create_directories(folder_);
      std::filesystem::permissions(folder_, std::filesystem::perms::owner_all);
    }
    file_ = std::make_unique<RowFile>(folder_, std::move(known));
  } catch (const std::exception& error) {
    return fail("no file can be made in " + folder_ + ": " + error.what());
  }
  for (LayerRows* const rows : rows_)
    if (rows) rows->give();
}

void ConversationRows::gone(const LayerRows* rows) {
  for (LayerRows*& one : rows_)
    if (one == rows) one = nullptr;
}

void ConversationRows::evaluate_held() {
  std::vector<mx::array> all;
  for (LayerRows* const rows : rows_) {
    if (!rows) continue;
    const std::vector<mx::array> waiting = rows->waiting();
    all.insert(all.end(), waiting.begin(), waiting.end());
    rows->settled();
  }
  evaluate(all);
}

void ConversationRows::fail(const std::string& why) {
  if (failure_.empty()) failure_ = file_ && !file_->failure().empty() ? file_->failure() : why;
  if (file_) file_->fail(failure_);
  digests.close();
}

bool ConversationRows::well() {
  if (failure_.empty() && file_ && !file_->failure().empty()) fail(file_->failure());
  return failure_.empty();
}

std::string ConversationRows::failure() const {
  return failure_.empty() && file_ ? file_->failure() : failure_;
}

void ConversationRows::close() {
  if (failure_.empty()) failure_ = "it is closed";
  file_.reset();
  digests.close();
}

}  // namespace mlx_h2o

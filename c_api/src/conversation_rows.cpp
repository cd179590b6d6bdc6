#include "conversation_rows.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <random>
#include <set>

#include "evaluation.h"
#include "json.h"
#include "layer_rows.h"
#include "ops.h"
#include "state_record.h"

namespace mlx_h2o {

namespace {

constexpr char kSuffix[] = ".rows";
constexpr int kMostReturns = 1 << 16, kMostLayers = 4096;
// Seconds for which a file without an owner may have just been made.
constexpr int kNew = 60;
// The most bytes of a header that is read to see whether a file may be removed.
constexpr size_t kMostHeader = size_t(1) << 23;

// Whether its notes say that the file goes with its conversation.
bool goes_with_conversation(int descriptor) {
  std::string start(kMostHeader, '\0');
  const ssize_t size = pread(descriptor, start.data(), start.size(), 0);
  start.resize(std::max<ssize_t>(size, 0));
  const Json notes = Json::parsed(RowLayout::read(start).notes());
  return !member(notes.object("notes"), "kept").truth("kept");
}

void remove_if_ownerless(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return;
  try {
    struct stat about;
    if (!fstat(descriptor, &about) && S_ISREG(about.st_mode) &&
        std::time(nullptr) - about.st_mtime > kNew && !flock(descriptor, LOCK_EX | LOCK_NB) &&
        goes_with_conversation(descriptor))
      unlink(path.c_str());
  } catch (const std::exception&) {  // not one of ours
  }
  close(descriptor);
}

// Removes files whose process was killed, once for each folder in the life of this process.
void remove_ownerless_once(const std::string& folder) {
  static std::mutex mutex;
  static std::set<std::string> looked_through;
  const std::lock_guard lock(mutex);
  if (!looked_through.insert(folder).second) return;
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error))
    if (it->path().extension() == kSuffix) remove_if_ownerless(it->path().string());
}

std::string new_name() {
  std::random_device random;
  std::string name;
  for (int i = 0; i < 24; ++i) name += "0123456789abcdef"[random() % 16];
  return name + kSuffix;
}

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
  check_count("rows", rows, 0), check_count("ahead", ahead, 0);
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
    remove_ownerless_once(folder_);
    path_ = folder_ + "/" + new_name();
    file_ = RowFile::create(path_, std::move(known), kept_, cipher_);
  } catch (const std::exception& error) {
    path_.clear();
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
    const std::vector<mx::array> held = rows->held();
    all.insert(all.end(), held.begin(), held.end());
    rows->settled();
  }
  evaluate(all);
}

bool ConversationRows::begun() const {
  return std::any_of(forms_.begin(), forms_.end(), [](const auto& form) { return !!form; });
}

void ConversationRows::keep() {
  check(
      !begun() || kept_, "Rows have come: it has to be said before that they stay.", Blame::state);
  kept_ = true;
}

void ConversationRows::seal(std::shared_ptr<const Cipher> cipher) {
  check(!begun(), "Rows have come: it has to be said before that they are sealed.", Blame::state);
  check(!cipher_, "This file has a cipher already.", Blame::state);
  cipher_ = std::move(cipher);
  digests.stay_in_memory();
}

std::string ConversationRows::next_record() const {
  return record_paths(path_)[size_t(place_)];
}

void ConversationRows::recorded() {
  file_->leave();
  place_ = 1 - place_;
}

void ConversationRows::go_on_in(std::unique_ptr<RowFile> file, int place) {
  file_ = std::move(file);
  path_ = file_->path();
  for (int layer = 0; layer < layers(); ++layer) forms_[layer] = file_->layout().layers()[layer];
  kept_ = true, place_ = place;
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
  path_.clear();
  digests.close();
}

}  // namespace mlx_h2o

#include "resuming.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "evaluation.h"
#include "pins.h"
#include "state_record.h"

namespace mlx_h2o {

namespace {

constexpr int kMostSlots = 1 << 28;

void write_durably(const std::string& path, const std::string& bytes) {
  const int flags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW;
  const int descriptor = open(path.c_str(), flags, 0600);
  if (descriptor < 0) throw FileError(path + " cannot be written");
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t count = write(descriptor, bytes.data() + done, bytes.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    done += size_t(count);
  }
  const bool whole = done == bytes.size() && !fsync(descriptor);
  close(descriptor);
  if (!whole) throw FileError(path + " cannot be written");
}

struct Found {
  StateRecord record;
  int place;  // of the two
};

// The records whose rows are in the file and the same as then, the newest first.
std::vector<Found> records_of(const RowFile& file) {
  std::vector<Found> found;
  for (int place = 0; place < 2; ++place) try {
      StateRecord record = StateRecord::read(
          record_paths(file.path())[place], file.layout().checksum(), file.seal());
      const int64_t blocks = record.position / kBlockPositions;
      if (record.position > 0 && blocks * kBlockPositions <= file.written() &&
          record.block == (blocks ? file.checksum_of(blocks - 1) : 0))
        found.push_back({std::move(record), place});
    } catch (const FileError&) {  // none, or torn
    }
  std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) {
    return a.record.position > b.record.position;
  });
  return found;
}

// The rows before a record's position: those of whole blocks from the file, others from it.
class KnownRows {
 public:
  // Takes a layer's rows out of the record's arrays.
  KnownRows(RowFile& file, int layer, int64_t position, Fields& arrays)
      : file_(file), layer_(layer), whole_(position - position % kBlockPositions) {
    const int behind = int(position - whole_);
    if (!behind) return;
    const LayerForm& form = file.layout().layers()[layer];
    for (const RowField& field : form.fields) {
      const auto found = arrays.find(kTail + field.name);
      if (found == arrays.end() ||
          found->second.shape() != mx::Shape{1, form.heads, behind, field.width} ||
          found->second.dtype() != field.dtype)
        throw FileError("A record of a state lacks rows.");
      tail.emplace(field.name, found->second);
      arrays.erase(found);
      const mx::array bytes = mx::contiguous(mx::view(tail.at(field.name), mx::uint8));
      evaluate({bytes});
      bytes_.emplace(field.name, bytes);
    }
  }

  Fields tail;  // [1, H, rows, width] by name, or nothing

  // Rows of one head at these positions, one after the other, by field.
  RowBytes of(int head, const std::vector<int64_t>& positions) const {
    std::vector<int64_t> early;
    for (const int64_t position : positions)
      if (position < whole_) early.push_back(position);
    const RowBytes in_file = file_.rows(layer_, head, early);
    RowBytes all;
    for (const RowField& field : file_.layout().layers()[layer_].fields) {
      const size_t size = field.row_bytes();
      const uint8_t* next = in_file.at(field.name).data();
      std::vector<uint8_t>& rows = all[field.name];
      for (const int64_t position : positions) {
        const uint8_t* from = next;
        if (position < whole_)
          next += size;
        else
          from = behind(field.name, head, position - whole_, size);
        rows.insert(rows.end(), from, from + size);
      }
    }
    return all;
  }

 private:
  const uint8_t* behind(const std::string& name, int head, int64_t row, size_t size) const {
    const auto found = bytes_.find(name);
    const int64_t rows = found == bytes_.end() ? 0 : found->second.shape(2);
    if (row >= rows) throw FileError("A slot holds a later position.");
    return found->second.data<uint8_t>() + size_t(head * rows + row) * size;
  }

  RowFile& file_;
  const int layer_;
  const int64_t whole_;
  Fields bytes_;
};

// The rows of a layer's slots, [1, S, width] by name. Of the configuration only what places them is
// looked at here; restoring looks at all.
Fields slots_of(
    const Json::Object& config, const Fields& arrays, const LayerForm& form,
    const KnownRows& known) {
  const auto found = arrays.find("slots.positions");
  check(found != arrays.end() && found->second.ndim() == 2, "A record names no positions.");
  const int S = found->second.shape(1);
  check(found->second.shape(0) == 1 && S <= kMostSlots, "A record is of one sequence.");
  const mx::array positions = mx::contiguous(true_positions(found->second));
  evaluate({positions});
  std::map<std::string, std::vector<uint8_t>> rows;
  for (const RowField& field : form.fields) rows[field.name].resize(field.row_bytes() * size_t(S));
  const int reserved = member(config, "reserved").whole("reserved", 0, kMostSlots);
  for (const Json& one : member(config, "runs").list("runs")) {
    const Json::Object& run = one.object("A run");
    const auto number = [&](const char* name, int most) {
      return member(run, name).whole(name, 0, most);
    };
    const int last = number("last", form.heads), first = number("first", last);
    const int64_t allocated = number("allocated", S);
    const int64_t start = number("start", S) + reserved, length = number("length", S);
    for (int head = first; head < last; ++head) {
      const int64_t at = start + (head - first) * allocated;
      check(at + length <= S, "A record has slots beyond the end.");
      const int* const held = positions.data<int>() + at;
      const RowBytes of_head = known.of(head, {held, held + length});
      for (const RowField& field : form.fields)
        std::copy(
            of_head.at(field.name).begin(), of_head.at(field.name).end(),
            rows.at(field.name).begin() + at * int64_t(field.row_bytes()));
    }
  }
  Fields slots;
  for (const RowField& field : form.fields) {
    const int width = int(field.row_bytes());
    const mx::array raw(rows.at(field.name).data(), mx::Shape{1, S, width}, mx::uint8);
    slots.emplace("slots." + field.name, mx::view(raw, field.dtype));
  }
  return slots;
}

Resumed gone_on(
    const std::string& path, std::unique_ptr<RowFile> opened,
    std::shared_ptr<const Cipher> cipher) {
  RowFile& file = *opened;
  std::vector<Found> found = records_of(file);
  if (found.empty()) throw FileError(path + " has no record of its conversation's state.");
  StateRecord& record = found[0].record;
  const std::vector<LayerForm>& forms = file.layout().layers();
  check(record.configs.size() == forms.size(), "The file has other layers than its conversation.");
  const std::string folder = std::filesystem::absolute(path).parent_path().string();
  const Returns returns = Returning::settings_of(record.configs[0]);
  Resumed all{std::make_shared<ConversationRows>(folder, int(forms.size()), returns), {}};
  if (cipher) all.conversation->seal(std::move(cipher));
  std::vector<KnownRows> known;
  for (size_t i = 0; i < forms.size(); ++i) {
    Fields& arrays = record.arrays[i];
    const Json::Object& config = record.configs[i].object("A cache");
    known.emplace_back(file, int(i), record.position, arrays);
    arrays.merge(slots_of(config, arrays, forms[i], known[i]));
    all.caches.push_back(
        Core::resumed(all.conversation, int(i), arrays, record.configs[i], known[i].tail));
    check(all.caches[i]->offset() == record.position, "The state is of several positions.");
  }
  file.go_on(record.position - record.position % kBlockPositions);
  all.conversation->go_on_in(std::move(opened), 1 - found[0].place);
  return all;
}

}  // namespace

bool record_state(ConversationRows& conversation, const std::vector<Core*>& caches) {
  check(
      caches.size() == size_t(conversation.layers()),
      "A record is of all " + std::to_string(conversation.layers()) + " caches.");
  StateRecord record{caches[0]->offset(), 0, {}, {}};
  for (size_t i = 0; i < caches.size(); ++i) {
    check(
        caches[i]->is_layer_of(conversation, int(i)),
        "The caches of a record are those of the file, in the order of its layers.");
    check(
        caches[i]->offset() == record.position, "The caches have seen different numbers of tokens.",
        Blame::state);
  }
  RowFile* const file = conversation.file();
  if (!conversation.kept() || !file || !conversation.well()) return false;
  try {
    for (Core* cache : caches) {
      auto [arrays, config] = cache->beside_rows();
      record.arrays.push_back(std::move(arrays)), record.configs.push_back(std::move(config));
    }
    if (!conversation.well() || !file->flush()) return false;
    const int64_t blocks = record.position / kBlockPositions;
    if (file->written() < blocks * kBlockPositions) return false;
    record.block = blocks ? file->checksum_of(blocks - 1) : 0;
    write_durably(
        conversation.next_record(), record.bytes(file->layout().checksum(), file->seal()));
  } catch (const FileError& error) {
    conversation.fail(std::string("a record of the state cannot be written: ") + error.what());
    return false;
  }
  conversation.recorded();
  return true;
}

Resumed resumed(const std::string& path, size_t layers, std::shared_ptr<const Cipher> cipher) {
  return blaming(Blame::saved, [&] {
    try {
      std::unique_ptr<RowFile> file = RowFile::open_to_go_on(path, cipher);
      const size_t in_file = file->layout().layers().size();
      if (in_file != layers)
        throw FileError(
            path + " has " + std::to_string(in_file) + " layers; there is place for " +
            std::to_string(layers) + ".");
      return gone_on(path, std::move(file), std::move(cipher));
    } catch (const FileError& error) {
      throw Refusal(Blame::saved, error.what());
    }
  });
}

}  // namespace mlx_h2o

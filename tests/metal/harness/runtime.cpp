// The host's GPU: runs a launch threadgroup by threadgroup, each lane a fiber, and watches every
// access to memory that lanes share.
//
// Kernels are compiled with -fsanitize=thread, whose calls (__tsan_read4 ...) land here instead of
// in that sanitizer's runtime. Lanes run to their next simdgroup operation or barrier; the runtime
// resolves it when all have arrived at the same one.

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "fiber.h"
#include "prelude_host.h"

namespace {

constexpr int SIMD = 32;
constexpr int MOST_LANES = 1024;
constexpr int64_t THREADGROUP_BYTES = 32768;
constexpr size_t STACK = 64 * 1024;

enum Space : int { DEVICE, CONSTANT, THREADGROUP };

// -- what Python hands over (the same fields in launch.py) ---------------------------------------

struct Buffer {
  const char* name;
  char* data;               // index 0
  int64_t first, last;      // indices in [first, last) ...
  const uint8_t* belongs;   // ... belong to the array: all of them, or those marked here
  int32_t width;            // bytes of an element
  int32_t space;
  int32_t writable;
  int32_t initialised;
  int64_t bytes_read, bytes_written;
};

struct Launch {
  const char* kernel;
  void (*entry)(void* const* arguments, const HostAttributes* where);
  void* const* arguments;
  Buffer* buffers;
  int64_t buffer_count;
  char *arena, *arena_end;
  uint32_t grid[3], threads[3];
  int64_t barriers, simd_reductions, simd_shuffles;  // of threadgroups, of simdgroups
  char* message;
  int64_t message_size;
};

// -- lanes ----------------------------------------------------------------------------------------

enum State { READY, AT_SIMD, AT_SIMD_BARRIER, AT_BARRIER, DONE };

struct Lane {
  void* stack;
  State state;
  int op, type, line, flags;
  uint32_t bits, argument;
  HostAttributes where;
  int arrays;  // threadgroup arrays declared so far
};

// The lane that touched an element, and in which interval between barriers.
struct Touch {
  uint32_t group = 0;  // threadgroup + 1; 0: none
  uint32_t epoch = 0, simd_epoch = 0;
  int lane = 0;
};

// The last write, the last read, and the last read by another lane than that one's.
struct Shadow {
  Touch written, read, read_before;
};

struct ThreadgroupArray {
  const char* name;
  char* data;
  int64_t count;
  int width;
  std::vector<Shadow> shadow;
};

Launch* launch;
std::vector<Buffer*> by_address;
std::vector<std::vector<Shadow>> shadows;  // per buffer, of those that are written
std::vector<ThreadgroupArray> arrays;
std::vector<Lane> lanes;
char* stacks;
char* pool;  // threadgroup memory
int64_t pool_used;
Lane* self;
void* scheduler;
bool failed;
uint32_t group;                          // threadgroup now running, + 1
uint32_t epochs[3];                      // per space
uint32_t simd_epochs[MOST_LANES / SIMD][3];

int index_of(const Lane* lane) {
  return int(lane - lanes.data());
}

[[noreturn]] void leave_for_good() {
  switch_stack(&self->stack, scheduler);
  abort();
}

void report(const char* format, ...) {
  if (failed) {
    return;
  }
  failed = true;
  int used = snprintf(launch->message, launch->message_size, "kernel %s: ", launch->kernel);
  va_list list;
  va_start(list, format);
  used += vsnprintf(launch->message + used, launch->message_size - used, format, list);
  va_end(list);
}

// What is wrong with an access of the running lane; the launch ends here.
[[noreturn]] void fail_access(const char* what, const char* name, int64_t index) {
  const uint3 at = self->where.threadgroup_position_in_grid;
  report("%s: %s[%lld], lane %d of threadgroup (%u, %u, %u)", what, name, (long long)index,
         index_of(self), at.x, at.y, at.z);
  leave_for_good();
}

[[noreturn]] void fail_conflict(const char* what, const char* name, int64_t index, int other) {
  const uint3 at = self->where.threadgroup_position_in_grid;
  report("%s: %s[%lld], lanes %d and %d of threadgroup (%u, %u, %u)", what, name, (long long)index,
         other, index_of(self), at.x, at.y, at.z);
  leave_for_good();
}

// -- accesses -------------------------------------------------------------------------------------

// Reads of one instruction at one address by several lanes of a simdgroup are one broadcast. Lanes
// run one after another between two synchronisations, so the set lives that long; a lane that comes
// twice starts a new request.
class Broadcasts {
 public:
  void clear() {
    ++generation_;
    used_ = 0;
  }

  bool is_new(uintptr_t address, uintptr_t instruction, int lane) {
    if (2 * used_ >= table_.size()) {
      grow();
    }
    Entry& entry = find(address, instruction);
    const uint32_t bit = 1u << lane;
    if (entry.generation != generation_) {
      entry = {address, instruction, generation_, bit};
      ++used_;
      return true;
    }
    const bool again = entry.lanes & bit;
    entry.lanes = again ? bit : entry.lanes | bit;
    return again;
  }

 private:
  struct Entry {
    uintptr_t address, instruction;
    uint64_t generation;
    uint32_t lanes;
  };

  Entry& find(uintptr_t address, uintptr_t instruction) {
    const uint64_t hash = (address + 31 * instruction) * 0x9e3779b97f4a7c15ull;
    size_t i = hash >> 40 & (table_.size() - 1);
    while (table_[i].generation == generation_ &&
           (table_[i].address != address || table_[i].instruction != instruction)) {
      i = (i + 1) & (table_.size() - 1);
    }
    return table_[i];
  }

  void grow() {
    std::vector<Entry> old(table_.size() * 2);
    old.swap(table_);
    for (const Entry& entry : old) {
      if (entry.generation == generation_) {
        find(entry.address, entry.instruction) = entry;
      }
    }
  }

  std::vector<Entry> table_ = std::vector<Entry>(1 << 12);
  uint64_t generation_ = 1;
  size_t used_ = 0;
} broadcasts;

// Whether nothing orders another lane's touch and what the running lane does now.
bool races(const Touch& touch, Space space) {
  const int simd = index_of(self) / SIMD;
  if (touch.group != group || touch.lane == index_of(self) || touch.epoch != epochs[space]) {
    return false;
  }
  return touch.lane / SIMD != simd || touch.simd_epoch == simd_epochs[simd][space];
}

void watch(Shadow& shadow, Space space, bool write, bool initialised, const char* name,
           int64_t index) {
  const Touch& written = shadow.written;
  if (!write && !written.group && !initialised) {
    fail_access("uninitialised read", name, index);
  }
  if ((written.group && written.group != group) ||
      (write && shadow.read.group && shadow.read.group != group)) {
    fail_access("race between threadgroups", name, index);
  }
  if (races(written, space)) {
    fail_conflict(write ? "two lanes write without a barrier between"
                        : "read of another lane's write without a barrier between",
                  name, index, written.lane);
  }
  const int lane = index_of(self);
  const Touch now = {group, epochs[space], simd_epochs[lane / SIMD][space], lane};
  if (!write) {
    if (shadow.read.lane != lane) {
      shadow.read_before = shadow.read;
    }
    shadow.read = now;
    return;
  }
  for (const Touch& read : {shadow.read, shadow.read_before}) {
    if (races(read, space)) {
      fail_conflict("write over what another lane reads without a barrier between", name, index,
                    read.lane);
    }
  }
  shadow.written = now;
}

// The buffer that holds an address or lies nearest to it.
Buffer& nearest(char* address) {
  auto after = std::upper_bound(by_address.begin(), by_address.end(), address,
                                [](char* a, Buffer* b) { return a < b->data + b->first * b->width; });
  if (after == by_address.begin()) {
    return **after;
  }
  Buffer& before = **(after - 1);
  if (after == by_address.end() || address < before.data + before.last * before.width) {
    return before;
  }
  const auto to_end = address - (before.data + before.last * before.width);
  const auto to_start = (*after)->data + (*after)->first * (*after)->width - address;
  return to_end <= to_start ? before : **after;
}

int64_t element_of(const char* address, const char* data, int width) {
  const int64_t offset = address - data;
  return offset >= 0 ? offset / width : -((-offset + width - 1) / width);
}

void access_buffer(char* address, int size, bool write, uintptr_t instruction) {
  Buffer& buffer = nearest(address);
  const int64_t first = element_of(address, buffer.data, buffer.width);
  const int64_t last = element_of(address + size - 1, buffer.data, buffer.width);
  for (int64_t i = first; i <= last; ++i) {
    const bool inside = i >= buffer.first && i < buffer.last;
    if (!inside || (buffer.belongs && !buffer.belongs[i - buffer.first])) {
      fail_access(write ? "write out of bounds" : "read out of bounds", buffer.name, i);
    }
    if (write && !buffer.writable) {
      fail_access("write to an input", buffer.name, i);
    }
    if (buffer.writable) {
      watch(shadows[&buffer - launch->buffers][i], DEVICE, write, buffer.initialised, buffer.name,
            i);
    }
  }
  if (write) {
    buffer.bytes_written += size;
  } else if (broadcasts.is_new(reinterpret_cast<uintptr_t>(address), instruction,
                               index_of(self) % SIMD)) {
    buffer.bytes_read += size;
  }
}

void access_threadgroup(char* address, int size, bool write) {
  for (ThreadgroupArray& array : arrays) {
    const int64_t first = element_of(address, array.data, array.width);
    const int64_t last = element_of(address + size - 1, array.data, array.width);
    // Half of the gap between two arrays belongs to each.
    if (address >= array.data + array.count * array.width + THREADGROUP_BYTES / 2) {
      continue;
    }
    for (int64_t i = first; i <= last; ++i) {
      if (i < 0 || i >= array.count) {
        fail_access(write ? "write out of bounds" : "read out of bounds", array.name, i);
      }
      watch(array.shadow[i], THREADGROUP, write, false, array.name, i);
    }
    return;
  }
  fail_access("access outside threadgroup arrays", "threadgroup memory", address - pool);
}

constexpr int64_t POOL = 64 * THREADGROUP_BYTES;

// Whether an address lies in the kernel's own library (a table of constants).
bool in_image_of(void* address, void* instruction) {
  Dl_info data, code;
  return dladdr(address, &data) && dladdr(instruction, &code) && data.dli_fbase == code.dli_fbase;
}

void access(void* pointer, int size, bool write, void* instruction) {
  if (!self) {
    return;
  }
  char* address = static_cast<char*>(pointer);
  if (address >= launch->arena && address < launch->arena_end) {
    access_buffer(address, size, write, reinterpret_cast<uintptr_t>(instruction));
  } else if (address >= pool && address < pool + POOL) {
    access_threadgroup(address, size, write);
  } else {
    const char* own = stacks + STACK * index_of(self);
    const bool local = address >= own && address < own + STACK;
    if (!local && (write || !in_image_of(address, instruction))) {
      fail_access(write ? "write out of bounds" : "read out of bounds", "no buffer", 0);
    }
  }
}

// -- running --------------------------------------------------------------------------------------

void lane_main() {
  launch->entry(launch->arguments, &self->where);
  self->state = DONE;
  leave_for_good();
}

void pause(State state, int line) {
  self->state = state;
  self->line = line;
  switch_stack(&self->stack, scheduler);
}

const char* place(const Lane& lane) {
  static const char* const names[] = {"simd_sum", "simd_max", "simd_min",
                                      "simd_prefix_inclusive_sum", "simd_any", "simd_shuffle",
                                      "simd_shuffle_xor", "simd_shuffle_down", "simd_shuffle_up"};
  switch (lane.state) {
    case DONE:
      return "its end";
    case AT_BARRIER:
      return "threadgroup_barrier";
    case AT_SIMD_BARRIER:
      return "simdgroup_barrier";
    default:
      return names[lane.op];
  }
}

bool together(const Lane& a, const Lane& b) {
  if (a.state != b.state) {
    return false;
  }
  switch (a.state) {
    case DONE:
      return true;
    case AT_SIMD:
      return a.line == b.line && a.op == b.op;
    default:
      return a.line == b.line && a.flags == b.flags;
  }
}

void report_divergence(const Lane& a, const Lane& b) {
  const uint3 at = a.where.threadgroup_position_in_grid;
  report("%s: lane %d is at %s (line %d), lane %d at %s (line %d), threadgroup (%u, %u, %u)",
         a.state == AT_BARRIER || b.state == AT_BARRIER ? "barrier divergence"
                                                        : "simdgroup divergence",
         index_of(&a), place(a), a.line, index_of(&b), place(b), b.line, at.x, at.y, at.z);
}

template <typename T>
uint32_t reduced(const Lane* lane, int count, int op) {
  T result = __builtin_bit_cast(T, lane[0].bits);
  for (int i = 1; i < count; ++i) {
    const T x = __builtin_bit_cast(T, lane[i].bits);
    result = op == HOST_MAX ? metal::max(result, x)
             : op == HOST_MIN ? metal::min(result, x) : T(result + x);
  }
  return __builtin_bit_cast(uint32_t, result);
}

uint32_t reduced(const Lane* lane, int count, int op, int type) {
  return type == HOST_FLOAT ? reduced<float>(lane, count, op)
         : type == HOST_INT ? reduced<int>(lane, count, op) : reduced<uint>(lane, count, op);
}

// Gives every lane of a simdgroup the result of the operation that all have arrived at.
void resolve(Lane* lane, int count) {
  const int op = lane->op, type = lane->type;
  uint32_t results[SIMD];
  if (op == HOST_SUM || op == HOST_MAX || op == HOST_MIN) {
    ++launch->simd_reductions;
    std::fill(results, results + count, reduced(lane, count, op, type));
  } else if (op == HOST_PREFIX_SUM) {
    ++launch->simd_reductions;
    for (int i = 0; i < count; ++i) {
      results[i] = reduced(lane, i + 1, HOST_SUM, type);
    }
  } else if (op == HOST_ANY) {
    const bool any = std::any_of(lane, lane + count, [](const Lane& l) { return l.bits != 0; });
    std::fill(results, results + count, any);
  } else {
    ++launch->simd_shuffles;
    for (int i = 0; i < count; ++i) {
      const int argument = int(lane[i].argument);
      int source = op == HOST_SHUFFLE ? argument
                   : op == HOST_SHUFFLE_XOR ? i ^ argument
                   : op == HOST_SHUFFLE_DOWN ? i + argument : i - argument;
      if (source < 0 || source >= count) {
        // Shuffling past the edge is defined nowhere as anything but the lane's own value.
        if (op == HOST_SHUFFLE || op == HOST_SHUFFLE_XOR) {
          report("shuffle from lane %d of %d (line %d)", source, count, lane[i].line);
          return;
        }
        source = i;
      }
      results[i] = lane[source].bits;
    }
  }
  for (int i = 0; i < count; ++i) {
    lane[i].bits = results[i];
    lane[i].state = READY;
  }
}

// Runs a simdgroup until its lanes have ended or wait at a threadgroup barrier.
void run_simdgroup(int first, int count) {
  while (!failed) {
    broadcasts.clear();
    for (int i = first; i < first + count && !failed; ++i) {
      if (lanes[i].state == READY) {
        self = &lanes[i];
        switch_stack(&scheduler, self->stack);
        self = nullptr;
      }
    }
    if (failed) {
      return;
    }
    const Lane& leader = lanes[first];
    for (int i = first + 1; i < first + count; ++i) {
      if (!together(leader, lanes[i])) {
        return report_divergence(leader, lanes[i]);
      }
    }
    if (leader.state == AT_SIMD) {
      resolve(&lanes[first], count);
    } else if (leader.state == AT_SIMD_BARRIER) {
      for (int space : {DEVICE, THREADGROUP}) {
        simd_epochs[first / SIMD][space] += (leader.flags >> (space == THREADGROUP) & 1);
      }
      for (int i = first; i < first + count; ++i) {
        lanes[i].state = READY;
      }
    } else {
      return;
    }
  }
}

void run_threadgroup(uint3 at, uint3 groups) {
  const uint32_t *grid = launch->grid, *full = launch->threads;
  const uint3 size = {std::min(full[0], grid[0] - at.x * full[0]),
                      std::min(full[1], grid[1] - at.y * full[1]),
                      std::min(full[2], grid[2] - at.z * full[2])};
  const int count = int(size.x * size.y * size.z);
  ++group;
  arrays.clear();
  pool_used = 0;
  lanes.assign(count, Lane());
  for (int i = 0; i < count; ++i) {
    HostAttributes& where = lanes[i].where;
    const uint3 inside = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
    where.thread_position_in_threadgroup = inside;
    where.thread_position_in_grid = {at.x * full[0] + inside.x, at.y * full[1] + inside.y,
                                     at.z * full[2] + inside.z};
    where.threadgroup_position_in_grid = at;
    where.threadgroups_per_grid = groups;
    where.threads_per_grid = where.grid_size = {grid[0], grid[1], grid[2]};
    where.threads_per_threadgroup = size;
    where.dispatch_threads_per_threadgroup = {full[0], full[1], full[2]};
    where.thread_index_in_threadgroup = i;
    where.thread_index_in_simdgroup = i % SIMD;
    where.simdgroup_index_in_threadgroup = i / SIMD;
    where.simdgroups_per_threadgroup = (count + SIMD - 1) / SIMD;
    where.dispatch_simdgroups_per_threadgroup = (full[0] * full[1] * full[2] + SIMD - 1) / SIMD;
    where.threads_per_simdgroup = where.thread_execution_width = SIMD;
    lanes[i].stack = fresh_stack(stacks + STACK * i, STACK, lane_main);
  }
  while (!failed) {
    for (int first = 0; first < count && !failed; first += SIMD) {
      run_simdgroup(first, std::min(SIMD, count - first));
    }
    if (failed) {
      return;
    }
    for (int first = SIMD; first < count; first += SIMD) {
      if (!together(lanes[0], lanes[first])) {
        return report_divergence(lanes[0], lanes[first]);
      }
    }
    if (lanes[0].state == DONE) {
      return;
    }
    ++launch->barriers;
    epochs[DEVICE] += lanes[0].flags & 1;
    epochs[THREADGROUP] += lanes[0].flags >> 1 & 1;
    for (Lane& lane : lanes) {
      lane.state = READY;
    }
  }
}

void find_unwritten() {
  for (int64_t b = 0; b < launch->buffer_count && !failed; ++b) {
    const Buffer& buffer = launch->buffers[b];
    for (size_t i = 0; buffer.writable && !buffer.initialised && i < shadows[b].size(); ++i) {
      if (!shadows[b][i].written.group) {
        report("output element never written: %s[%zu]", buffer.name, i);
        break;
      }
    }
  }
}

void* mapped(size_t size) {
  return mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

}  // namespace

// -- what kernels call ----------------------------------------------------------------------------

extern "C" {

void* host_threadgroup_array(const char* name, int width, int64_t count) {
  const size_t nth = self->arrays++;
  if (nth == arrays.size()) {
    int64_t bytes = width * count;
    for (const ThreadgroupArray& array : arrays) {
      bytes += array.width * array.count;
    }
    if (bytes > THREADGROUP_BYTES) {
      fail_access("more than 32 KB of threadgroup memory", name, count);
    }
    if (pool_used + 3 * THREADGROUP_BYTES > POOL) {
      fail_access("too many threadgroup arrays", name, count);
    }
    // A gap before each array, so that an index out of bounds lands in no other.
    char* data = pool + pool_used + THREADGROUP_BYTES;
    memset(data, 0xff, width * count);
    pool_used += THREADGROUP_BYTES + (width * count + 15) / 16 * 16;
    arrays.push_back({name, data, count, width, std::vector<Shadow>(count)});
  }
  return arrays[nth].data;
}

uint32_t host_simd(int op, int type, uint32_t bits, uint32_t argument, int line) {
  Lane& lane = *self;
  lane.op = op;
  lane.type = type;
  lane.bits = bits;
  lane.argument = argument;
  pause(AT_SIMD, line);
  return lane.bits;
}

void host_barrier(int whole_threadgroup, int flags, int line) {
  self->flags = flags;
  pause(whole_threadgroup ? AT_BARRIER : AT_SIMD_BARRIER, line);
}

// Runs a launch; 0, or 1 with a message.
int host_run(Launch* given) {
  launch = given;
  failed = false;
  group = 0;
  self = nullptr;
  if (!stacks) {
    stacks = static_cast<char*>(mapped(STACK * MOST_LANES));
    pool = static_cast<char*>(mapped(POOL));
  }
  by_address.clear();
  shadows.assign(launch->buffer_count, {});
  for (int64_t b = 0; b < launch->buffer_count; ++b) {
    Buffer& buffer = launch->buffers[b];
    by_address.push_back(&buffer);
    if (buffer.writable) {
      shadows[b].resize(buffer.last);
    }
  }
  std::sort(by_address.begin(), by_address.end(),
            [](const Buffer* a, const Buffer* b) { return a->data < b->data; });
  const uint32_t *grid = launch->grid, *threads = launch->threads;
  const uint3 groups = {(grid[0] + threads[0] - 1) / threads[0],
                        (grid[1] + threads[1] - 1) / threads[1],
                        (grid[2] + threads[2] - 1) / threads[2]};
  for (uint z = 0; z < groups.z && !failed; ++z) {
    for (uint y = 0; y < groups.y && !failed; ++y) {
      for (uint x = 0; x < groups.x && !failed; ++x) {
        run_threadgroup({x, y, z}, groups);
      }
    }
  }
  if (!failed) {
    find_unwritten();
  }
  self = nullptr;
  return failed;
}

// -- the calls of -fsanitize=thread ---------------------------------------------------------------

#define ACCESSES(size)                                                                     \
  void __tsan_read##size(void* p) { access(p, size, false, __builtin_return_address(0)); } \
  void __tsan_write##size(void* p) { access(p, size, true, __builtin_return_address(0)); } \
  void __tsan_unaligned_read##size(void* p) {                                              \
    access(p, size, false, __builtin_return_address(0));                                   \
  }                                                                                        \
  void __tsan_unaligned_write##size(void* p) {                                             \
    access(p, size, true, __builtin_return_address(0));                                    \
  }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

void __tsan_read_range(void* p, long size) {
  access(p, int(size), false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, long size) {
  access(p, int(size), true, __builtin_return_address(0));
}
void* __tsan_memcpy(void* to, const void* from, size_t size) {
  access(const_cast<void*>(from), int(size), false, __builtin_return_address(0));
  access(to, int(size), true, __builtin_return_address(0));
  return memcpy(to, from, size);
}
void* __tsan_memmove(void* to, const void* from, size_t size) {
  access(const_cast<void*>(from), int(size), false, __builtin_return_address(0));
  access(to, int(size), true, __builtin_return_address(0));
  return memmove(to, from, size);
}
void* __tsan_memset(void* to, int value, size_t size) {
  access(to, int(size), true, __builtin_return_address(0));
  return memset(to, value, size);
}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

}  // extern "C"

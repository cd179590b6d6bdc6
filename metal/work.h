// What a threadgroup works on: some slots of one KV head, as the launch's table says.
//
// A head owns `length` slots of a buffer. Equal heads are a dimension of it ([B, Hk, N, D]); heads
// of different lengths share one ([B, S, D] read as [B, 1, S, D]: memory_head is 0, and start says
// where the head begins). What is written per slot lies head after head without gaps, so `prefix`
// counts the slots of the heads before this one; for equal heads that is [B, Hk, N] again.

namespace h2o {

// The launch's integers: a few of the whole launch, then a table with a line per item of work.
struct Launch {
  int queries, slots, mask_columns, kv_heads, items;
};

struct Work {
  int head, memory_head, start, length, prefix;
  int offset, count;  // this threadgroup's part of the head: slots offset to offset + count - 1
};

#define LAUNCH_INTS 8
#define WORK_INTS 8

inline Launch launch_of(const device int* params) {
  return {params[0], params[1], params[2], params[3], params[4]};
}

inline Work work_of(const device int* params, int item) {
  const device int* line = params + LAUNCH_INTS + item * WORK_INTS;
  return {line[0], line[1], line[2], line[3], line[4], line[5], line[6]};
}

// The items of a head are its blocks in order; after the table stands where each head's begin.
struct BlockRange {
  int first, count;
};

inline BlockRange block_range(const device int* params, int head) {
  const device int* firsts = params + LAUNCH_INTS + launch_of(params).items * WORK_INTS;
  return {firsts[head], firsts[head + 1] - firsts[head]};
}

}  // namespace h2o

// A decode step as the host plans it: integers of the layer, then a line per KV head. The slots of
// all heads lie in one flat buffer [B, S, ...].
//
// What a step changes per slot (a row, its position, its scores) it writes in place, into inputs,
// since MLX gives kernels fresh outputs only. README.md says what keeps that in order.

namespace h2o {

#define IN_PLACE(type, buffer) ((device type*)(buffer))

// Of a squared length: keeps the logarithm of a zero vector finite (python/mlx_h2o/slots/packed.py).
#define LEAST_SQUARE 1e-12f

struct DecodeStep {
  int offset;          // the next logical position; the new token's is one less
  int buffer_slots;    // S
  int attended_slots;  // of all heads, at this step
  int kv_heads, evict_every, sink;
  int aged_from;  // the position from which ages count
};

struct HeadPlan {
  int start, length, prefix;  // slots in the buffer; attended slots of the heads before
  int recent;                 // last positions that are protected
  int victim;                 // which of its victims makes room, or -1: the next unused slot does
  bool choose;                // name the next victims
};

#define STEP_INTS 8

inline DecodeStep decode_step_of(const device int* plan) {
  return {plan[0], plan[1], plan[2], plan[3], plan[4], plan[5], plan[6]};
}

inline HeadPlan head_plan_of(const device int* plan, int head) {
  const device int* line = plan + STEP_INTS * (1 + head);
  return {line[0], line[1], line[2], line[3], line[4], line[5] != 0};
}

}  // namespace h2o

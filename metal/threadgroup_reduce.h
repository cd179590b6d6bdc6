// Reductions over a threadgroup of SIMDS simdgroups, whose result every lane gets. Each begins with
// a barrier, so that scratch memory can be used again and again.

namespace h2o {

template <int SIMDS>
inline float sum_of_threadgroup(float x, threadgroup float* scratch, int simd, int lane) {
  x = simd_sum(x);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) {
    scratch[simd] = x;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < SIMDS ? scratch[lane] : 0.0f);
}

// A slot with its rank. The lowest rank goes first, ties to the oldest position; positions differ,
// so the order is strict.
struct Candidate {
  float rank;
  int position, slot;
};

#define LARGEST_INT 0x7fffffff
#define LARGEST_FLOAT 3.40282347e38f

inline bool before(Candidate a, Candidate b) {
  return a.rank < b.rank || (a.rank == b.rank && a.position < b.position);
}

inline Candidate first_of_simdgroup(Candidate own) {
  const float rank = simd_min(own.rank);
  const int position = simd_min(own.rank == rank ? own.position : LARGEST_INT);
  const bool found = own.rank == rank && own.position == position;
  return {rank, position, simd_min(found ? own.slot : LARGEST_INT)};
}

template <int SIMDS>
inline Candidate first_of_threadgroup(
    Candidate own, threadgroup float* ranks, threadgroup int* places, int simd, int lane) {
  own = first_of_simdgroup(own);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) {
    ranks[simd] = own.rank;
    places[2 * simd] = own.position;
    places[2 * simd + 1] = own.slot;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Candidate theirs = {INFINITY, LARGEST_INT, LARGEST_INT};
  if (lane < SIMDS) {
    theirs = {ranks[lane], places[2 * lane], places[2 * lane + 1]};
  }
  return first_of_simdgroup(theirs);
}

}  // namespace h2o

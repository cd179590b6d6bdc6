// Checks one instruction set's attention kernel against sums in double precision, without MLX or
// Python, so that it also runs on another architecture under emulation (see check_arm64.sh). With
// an argument it measures their speed instead. It is built by hand, after `make test-sanitize` or
// any other build:
//
//     g++ -std=c++20 -O2 -Ic_api/src/cpu tools/kernel_check.cpp BUILD/libmlx_h2o_cpu.a -o kernel_check
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/kernels.h"

using namespace mlx_h2o;

namespace {

std::mt19937 generator(0);

std::vector<float> normal(size_t count) {
  std::normal_distribution<float> draw;
  std::vector<float> x(count);
  for (float& value : x) value = draw(generator);
  return x;
}

// How rows are stored.
struct Kind {
  const char* name;
  Dtype dtype;
  int bits = 0;  // 0: dense
};
constexpr Kind kKinds[] = {
    {"float32", Dtype::float32},
    {"float16", Dtype::float16},
    {"bfloat16", Dtype::bfloat16},
    {"8 bits", Dtype::bfloat16, 8},
    {"4 bits", Dtype::bfloat16, 4}};
constexpr int kGroup = 64;

// Rows of a kind, and their values as floats.
struct Matrix {
  std::vector<char> data, scales, biases;
  std::vector<float> value;
  Rows rows;

  Matrix(int count, int width, const Kind& kind) {
    const std::vector<float> x = normal(size_t(count) * width);
    const Dtype dtype = kind.dtype;
    if (const int bits = kind.bits) {
      const int groups = width / kGroup;
      data.resize(x.size() * bits / 8);
      scales.resize(size_t(count) * groups * size_of(dtype));
      biases.resize(scales.size());
      value.resize(x.size());
      rows = {data.data(), width * bits / 32, dtype,         bits,
              kGroup,      scales.data(),     biases.data(), groups};
      for (int i = 0; i < count; ++i) {
        const int64_t part = int64_t(i) * groups * size_of(dtype);
        kernels().quantize(
            x.data() + i * width, width,
            {data.data() + int64_t(i) * width * bits / 8, scales.data() + part,
             biases.data() + part, dtype, bits, kGroup});
        kernels().read_row(value.data() + i * width, rows, i, width);
      }
      return;
    }
    data.resize(x.size() * (dtype == Dtype::float32 ? 4 : 2));
    value.resize(x.size());
    kernels().narrow(data.data(), dtype, x.data(), 1, int(x.size()));
    kernels().widen(value.data(), data.data(), dtype, 1, int(x.size()));
    rows = {data.data(), width, dtype};
  }
};

// The largest error of logits, outputs and distances on one block.
double check(int rows, int slots, int D, int Dv, const Kind& kind) {
  const Matrix k(slots, D, kind), v(slots, Dv, kind);
  const std::vector<float> plain = normal(size_t(rows) * D), center = normal(D);
  std::vector<float> q(size_t(rows) * padded(D)), logits(size_t(rows) * slots), m(rows), l(rows),
      acc(size_t(rows) * padded(Dv)), distance(slots), scratch(scratch_floats(D, Dv));
  for (int r = 0; r < rows; ++r)
    for (int d = 0; d < D; ++d) q[r * padded(D) + d] = plain[r * D + d] / std::sqrt(float(D));
  AttentionBlock b{};
  b.rows = rows, b.slots = slots, b.D = D, b.Dv = Dv;
  b.q = q.data(), b.q_stride = padded(D);
  b.k = k.rows, b.v = v.rows;
  b.logits = logits.data(), b.logits_stride = slots;
  b.center = center.data(), b.distance = distance.data();
  b.m = m.data(), b.l = l.data(), b.acc = acc.data(), b.acc_stride = padded(Dv);
  b.scratch = scratch.data();
  kernels().attend(b);

  double worst = 0;
  const auto see = [&](double got, double expected) {
    worst = std::fmax(worst, std::fabs(got - expected) / std::fmax(1.0, std::fabs(expected)));
    if (std::isnan(got)) worst = INFINITY;
  };
  for (int r = 0; r < rows; ++r) {
    double norm = 0;
    std::vector<double> out(Dv);
    for (int n = 0; n < slots; ++n) {
      double s = 0, apart = 0;
      for (int d = 0; d < D; ++d) {
        s += double(q[r * padded(D) + d]) * k.value[n * D + d];
        apart += std::pow(double(k.value[n * D + d]) - center[d], 2);
      }
      see(logits[r * slots + n], s);
      see(distance[n], apart);
      norm += std::exp(s);
      for (int d = 0; d < Dv; ++d) out[d] += std::exp(s) * v.value[n * Dv + d];
    }
    for (int d = 0; d < Dv; ++d) see(acc[r * padded(Dv) + d] / l[r], out[d] / norm);
  }
  return worst;
}

// Billions of multiply-adds a second on one core, keys and values in its cache.
double speed(int rows, const Kind& kind) {
  constexpr int D = 128, slots = 256;
  const Matrix k(slots, D, kind), v(slots, D, kind);
  const std::vector<float> q = normal(size_t(rows) * D);
  std::vector<float> m(rows), l(rows), acc(size_t(rows) * D), scratch(scratch_floats(D, D));
  AttentionBlock b{};
  b.rows = rows, b.slots = slots, b.D = D, b.Dv = D;
  b.q = q.data(), b.q_stride = D;
  b.k = k.rows, b.v = v.rows;
  b.m = m.data(), b.l = l.data(), b.acc = acc.data(), b.acc_stride = D;
  b.scratch = scratch.data();
  double best = INFINITY;
  for (int round = 0; round < 500; ++round) {
    const auto start = std::chrono::steady_clock::now();
    kernels().attend(b);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    best = std::fmin(best, took.count());
  }
  return 2.0 * rows * slots * D / best / 1e9;
}

}  // namespace

int main(int count, char**) {
  if (count > 1) {  // any argument
    for (int rows : {1, 4, 32})
      for (const Kind& kind : kKinds)
        std::printf(
            "%s, %d query rows, %s: %.1f G multiply-adds a second\n", kernels().name, rows,
            kind.name, speed(rows, kind));
    return 0;
  }
  double worst = 0;
  int checked = 0;
  for (const Kind& kind : kKinds)
    for (int rows : {1, 2, 3, 4, 5, 8, 31})
      for (int slots : {1, 7, 31, 32, 33, 100})
        for (auto [D, Dv] : {std::pair{64, 64}, {128, 128}, {80, 96}, {33, 7}, {576, 512}}) {
          if (kind.bits && (D % kGroup || Dv % kGroup)) continue;
          worst = std::fmax(worst, check(rows, slots, D, Dv, kind));
          ++checked;
        }
  std::printf("%s: %d blocks, largest error %.2g\n", kernels().name, checked, worst);
  return worst < 2e-5 ? 0 : 1;
}

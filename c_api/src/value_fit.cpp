#include "value_fit.h"

#include <algorithm>

#include "evaluation.h"

namespace mlx_h2o {

namespace {

// The weight of a value as it was, relative to the mean diagonal of P'P. Of 1e-1 to 1e-6, smaller
// ones diverged less on held-out text, and the last three alike (docs/results/experiments.md).
constexpr double kRidge = 1e-5;
// Queries whose weights over all rows are computed at once: these take less memory than the rows.
constexpr int kBlock = 128;

// Doubles, row by row.
struct Matrix {
  int rows, columns;
  std::vector<double> numbers;

  Matrix(int rows, int columns) : rows(rows), columns(columns), numbers(size_t(rows) * columns) {}
  // Of an evaluated array [rows, columns].
  explicit Matrix(const mx::array& of)
      : rows(of.shape(0)),
        columns(of.shape(1)),
        numbers(of.data<float>(), of.data<float>() + of.size()) {}

  double* operator[](int row) {
    return numbers.data() + size_t(row) * columns;
  }
  const double* operator[](int row) const {
    return numbers.data() + size_t(row) * columns;
  }
};

// to += factor * row, of the columns from `first` on.
void add(double* to, double factor, const double* row, int first, int columns) {
  for (int i = first; i < columns; ++i) to[i] += factor * row[i];
}

// Solves matrix * x = right, of which the upper triangle is given, by Cholesky's method. Both are
// overwritten.
void solve(Matrix& matrix, Matrix& right) {
  const int n = matrix.rows, width = right.columns;
  for (int j = 0; j < n; ++j) {
    double* const row = matrix[j];
    const double pivot = std::sqrt(row[j]);
    for (int i = j; i < n; ++i) row[i] /= pivot;
    for (int i = j + 1; i < n; ++i) add(matrix[i], -row[i], row, i, n);
  }
  const auto divide = [&](int j) {
    for (int d = 0; d < width; ++d) right[j][d] /= matrix[j][j];
  };
  for (int j = 0; j < n; ++j) {
    divide(j);
    for (int i = j + 1; i < n; ++i) add(right[i], -matrix[j][i], right[j], 0, width);
  }
  for (int j = n - 1; j >= 0; --j) {
    for (int i = j + 1; i < n; ++i) add(right[j], -matrix[j][i], right[i], 0, width);
    divide(j);
  }
}

// Values [S, Dv] whose weighted sums are nearest to what is wanted, drawn towards a start.
std::vector<float> least_squares(
    const Matrix& weights, Matrix targets, const Matrix& start, const double* anchors) {
  const int S = weights.columns, width = targets.columns;
  Matrix gram(S, S), moved(S, width);
  for (int q = 0; q < weights.rows; ++q) {
    const double* const row = weights[q];
    for (int j = 0; j < S; ++j) add(targets[q], -row[j], start[j], 0, width);
    for (int j = 0; j < S; ++j) {
      add(gram[j], row[j], row, j, S);
      add(moved[j], row[j], targets[q], 0, width);
    }
  }
  double trace = 0;
  for (int j = 0; j < S; ++j) trace += gram[j][j];
  // Rows that no query looks at stay as they are, since even then the matrix has an inverse.
  const double drawn = kRidge * trace / S + std::numeric_limits<double>::min();
  for (int j = 0; j < S; ++j) gram[j][j] += drawn + anchors[j];
  solve(gram, moved);
  std::vector<float> values(moved.numbers.size());
  for (size_t i = 0; i < values.size(); ++i) values[i] = start.numbers[i] + moved.numbers[i];
  return values;
}

std::vector<Fields> heads_of_run(BoundedLayer& layer, const Run& run) {
  const Fields rows = layer.store().views(run);
  std::vector<Fields> heads;
  for (int i = 0; i < run.heads(); ++i) heads.push_back(heads_of(rows, i, i + 1));
  return heads;
}

// One head of one sequence, [rows, ...], of an array [B, H, rows, ...].
mx::array one_of(const mx::array& all, int sequence, int head) {
  return mx::squeeze(
      mx::squeeze(part(part(all, 0, sequence, sequence + 1), 1, head, head + 1), 0), 0);
}

// What some queries attend to: rows and the remainder.
struct Sight {
  mx::array keys, values;       // [B, 1, N, width], of one head
  mx::array rest_logits, rest;  // [B, H, n, 1] and [B, H, 1, Dv]

  int rows() const {
    return keys.shape(2);
  }
  // Weights [m, N + 1] of the queries [m, D] from `first` on, of one head of one sequence; the
  // remainder's last.
  mx::array weights(const mx::array& queries, int first, int sequence, int head) const {
    const mx::array own = mx::swapaxes(one_of(keys, sequence, 0), 0, 1);
    const mx::array last =
        part(one_of(rest_logits, sequence, head), 0, first, first + queries.shape(0));
    const mx::array logits = mx::concatenate({mx::matmul(queries, own), last}, 1);
    return softmax_weights(logits, mx::logsumexp(logits, 1));
  }
  mx::array rest_value(int sequence, int head) const {
    return one_of(rest, sequence, head);
  }
};

Sight sight_of(
    BoundedLayer& layer, const Fields& fields, const std::optional<Remainder>& remainder,
    const AttentionCall& call) {
  const CacheSettings& settings = layer.settings;
  const int B = call.q.shape(0), H = settings.heads();
  const int n = call.q.shape(1) / H * call.length();
  mx::array logits = mx::full({B, H, n, 1}, number(-kInfinity));
  mx::array values = mx::zeros({B, H, 1, layer.types.value_width});
  if (remainder) {
    logits = mx::reshape(remainder->column(call.q, call.scale, settings.saturations), {B, H, n, 1});
    values = mx::expand_dims(remainder->mean_value, 2);
  }
  return {
      f32(dense(settings.packing.rows("keys", fields))),
      f32(dense(settings.packing.rows("values", fields))), logits, values};
}

}  // namespace

AllRows AllRows::of(BoundedLayer& layer) {
  AllRows all;
  bool lost = false;
  for (const Run& run : layer.runs()) {
    for (Fields& head : heads_of_run(layer, run)) all.heads.push_back(std::move(head));
    lost = lost || layer.lost(run);
  }
  if (layer.settings.remainder && lost) all.remainder = layer.evictions().remainder;
  return all;
}

void fit_values(
    BoundedLayer& layer, const AllRows& before, AttentionCall call,
    const std::vector<std::vector<double>>& anchors) {
  const CacheSettings& settings = layer.settings;
  // A query's logits all move alike in a frame, so weights stay.
  if (settings.frame) call.q = enter_queries(*settings.frame, call.q);
  std::optional<Remainder> after;
  if (settings.remainder) after = layer.evictions().remainder;
  const int B = call.q.shape(0), D = call.q.shape(3), width = layer.types.value_width;
  const mx::array scaled =
      mx::reshape(f32(call.q) * number(call.scale), {B, settings.heads(), -1, D});
  std::vector<mx::array> fitted;
  for (const Run& run : layer.runs()) {
    const std::vector<Fields> heads = heads_of_run(layer, run);
    std::vector<mx::array> of_run;
    for (int head = run.first; head < run.last; ++head) {
      const Sight whole = sight_of(layer, before.heads[head], before.remainder, call);
      const Sight own = sight_of(layer, heads[head - run.first], after, call);
      const int S = own.rows();
      std::vector<float> values;
      for (int b = 0; b < B; ++b) {
        const mx::array queries = one_of(scaled, b, head);
        std::vector<mx::array> weights, targets;
        for (int first = 0; first < queries.shape(0); first += kBlock) {
          const int last = std::min(first + kBlock, queries.shape(0));
          const mx::array some = part(queries, 0, first, last);
          const mx::array of_all = whole.weights(some, first, b, head);
          const mx::array of_kept = own.weights(some, first, b, head);
          const mx::array all_values =
              mx::concatenate({one_of(whole.values, b, 0), whole.rest_value(b, head)}, 0);
          weights.push_back(part(of_kept, 1, 0, S));
          targets.push_back(
              mx::matmul(of_all, all_values) -
              part(of_kept, 1, S, S + 1) * own.rest_value(b, head));
        }
        const std::vector<mx::array> numbers{
            mx::contiguous(join_along(std::move(weights), 0)),
            mx::contiguous(join_along(std::move(targets), 0)),
            mx::contiguous(one_of(own.values, b, 0))};
        evaluate(numbers);
        const std::vector<float> of_sequence = least_squares(
            Matrix(numbers[0]), Matrix(numbers[1]), Matrix(numbers[2]),
            anchors[head].data() + size_t(b) * S);
        values.insert(values.end(), of_sequence.begin(), of_sequence.end());
      }
      of_run.push_back(mx::array(values.begin(), {B, 1, S, width}, mx::float32));
    }
    fitted.push_back(join_along(std::move(of_run), 1));
  }
  layer.write_values(fitted);
}

}  // namespace mlx_h2o

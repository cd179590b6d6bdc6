import MLX

/// The remainder: what stays of all evicted tokens of H KV heads, and how it goes on answering.
///
/// Evicting a row folds it into its head's count, mean key, per-dimension key variance and mean
/// value (Welford; merging by Chan et al. 1979). A query then meets one more softmax column,
///
///     x = 1/2 scale^2 sum_d q_d^2 var_d
///     r = log n + scale q.mean_k + x / sqrt(1 + x / t)                 value: mean_v
///
/// t is a matter of the head: heads whose keys lie in few clusters are better off without the second
/// order, which t = 0 leaves out.
///
/// All arrays are float32.
public struct Remainder {
    /// Where the second-order term turns from x to sqrt(t x), unless a head is told otherwise. Fitted
    /// on full-cache runs.
    public static let saturation: Float = 4

    // Keep x finite whatever the queries and keys, so that r never becomes a NaN.
    private static let largestQuery: Float = 1e15
    private static let largestTerm: Float = 1e30

    /// Rows folded in, `[B, H]`; one by one it stops at 2^24, where log n hardly moves.
    public var count: MLXArray
    /// `[B, H, D]`.
    public var meanKey: MLXArray
    /// Per-dimension (population) variance of the keys, `[B, H, D]`.
    public var varKey: MLXArray
    /// `[B, H, Dv]`.
    public var meanValue: MLXArray

    /// The statistics as they are.
    public init(count: MLXArray, meanKey: MLXArray, varKey: MLXArray, meanValue: MLXArray) {
        self.count = count
        self.meanKey = meanKey
        self.varKey = varKey
        self.meanValue = meanValue
    }

    /// A remainder that nothing was folded into yet; it answers no query.
    public init(batch: Int, heads: Int, keyWidth: Int, valueWidth: Int) {
        count = MLXArray.zeros([batch, heads], dtype: .float32)
        meanKey = MLXArray.zeros([batch, heads, keyWidth], dtype: .float32)
        varKey = MLXArray.zeros([batch, heads, keyWidth], dtype: .float32)
        meanValue = MLXArray.zeros([batch, heads, valueWidth], dtype: .float32)
    }

    /// Bytes that one KV head's remainder takes: 2 D + Dv + 1 float32.
    public static func bytesPerHead(keyWidth: Int, valueWidth: Int) -> Int {
        4 * (2 * keyWidth + valueWidth + 1)
    }

    static let names = ["count", "mean_key", "var_key", "mean_value"]

    /// In the order of ``names``.
    var arrays: [MLXArray] { [count, meanKey, varKey, meanValue] }

    init(_ arrays: [MLXArray]) {
        self.init(count: arrays[0], meanKey: arrays[1], varKey: arrays[2], meanValue: arrays[3])
    }

    /// The remainder of some heads.
    func heads(_ range: Range<Int>) -> Remainder {
        Remainder(arrays.map { $0.sliced(range, axis: 1) })
    }

    /// This remainder with some heads' statistics replaced, from head `first` on.
    func withHeads(_ first: Int, _ part: Remainder) -> Remainder {
        let last = first + part.count.dim(1)
        return Remainder(
            zip(arrays, part.arrays).map { whole, part in
                var pieces: [MLXArray] = []
                if first > 0 { pieces.append(whole.sliced(0 ..< first, axis: 1)) }
                pieces.append(part)
                if last < whole.dim(1) {
                    pieces.append(whole.sliced(last ..< whole.dim(1), axis: 1))
                }
                return joined(pieces, axis: 1)
            })
    }

    /// The remainder after the rows were added, in any order or grouping.
    ///
    /// - Parameters:
    ///   - keys: `[B, H, M, D]`.
    ///   - values: `[B, H, M, Dv]`.
    ///   - weights: How often each row counts, broadcastable to `[B, H, M]` (0 leaves it out).
    public func fold(keys: MLXArray, values: MLXArray, weights: MLXArray? = nil) -> Remainder {
        let keys = keys.float32, values = values.float32
        let each = broadcast(
            (weights ?? MLXArray.ones([1, 1, keys.dim(2)], dtype: .float32)).float32,
            to: Array(keys.shape[0 ..< 3]))
        let added = each.sum(axis: -1)
        // A weighted mean over the rows; 0 rows fold nothing in whatever this gives.
        let share = (each / maximum(added, Float(1e-30)).column).expandedDimensions(axis: -2)
        let mean = matmul(share, keys).squeezed(axis: 2)
        let apart = square(keys - mean.expandedDimensions(axis: 2))
        let variance = matmul(share, apart).squeezed(axis: 2)
        let value = matmul(share, values).squeezed(axis: 2)

        let total = count + added
        let part = (added / maximum(total, Float(1e-30))).column
        let step = mean - meanKey
        return Remainder(
            count: total,
            meanKey: meanKey + part * step,
            varKey: varKey + part * (variance - varKey) + part * (1 - part) * square(step),
            meanValue: meanValue + part * (value - meanValue))
    }

    /// The logit r `[B, Hq, L]` of the remainder's column, minus infinity while it is empty.
    ///
    /// - Parameters:
    ///   - queries: `[B, Hq, L, D]`.
    ///   - scale: As in the attention.
    ///   - saturation: t of the type's formula, at least 0.
    public func column(
        queries: MLXArray, scale: Float, saturation: Float = Remainder.saturation
    ) -> MLXArray {
        column(queries: queries, scale: scale, saturation: MLXArray([saturation]))
    }

    /// The same with the saturation of each head, `[H]` or `[1]` float32.
    func column(queries: MLXArray, scale: Float, saturation: MLXArray) -> MLXArray {
        let (B, Hq, L, D) = (queries.dim(0), queries.dim(1), queries.dim(2), queries.dim(3))
        let grouped = (queries.float32 * scale).reshaped([
            B, count.dim(1), Hq / count.dim(1) * L, D,
        ])
        let mean = matmul(grouped, meanKey.column)
        let clipped = minimum(
            maximum(grouped, -Remainder.largestQuery), Remainder.largestQuery)
        let x = minimum(
            matmul(square(clipped), (0.5 * varKey).column), Remainder.largestTerm)
        // x / sqrt(1 + x / t) in a form that 0 may go into; nothing at t = 0.
        let t = saturation.reshaped([-1, 1, 1])
        let second = x * sqrt(t / maximum(t + x, Float.leastNormalMagnitude))
        let term = (mean + second).squeezed(axis: -1)
        return (log(count).column + term).reshaped([B, Hq, L])
    }

    /// The remainder as ordinary rows, for attention that is not ours.
    ///
    /// Rows at mean +- sqrt(var) * signs with log(n / rows) added to their logits by the mask give
    /// the column's logit to second order, and saturate of themselves.
    ///
    /// - Parameter rows: R; 1 for the mean alone, else even.
    /// - Returns: Keys `[B, H, R, D]` and values `[B, H, R, Dv]`, float32.
    public func plainRows(_ rows: Int) -> (keys: MLXArray, values: MLXArray) {
        let signs = antitheticSigns(rows: rows, width: meanKey.dim(-1))
        let keys =
            meanKey.expandedDimensions(axis: 2) + sqrt(varKey).expandedDimensions(axis: 2) * signs
        let shape = meanValue.shape
        let values = broadcast(
            meanValue.expandedDimensions(axis: 2), to: [shape[0], shape[1], rows, shape[2]])
        return (keys, values)
    }
}

/// Fixed sign vectors `[rows, width]` in pairs s, -s; rows of a Hadamard matrix.
///
/// Entry d of pair j is (-1)^popcount((j + 1) & d), so that every language writes the same.
func antitheticSigns(rows: Int, width: Int) -> MLXArray {
    if rows == 1 { return MLXArray.zeros([1, width], dtype: .float32) }
    let half: [Float] = (0 ..< rows / 2).flatMap { pair in
        (0 ..< width).map { ((pair + 1) & $0).nonzeroBitCount.isMultiple(of: 2) ? 1 : -1 }
    }
    return MLXArray(half + half.map { -$0 }, [rows, width])
}

/// How many plain rows a head of `budget` slots can afford: 8 of 128 pays, 8 of 64 does not.
func plainRows(forBudget budget: Int) -> Int {
    max(1, min(8, budget / 16 / 2 * 2))
}

import MLX

/// What stays of all evicted tokens of H KV heads, and goes on answering.
///
/// Evicting a row folds it into its head's count, mean key, per-dimension key variance and mean
/// value. A query then meets one more softmax column,
///
///     x = 1/2 scale^2 sum_d q_d^2 var_d
///     r = log n + scale q.mean_k + x / sqrt(1 + x / t)                 value: mean_v
///
/// t is a matter of the head: heads whose keys lie in few clusters are better off without the second
/// order, which t = 0 leaves out.
///
/// All arrays are float32.
package struct H2ORemainder {
    /// Where the second-order term turns from x to sqrt(t x), unless a head is told otherwise. Fitted
    /// on full-cache runs.
    package static let saturation: Float = 4

    /// Rows folded in, `[B, H]`; one by one it stops at 2^24, where log n hardly moves.
    let count: MLXArray
    /// `[B, H, D]`.
    let meanKey: MLXArray
    /// Per-dimension (population) variance of the keys, `[B, H, D]`.
    let varKey: MLXArray
    /// `[B, H, Dv]`.
    let meanValue: MLXArray

    /// Bytes that one KV head's remainder takes: 2 D + Dv + 1 float32.
    static func bytesPerHead(keyWidth: Int, valueWidth: Int) -> Int {
        4 * (2 * keyWidth + valueWidth + 1)
    }

    static let names = ["count", "mean_key", "var_key", "mean_value"]

    /// In the order of ``names``.
    var arrays: [MLXArray] { [count, meanKey, varKey, meanValue] }

    init(_ arrays: [MLXArray]) {
        (count, meanKey, varKey, meanValue) = (arrays[0], arrays[1], arrays[2], arrays[3])
    }
}

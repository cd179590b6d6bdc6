import CMLXH2O
import MLX

/// Softmax attention, its logits and their log-sum-exp.
///
/// - Parameters:
///   - queries: `[B, Hq, L, D]`.
///   - keys: `[B, Hk, N, D]`; Hq is a multiple of Hk (GQA).
///   - values: `[B, Hk, N, Dv]`; Dv may differ from D.
///   - scale: Factor on q.k, usually `1 / sqrt(D)`.
///   - mask: None, causal (the last query sees all N keys), a boolean array (true is visible) or an
///     additive array, broadcastable to `[B, Hq, L, N]`.
///   - sinks: One logit per query head `[Hq]` of an extra softmax column without a value (gpt-oss).
/// - Returns: output `[B, Hq, L, Dv]` in the queries' dtype; scores `[B, Hq, L, N]` float32,
///   pre-softmax, minus infinity where masked; logSumExp `[B, Hq, L]` float32 over all columns, minus
///   infinity in rows that see nothing (whose output is zero).
/// - Throws: ``H2OError/configuration(_:)`` for operands that do not fit together.
public func scaledDotProductAttentionWithScores(
    queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float,
    mask: MLXFast.ScaledDotProductAttentionMaskMode = .none, sinks: MLXArray? = nil
) throws -> (output: MLXArray, scores: MLXArray, logSumExp: MLXArray) {
    try attended(mask, sinks) { output, scores, logSumExp, array, sinks, stream in
        mlx_h2o_attention_with_scores(
            output, scores, logSumExp, queries.ctx, keys.ctx, values.ctx, scale, mask.engineMode,
            array, sinks, stream)
    }
}

/// ``scaledDotProductAttentionWithScores(queries:keys:values:scale:mask:sinks:)`` of keys and values
/// as MLX's `quantized` packs them.
///
/// - Parameters:
///   - queries: `[B, Hq, L, D]`.
///   - quantizedKeys: Words `[B, Hk, N, D * keyBits / 32]` uint32, scales and biases
///     `[B, Hk, N, D / groupSize]`.
///   - quantizedValues: Words `[B, Hk, N, Dv * valueBits / 32]` uint32, scales and biases
///     `[B, Hk, N, Dv / groupSize]`.
///   - scale: Factor on q.k.
///   - mask: As for dense keys.
///   - sinks: As for dense keys.
///   - groupSize: 32, 64 or 128.
///   - keyBits: 2, 3, 4, 5, 6 or 8.
///   - valueBits: 2, 3, 4, 5, 6 or 8.
/// - Returns: As for dense keys.
/// - Throws: As for dense keys.
public func quantizedScaledDotProductAttentionWithScores(
    queries: MLXArray, quantizedKeys: (MLXArray, MLXArray, MLXArray),
    quantizedValues: (MLXArray, MLXArray, MLXArray), scale: Float,
    mask: MLXFast.ScaledDotProductAttentionMaskMode = .none, sinks: MLXArray? = nil,
    groupSize: Int = 64, keyBits: Int, valueBits: Int
) throws -> (output: MLXArray, scores: MLXArray, logSumExp: MLXArray) {
    try attended(mask, sinks) { output, scores, logSumExp, array, sinks, stream in
        mlx_h2o_attention_quantized_with_scores(
            output, scores, logSumExp, queries.ctx, quantizedKeys.0.ctx, quantizedKeys.1.ctx,
            quantizedKeys.2.ctx, quantizedValues.0.ctx, quantizedValues.1.ctx,
            quantizedValues.2.ctx, scale, Int32(clamping: keyBits), Int32(clamping: valueBits),
            Int32(clamping: groupSize), mask.engineMode, array, sinks, stream)
    }
}

private typealias Handle = UnsafeMutablePointer<mlx_array>

private func attended(
    _ mask: MLXFast.ScaledDotProductAttentionMaskMode, _ sinks: MLXArray?,
    _ call: (Handle, Handle, Handle, mlx_array, mlx_array, mlx_stream) -> Int32
) throws -> (output: MLXArray, scores: MLXArray, logSumExp: MLXArray) {
    _ = installedEvaluator  // kernels that prove themselves are evaluated
    var (output, scores, logSumExp) = (mlx_array_new(), mlx_array_new(), mlx_array_new())
    let array = mask.mask ?? .mlxNone, sinks = sinks ?? .mlxNone
    let stream = StreamOrDevice.default
    let status = withExtendedLifetime((array, sinks, stream)) {
        call(&output, &scores, &logSumExp, array.ctx, sinks.ctx, stream.ctx)
    }
    let arrays = (MLXArray(output), MLXArray(scores), MLXArray(logSumExp))
    try checkEngine(status)
    return arrays
}

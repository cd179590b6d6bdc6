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
public func scaledDotProductAttentionWithScores(
    queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float,
    mask: MLXFast.ScaledDotProductAttentionMaskMode = .none, sinks: MLXArray? = nil
) -> (output: MLXArray, scores: MLXArray, logSumExp: MLXArray) {
    let call = AttentionCall(
        queries: queries, keys: .plain(keys), values: .plain(values), scale: scale,
        mask: Mask(mask), sinks: sinks)
    call.check()
    return Backend.current.attentionWithScores(call)
}

/// ``scaledDotProductAttentionWithScores(queries:keys:values:scale:mask:sinks:)`` of keys and values
/// as MLX's `quantized` packs them.
///
/// - Parameters:
///   - queries: `[B, Hq, L, D]`.
///   - quantizedKeys: Words `[B, Hk, N, D * keyBits / 32]` uint32, scales and biases
///     `[B, Hk, N, D / groupSize]`.
///   - quantizedValues: Likewise, of width Dv and `valueBits`.
///   - scale: Factor on q.k.
///   - mask: As for dense keys.
///   - sinks: As for dense keys.
///   - groupSize: 32, 64 or 128.
///   - keyBits: 2, 3, 4, 5, 6 or 8.
///   - valueBits: Likewise.
/// - Returns: As for dense keys.
public func quantizedScaledDotProductAttentionWithScores(
    queries: MLXArray, quantizedKeys: (MLXArray, MLXArray, MLXArray),
    quantizedValues: (MLXArray, MLXArray, MLXArray), scale: Float,
    mask: MLXFast.ScaledDotProductAttentionMaskMode = .none, sinks: MLXArray? = nil,
    groupSize: Int = 64, keyBits: Int, valueBits: Int
) -> (output: MLXArray, scores: MLXArray, logSumExp: MLXArray) {
    func rows(_ packed: (MLXArray, MLXArray, MLXArray), _ bits: Int) -> Rows {
        .packed(
            PackedRows(
                words: packed.0, scales: packed.1, biases: packed.2, bits: bits,
                groupSize: groupSize))
    }
    let call = AttentionCall(
        queries: queries, keys: rows(quantizedKeys, keyBits),
        values: rows(quantizedValues, valueBits), scale: scale, mask: Mask(mask), sinks: sinks)
    call.check()
    return Backend.current.attentionWithScores(call)
}

/// The attention that each key received: sum over queries, mean over the G query heads of each KV
/// head, of exp(score - lse).
///
/// - Parameters:
///   - scores: Logits `[B, Hq, L, N]`, float32.
///   - logSumExp: `[B, Hq, L]`; one that covers more columns than `scores` shows (attention sinks,
///     the remainder) makes the mass smaller, as it should.
///   - heads: Hk.
/// - Returns: `[B, Hk, N]` float32. Over N it sums to L, less what other columns took.
public func attentionMass(scores: MLXArray, logSumExp: MLXArray, heads: Int) -> MLXArray {
    require(
        scores.ndim == 4 && logSumExp.shape == Array(scores.shape[0 ..< 3]),
        "scores must be [B, Hq, L, N] and logSumExp [B, Hq, L].")
    require(heads > 0 && scores.dim(1) % heads == 0, "Hq is no multiple of Hk.")
    return Reference.attentionMass(scores, logSumExp: logSumExp, heads: heads)
}

extension AttentionCall {
    /// Stop with a message unless the operands fit together.
    func check() {
        let (q, k, v) = (queries.shape, keys.shape, values.shape)
        require(
            q.count == 4 && k.count == 4 && v.count == 4,
            "queries, keys and values are [batch, heads, tokens, width]; got \(q), \(k), \(v).")
        require(
            Array(k[0 ..< 3]) == Array(v[0 ..< 3]) && q[0] == k[0] && q[3] == k[3],
            "queries \(q), keys \(k) and values \(v) do not fit together.")
        require(
            k[1] > 0 && q[1] % k[1] == 0,
            "\(q[1]) query heads are no multiple of \(k[1]) KV heads.")
        if case .causal = mask {
            require(k[2] >= q[2], "A causal mask needs at least as many keys as queries.")
        }
        if let sinks {
            require(sinks.shape == [q[1]], "sinks must be [Hq]; got \(sinks.shape).")
        }
    }
}

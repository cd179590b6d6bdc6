import MLX

/// A cache that holds packed rows; attention over them is by `quantizedMM`.
public protocol QuantizedKVCacheProtocol: KVCache {
    var groupSize: Int { get }
    var bits: Int { get }
    var mode: QuantizationMode { get }
    func updateQuantized(
        keys: MLXArray, values: MLXArray
    ) -> ((MLXArray, MLXArray, MLXArray?), (MLXArray, MLXArray, MLXArray?))
    func getQuantizedState() -> (
        (MLXArray, MLXArray, MLXArray?), (MLXArray, MLXArray, MLXArray?)
    )?
}

/// The seam that stock models attend through: the cache sees keys and values, never the queries.
public func attentionWithCacheUpdate(
    queries: MLXArray, keys: MLXArray, values: MLXArray, cache: KVCache?, scale: Float,
    mask: MLXFast.ScaledDotProductAttentionMaskMode = .none
) -> MLXArray {
    if let cache = cache as? QuantizedKVCacheProtocol {
        let (keys, values) = cache.updateQuantized(keys: keys, values: values)
        return quantizedScaledDotProductAttention(
            queries: queries, quantizedKeys: keys, quantizedValues: values, scale: scale,
            mask: mask, groupSize: cache.groupSize, bits: cache.bits, mode: cache.mode)
    }
    let (keys, values) = cache?.update(keys: keys, values: values) ?? (keys, values)
    return MLXFast.scaledDotProductAttention(
        queries: queries, keys: keys, values: values, scale: scale, mask: mask)
}

/// Attention of `[B, Hq, L, D]` over packed rows `[B, Hk, N, ...]`.
public func quantizedScaledDotProductAttention(
    queries: MLXArray, quantizedKeys: (MLXArray, MLXArray, MLXArray?),
    quantizedValues: (MLXArray, MLXArray, MLXArray?), scale: Float,
    mask: MLXFast.ScaledDotProductAttentionMaskMode = .none, groupSize: Int = 64, bits: Int = 8,
    mode: QuantizationMode = .affine
) -> MLXArray {
    let (heads, length) = (queries.dim(1), queries.dim(2))
    let keyHeads = quantizedKeys.0.dim(1)
    func perGroup(_ array: MLXArray) -> MLXArray { expandedDimensions(array, axis: 2) }
    let grouped = (queries * scale).reshaped(
        queries.dim(0), keyHeads, heads / keyHeads, length, queries.dim(3))
    var scores = quantizedMM(
        grouped, perGroup(quantizedKeys.0), scales: perGroup(quantizedKeys.1),
        biases: quantizedKeys.2.map(perGroup), groupSize: groupSize, bits: bits, mode: mode)

    let count = scores.dim(-1)
    let minimum = MLXArray(-Float.infinity, dtype: scores.dtype)
    switch mask {
    case .none: break
    case .causal:
        let visible = createCausalMask(n: length, offset: count - length)
        scores = MLX.where(visible, scores, minimum)
    case .array(let mask):
        // [..., Hq, L, N] becomes [..., Hk, G, L, N].
        let isPerHead = mask.ndim >= 3 && mask.dim(-3) == heads
        let shape = mask.shape.dropLast(3) + [keyHeads, heads / keyHeads, length, count]
        let mask = isPerHead ? mask.reshaped(shape) : mask.ndim >= 3 ? perGroup(mask) : mask
        scores = mask.dtype == .bool ? MLX.where(mask, scores, minimum) : scores + mask
    }

    let output = quantizedMM(
        softmax(scores, axis: -1, precise: true), perGroup(quantizedValues.0),
        scales: perGroup(quantizedValues.1), biases: quantizedValues.2.map(perGroup),
        transpose: false, groupSize: groupSize, bits: bits, mode: mode)
    return output.reshaped(queries.dim(0), heads, length, -1)
}

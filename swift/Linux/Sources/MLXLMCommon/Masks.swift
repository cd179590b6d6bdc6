import MLX

/// `[n, offset + n]`, true where a query may see a key.
public func createCausalMask(
    n: Int, offset: Int, windowSize: Int? = nil, lengths: MLXArray? = nil
) -> MLXArray {
    let keys = MLXArray(0 ..< offset + n)[.newAxis]
    let queries = MLXArray(offset ..< offset + n)[0..., .newAxis]
    var mask = queries .>= keys
    if let windowSize { mask = mask .&& (queries .< keys + windowSize) }
    if let lengths {
        mask = mask .&& (keys .< lengths[0..., .newAxis, .newAxis, .newAxis])
    }
    return mask
}

/// The mask for the rows of `h` (`[B, L, D]`), by the cache of any layer.
public func createAttentionMask(
    h: MLXArray, cache: KVCache?, windowSize: Int? = nil, returnArray: Bool = false
) -> MLXFast.ScaledDotProductAttentionMaskMode {
    makeAttentionMask(
        n: h.dim(1), cache: cache, windowSize: windowSize, returnArray: returnArray)
}

public func makeAttentionMask(
    n: Int, cache: KVCache?, windowSize: Int? = nil, returnArray: Bool = false
) -> MLXFast.ScaledDotProductAttentionMaskMode {
    cache?.makeMask(n: n, windowSize: windowSize, returnArray: returnArray)
        ?? stockMask(n: n, offset: 0, windowSize: windowSize, returnArray: returnArray)
}

func stockMask(
    n: Int, offset: Int, windowSize: Int?, returnArray: Bool
) -> MLXFast.ScaledDotProductAttentionMaskMode {
    if n == 1 { return .none }
    if returnArray || windowSize.map({ n > $0 }) ?? false {
        return .array(createCausalMask(n: n, offset: offset, windowSize: windowSize))
    }
    return .causal
}

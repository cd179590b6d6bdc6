import MLX
import MLXLMCommon

/// A cache that computes the attention itself, and so may see the queries.
///
/// This is the hook that mlx-swift-lm does not have yet: ``h2oAttention(queries:keys:values:cache:scale:mask:sinks:)``
/// asks for it where `attentionWithCacheUpdate` would hand the cached rows to stock attention.
package protocol AttendingKVCache: KVCache {
    /// Whether this cache wants to attend; one that does not is served like any other.
    var attends: Bool { get }

    /// Take new rows in, attend to what is kept and to them, then choose what to forget.
    ///
    /// - Parameters:
    ///   - queries: `[B, Hq, L, D]` with RoPE applied at `offset`.
    ///   - keys: New keys `[B, Hk, L, D]`, likewise.
    ///   - values: New values `[B, Hk, L, Dv]`.
    ///   - scale: Factor on q.k.
    ///   - mask: As for stock attention; of an array only the last L columns are read, since kept
    ///     slots are always visible.
    ///   - sinks: Attention-sink logits `[Hq]`.
    /// - Returns: `[B, Hq, L, Dv]`.
    func attend(
        queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float,
        mask: MLXFast.ScaledDotProductAttentionMaskMode, sinks: MLXArray?
    ) -> MLXArray
}

/// `attentionWithCacheUpdate` for caches that attend themselves; a drop-in for it in your own models.
///
/// - Parameters:
///   - queries: `[B, Hq, L, D]` with RoPE applied.
///   - keys: New keys `[B, Hk, L, D]`, likewise.
///   - values: New values `[B, Hk, L, Dv]`.
///   - cache: Any cache, or nil.
///   - scale: Factor on q.k.
///   - mask: From the cache's `makeMask`.
///   - sinks: Attention-sink logits `[Hq]`, for caches that attend.
/// - Returns: `[B, Hq, L, Dv]`.
public func h2oAttention(
    queries: MLXArray, keys: MLXArray, values: MLXArray, cache: (any KVCache)?, scale: Float,
    mask: MLXFast.ScaledDotProductAttentionMaskMode = .none, sinks: MLXArray? = nil
) -> MLXArray {
    if let cache = cache as? any AttendingKVCache, cache.attends {
        return cache.attend(
            queries: queries, keys: keys, values: values, scale: scale, mask: mask, sinks: sinks)
    }
    if let sinks {
        let (keys, values) = cache?.update(keys: keys, values: values) ?? (keys, values)
        return MLXFast.scaledDotProductAttention(
            queries: queries, keys: keys, values: values, scale: scale, mask: mask,
            sinks: sinks.asType(queries.dtype))
    }
    return attentionWithCacheUpdate(
        queries: queries, keys: keys, values: values, cache: cache, scale: scale, mask: mask)
}

import MLX
import MLXLMCommon

/// A layer's cache while a prompt is read a second time: the model attends to it, and stores nothing.
final class SecondReadingCache: AttendingKVCache {
    private let cache: H2OKVCache
    private let readings: EngineReadings
    private let layer: Int

    init(_ cache: H2OKVCache, _ readings: EngineReadings, layer: Int) {
        (self.cache, self.readings, self.layer) = (cache, readings, layer)
    }

    let attends = true
    var offset: Int { cache.offset }
    var maxSize: Int? { cache.maxSize }
    let isTrimmable = false
    var state: [MLXArray] {
        get { [] }
        set {}
    }
    var metaState: [String] {
        get { [] }
        set {}
    }

    func innerState() -> [MLXArray] { [] }
    func trim(_ n: Int) -> Int { 0 }
    func copy() -> any KVCache { self }

    /// None: attention here is causal, whatever the mask.
    func makeMask(
        n: Int, windowSize: Int?, returnArray: Bool
    ) -> MLXFast.ScaledDotProductAttentionMaskMode { .none }

    func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray) {
        cache.reporting((keys, values)) {
            throw H2OError.policyNeedsAttention(policy: "a second reading", model: "this model")
        }
    }

    func attend(
        queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float,
        mask: MLXFast.ScaledDotProductAttentionMaskMode, sinks: MLXArray?
    ) -> MLXArray {
        let shape = queries.shape.dropLast() + values.shape.suffix(1)
        return cache.reporting(.zeros(Array(shape), dtype: queries.dtype)) {
            try readings.attend(
                layer: layer, queries: queries, keys: keys, values: values, scale: scale,
                sinks: sinks)
        }
    }
}

/// A model's caches for a part of the second reading. Other caches than bounded ones go on, as copies, from
/// the first reading.
func secondReadingCaches(
    of caches: [any KVCache], _ readings: EngineReadings
) -> [any KVCache] {
    var layer = 0
    func looking(_ member: any KVCache, _ other: (any KVCache) -> any KVCache) -> any KVCache {
        guard let bounded = member as? H2OKVCache else { return other(member) }
        defer { layer += 1 }
        return SecondReadingCache(bounded, readings, layer: layer)
    }
    return caches.map { cache in
        guard let list = cache as? CacheList else { return looking(cache) { $0.copy() } }
        // Copies of bounded members are of no use: the second reading is of those that are copied.
        var own = placedMembers(of: [list]).map(\.cache).makeIterator()
        let copy = list.copy() as! CacheList
        copy.mapChildren { member in looking(own.next()!) { _ in member } }
        return copy
    }
}

import MLXLMCommon

/// One entry of a model's cache list.
public struct LayerDescription: Sendable, CustomStringConvertible {
    /// Its place in the list: "3", or "3.1" within a `CacheList`.
    public let layer: String
    /// The cache's class.
    public let kind: String
    /// Whether its memory is bounded by this library.
    public let isBounded: Bool
    /// Why, or why not.
    public let reason: String
    /// Slots per KV head of a bounded cache, once known.
    public let budgets: [Int]?
    /// Bytes held now.
    public let nbytes: Int

    public var description: String {
        "layer \(layer): \(kind), \(isBounded ? "bounded" : "left as it is"): \(reason) "
            + "(\(nbytes) bytes)"
    }
}

extension H2OKVCache {
    /// Per layer what is bounded and what is not, and why.
    public static func describe(_ caches: [any KVCache]) -> [LayerDescription] {
        placedMembers(of: caches).map { layer, cache in
            let kind = String(describing: type(of: cache))
            guard let cache = cache as? H2OKVCache else {
                let reason =
                    if let size = cache.maxSize {
                        "the model's own window of \(size) tokens"
                    } else if cache is ArraysCache {
                        "a state of fixed size, not a list of tokens"
                    } else {
                        "a cache of the model's own kind"
                    }
                let bytes = cache.innerState().reduce(0) { $0 + $1.nbytes }
                return LayerDescription(
                    layer: layer, kind: kind, isBounded: false, reason: reason, budgets: nil,
                    nbytes: bytes)
            }
            var answer = cache.remainderAnswers ? "evicted tokens go on answering" : "no remainder"
            if !cache.attends && cache.remainderAnswers { answer += ", as plain rows" }
            let sizes = cache.budgets ?? [], spread = Set(sizes).sorted()
            let slots =
                spread.count > 1
                ? "\(spread.first!) to \(spread.last!)"
                : (spread.first.map(String.init) ?? "unknown")
            return LayerDescription(
                layer: layer, kind: kind, isBounded: true,
                reason:
                    "\(slots) slots a KV head, policy \(type(of: cache.policy).name), \(answer)",
                budgets: cache.budgets, nbytes: cache.nbytes)
        }
    }
}

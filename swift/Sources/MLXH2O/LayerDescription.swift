import Foundation
import MLXLMCommon

/// One entry of a model's cache list.
public struct H2OLayerDescription: Sendable, CustomStringConvertible {
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
    public static func describe(_ caches: [any KVCache]) -> [H2OLayerDescription] {
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
                return H2OLayerDescription(
                    layer: layer, kind: kind, isBounded: false, reason: reason, budgets: nil,
                    nbytes: bytes)
            }
            let sizes = cache.budgets ?? [], spread = Set(sizes).sorted()
            let slots =
                spread.count > 1
                ? "\(spread.first!) to \(spread.last!)"
                : (spread.first.map(String.init) ?? "unknown")
            return H2OLayerDescription(
                layer: layer, kind: kind, isBounded: true,
                reason: "\(slots) slots a KV head\(cache.packing)"
                    + (cache.frame == nil ? "" : " in a frame")
                    + (cache.settings.rope == nil ? "" : " at positions without gaps")
                    + ", policy \(cache.policy.name), \(cache.answer)"
                    + (cache.settings.filling.isEmpty
                        ? "" : ", shared out anew when the memory is full"),
                budgets: cache.budgets, nbytes: cache.nbytes)
        }
    }
}

extension H2OKVCache {
    /// What becomes of evicted tokens.
    fileprivate var answer: String {
        guard remainderAnswers else { return "no remainder" }
        let answer = "evicted tokens go on answering", spread = Set(saturation).sorted()
        if !attends { return answer + ", as plain rows" }
        if spread == [H2ORemainder.saturation] { return answer }
        let numbers = spread.map { String(format: "%g", $0) }
        return answer + " with saturation "
            + (numbers.count == 1 ? numbers[0] : "\(numbers.first!) to \(numbers.last!)")
    }
}

extension H2OPacking: CustomStringConvertible {
    /// " in 8 bits", " with keys in 8 and values in 4 bits", or nothing.
    public var description: String {
        guard packs else { return "" }
        var text = " in \(keyBits ?? 0) bits"
        if keyBits != valueBits {
            let named = [("keys", keyBits), ("values", valueBits)].compactMap { name, bits in
                bits.map { "\(name) in \($0) bits" }
            }
            text = " with " + named.joined(separator: " and ")
        }
        guard let recentBits else { return text }
        return text + ", the newest " + (recentBits == 16 ? "unpacked" : "in \(recentBits) bits")
    }
}

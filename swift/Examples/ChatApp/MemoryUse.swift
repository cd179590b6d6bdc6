import MLXH2O
import MLXLMCommon

/// What the caches of a conversation hold.
struct MemoryUse: Sendable {
    /// The tokens of the whole conversation.
    let tokens: Int
    /// Of each token the fraction of all KV heads that hold it.
    let fractions: [Double]
    let bytes: Int

    init(_ caches: [any KVCache]) throws {
        let bounded = caches.compactMap { $0 as? H2OKVCache }
        tokens = bounded.first?.offset ?? 0
        bytes = bounded.reduce(0) { $0 + $1.nbytes }
        var counts = Array(repeating: 0.0, count: tokens)
        let heads = try bounded.flatMap { try $0.keptPositions().first ?? [] }
        for position in heads.joined() { counts[position] += 1 }
        fractions = counts.map { $0 / Double(max(heads.count, 1)) }
    }
}

import MLX
import MLXLMCommon

extension H2OKVCache {
    /// The unread share: how much of the newest token's attention went to evicted tokens, through the
    /// remainder. Of each KV head a mean over its query heads, `[B, Hk]`; of a prompt chunk its last
    /// query's.
    ///
    /// It is not evaluated, so that no step waits for it, and steps go on. Nil where it is not known:
    /// before the first token, without the remainder, and where the model attends by itself.
    public var unread: MLXArray? {
        get throws { try engine?.unread()?.newest }
    }

    /// Its mean over the tokens of an answer, which begins with the last query of a prompt chunk, or
    /// after ``newTurn(carry:)``.
    public var unreadMean: MLXArray? {
        get throws { try engine?.unread()?.mean }
    }

    /// How far an answer leans on evicted tokens, from 0 to 1: the mean of ``unreadMean`` over KV heads
    /// and the layers that tell it. Nil if none does.
    ///
    /// - Parameter caches: A model's.
    /// - Throws: What the device or MLX could not.
    public static func unread(of caches: [any KVCache]) throws -> Float? {
        let means = try placedMembers(of: caches).compactMap { _, cache in
            try (cache as? H2OKVCache)?.unreadMean?.mean()
        }
        return means.isEmpty ? nil : stacked(means).mean().item(Float.self)
    }
}

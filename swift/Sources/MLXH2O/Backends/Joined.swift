import MLX

/// Attention over rows of different kinds: each kind by itself, joined by their lse.
extension Backend {
    /// Output, something per key, and lse.
    typealias Part = (output: MLXArray, perKey: MLXArray, logSumExp: MLXArray)

    // Queries that are joined at a time: what is held of each part, in float32, stays small.
    private static let joinedQueries = 32

    /// Attention, logits and lse over all parts.
    func joinedWithScores(
        _ call: AttentionCall
    ) -> (output: MLXArray, scores: MLXArray, logSumExp: MLXArray) {
        let parts = parts(call) {
            let part = attentionWithScores($0)
            return (part.output, part.scores, part.logSumExp)
        }
        let (output, lse) = joint(parts)
        return (output.asType(call.queries.dtype), joined(parts.map(\.perKey), axis: -1), lse)
    }

    /// Attention alone, a few queries at a time.
    func joinedAttention(_ call: AttentionCall) -> MLXArray {
        let outputs = blocks(call).map { block in
            // The form with masses hands out lse and writes no logits.
            let parts = parts(block) {
                let part = attentionWithMass($0)
                return (part.output, part.mass, part.logSumExp)
            }
            return joint(parts).output.asType(call.queries.dtype)
        }
        return joined(outputs, axis: 2)
    }

    /// Attention and masses over all parts, a few queries at a time.
    func joinedWithMass(
        _ call: AttentionCall
    ) -> (output: MLXArray, mass: MLXArray, logSumExp: MLXArray) {
        let N = call.keys.shape[2], heads = call.keys.shape[1]
        var mass = MLXArray.zeros(Array(call.keys.shape[0 ..< 3]), dtype: .float32)
        var outputs: [MLXArray] = [], lses: [MLXArray] = []
        for block in blocks(call) {
            let found = joinedWithScores(block)
            outputs.append(found.output)
            lses.append(found.logSumExp)
            let received = Reference.attentionMass(
                found.scores, logSumExp: found.logSumExp, heads: heads)
            mass = mass + zeroPadded(received, axis: 2, before: 0, after: N - received.dim(2))
        }
        return (joined(outputs, axis: 2), mass, joined(lses, axis: 2))
    }

    /// What `attend` finds over each kind of rows.
    private func parts(_ call: AttentionCall, _ attend: (AttentionCall) -> Part) -> [Part] {
        guard case .joined(let keys) = call.keys, case .joined(let values) = call.values else {
            fatalError("Keys and values have the same kinds of rows.")
        }
        let L = call.queries.dim(2), N = call.keys.shape[2]
        var parts: [Part] = [], start = 0
        for (k, v) in zip(keys, values) where k.shape[2] > 0 {
            var part = call
            (part.keys, part.values) = (k, v)
            part.mask = call.mask.columns(start ..< start + k.shape[2], L: L, N: N)
            if !parts.isEmpty {
                // Once: they are columns of the whole.
                (part.sinks, part.seed) = (nil, nil)
            }
            parts.append(attend(part))
            start += k.shape[2]
        }
        return parts
    }

    /// Output, float32, and lse over the columns of all parts.
    private func joint(_ parts: [Part]) -> (output: MLXArray, logSumExp: MLXArray) {
        let lse = parts.dropFirst().reduce(parts[0].logSumExp) { logAddExp($0, $1.logSumExp) }
        let output = parts.reduce(MLXArray.zeros(parts[0].output.shape, dtype: .float32)) {
            $0 + $1.output.float32 * Reference.softmaxWeights($1.logSumExp.column, lse)
        }
        return (output, lse)
    }

    /// The operands of a few queries at a time, over the keys that they can see.
    private func blocks(_ call: AttentionCall) -> [AttentionCall] {
        let L = call.queries.dim(2)
        return stride(from: 0, to: L, by: Self.joinedQueries).map {
            call.queries($0 ..< min($0 + Self.joinedQueries, L))
        }
    }
}

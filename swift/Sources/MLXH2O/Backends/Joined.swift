import MLX

/// Attention over rows of different kinds: each kind by itself, joined by their lse.
extension Backend {
    typealias Result = (output: MLXArray, scores: MLXArray, logSumExp: MLXArray)

    // Queries that are joined at a time: what is held of each part, in float32, stays small.
    private static let joinedQueries = 32

    /// Attention, logits and lse over all parts.
    func joinedWithScores(_ call: AttentionOperands, _ keys: [Rows], _ values: [Rows]) -> Result {
        let L = call.queries.dim(2), N = call.keys.shape[2]
        var parts: [Result] = [], start = 0
        for (k, v) in zip(keys, values) where k.shape[2] > 0 {
            var part = call
            (part.keys, part.values) = (k, v)
            part.mask = call.mask.columns(start ..< start + k.shape[2], L: L, N: N)
            if !parts.isEmpty {
                // Once: they are columns of the whole.
                (part.sinks, part.seed) = (nil, nil)
            }
            parts.append(attentionWithScores(part))
            start += k.shape[2]
        }
        let lse = parts.dropFirst().reduce(parts[0].logSumExp) { logAddExp($0, $1.logSumExp) }
        let output = parts.reduce(MLXArray.zeros(parts[0].output.shape, dtype: .float32)) {
            $0 + $1.output.float32 * Reference.softmaxWeights($1.logSumExp.column, lse)
        }
        return (
            output.asType(call.queries.dtype), joined(parts.map(\.scores), axis: -1), lse
        )
    }

    /// The same, and masses in the place of logits, a few queries at a time.
    func joinedWithMass(
        _ call: AttentionOperands
    ) -> (output: MLXArray, mass: MLXArray, logSumExp: MLXArray) {
        let L = call.queries.dim(2), N = call.keys.shape[2], heads = call.keys.shape[1]
        var mass = MLXArray.zeros(Array(call.keys.shape[0 ..< 3]), dtype: .float32)
        var outputs: [MLXArray] = [], lses: [MLXArray] = []
        for start in stride(from: 0, to: L, by: Self.joinedQueries) {
            let part = call.queries(start ..< min(start + Self.joinedQueries, L))
            let found = attentionWithScores(part)
            outputs.append(found.output)
            lses.append(found.logSumExp)
            let received = Reference.attentionMass(
                found.scores, logSumExp: found.logSumExp, heads: heads)
            mass = mass + zeroPadded(received, axis: 2, before: 0, after: N - received.dim(2))
        }
        return (joined(outputs, axis: 2), mass, joined(lses, axis: 2))
    }
}

import MLX

/// One more softmax column, without a slot: logits `[B, Hq, L]` and values `[B, Hk, Dv]`, float32.
typealias Seed = (logits: MLXArray, values: MLXArray)

/// The operands of an attention.
struct AttentionCall {
    /// `[B, Hq, L, D]`.
    var queries: MLXArray
    /// `[B, Hk, N, D]`.
    var keys: Rows
    /// `[B, Hk, N, Dv]`.
    var values: Rows
    var scale: Float
    var mask: Mask = .none
    /// Attention-sink logits `[Hq]`.
    var sinks: MLXArray?
    var seed: Seed?
}

extension AttentionCall {
    /// The operands of some queries, over the keys that they can see.
    func queries(_ range: Range<Int>) -> AttentionCall {
        let block = mask.block(range, L: queries.dim(2), N: keys.shape[2], newColumnsOnly: false)
        var part = self
        part.queries = queries.sliced(range, axis: 2)
        part.keys = keys.sliced(0 ..< block.keys, axis: 2)
        part.values = values.sliced(0 ..< block.keys, axis: 2)
        part.mask = block.mask
        part.seed = seed.map { ($0.logits.sliced(range, axis: 2), $0.values) }
        return part
    }
}

/// The definition, in plain MLX ops. Slow on purpose where clarity asks for it.
enum Reference {
    /// Queries whose logits are held at a time where only their sum is wanted: bounds `[L, N]`.
    static let queryBlock = 256

    /// Softmax attention `[B, Hq, L, Dv]`.
    static func attention(_ call: AttentionCall) -> MLXArray {
        if call.seed == nil, case .plain(let keys) = call.keys,
            case .plain(let values) = call.values
        {
            return MLXFast.scaledDotProductAttention(
                queries: call.queries, keys: keys, values: values, scale: call.scale,
                mask: call.mask.fast(call.queries.dtype),
                sinks: call.sinks?.asType(call.queries.dtype))
        }
        return joined(blocks(call).map(\.output), axis: 2)
    }

    /// Attention and the mass `[B, Hk, N]` that each key received, a few queries at a time.
    static func attentionWithMass(
        _ call: AttentionCall
    ) -> (output: MLXArray, mass: MLXArray, logSumExp: MLXArray) {
        let heads = call.keys.shape[1], N = call.keys.shape[2]
        var mass = MLXArray.zeros(Array(call.keys.shape[0 ..< 3]), dtype: .float32)
        let blocks = blocks(call)
        for block in blocks {
            let part = attentionMass(block.scores, logSumExp: block.logSumExp, heads: heads)
            mass = mass + zeroPadded(part, axis: 2, before: 0, after: N - part.dim(2))
        }
        return (
            joined(blocks.map(\.output), axis: 2), mass, joined(blocks.map(\.logSumExp), axis: 2)
        )
    }

    /// `attentionWithScores` of a few queries at a time, over the keys that they can see.
    private static func blocks(
        _ call: AttentionCall
    ) -> [(output: MLXArray, scores: MLXArray, logSumExp: MLXArray)] {
        let L = call.queries.dim(2)
        var call = call
        call.keys = .plain(call.keys.dense)
        call.values = .plain(call.values.dense)
        return stride(from: 0, to: L, by: queryBlock).map {
            attentionWithScores(call.queries($0 ..< min($0 + queryBlock, L)))
        }
    }

    /// Attention, its logits `[B, Hq, L, N]` and their log-sum-exp `[B, Hq, L]`.
    static func attentionWithScores(
        _ call: AttentionCall
    ) -> (output: MLXArray, scores: MLXArray, logSumExp: MLXArray) {
        let q = call.queries, keys = call.keys.dense, values = call.values.dense
        let (B, Hq, L, D) = (q.dim(0), q.dim(1), q.dim(2), q.dim(3))
        let Hk = keys.dim(1), N = keys.dim(2), rows = Hq / Hk * L
        // The G query heads of a KV head are stacked along the queries: no repeated keys.
        let grouped = (q.float32 * call.scale).reshaped([B, Hk, rows, D])
        var scores = matmul(grouped, keys.float32.swappedAxes(-1, -2)).reshaped([B, Hq, L, N])
        scores = masked(scores, call.mask)
        var lse = scores.logSumExp(axis: -1)
        if let sinks = call.sinks {
            lse = logAddExp(lse, sinks.float32.column)
        }
        let weights = softmaxWeights(scores, lse).reshaped([B, Hk, rows, N])
        var out = matmul(weights, values.float32).reshaped([B, Hq, L, values.dim(-1)])
        if let seed = call.seed {
            (out, lse) = join(out, lse, seed)
        }
        return (out.asType(q.dtype), scores, lse)
    }

    /// Attention and one more column together.
    ///
    /// - Parameters:
    ///   - out: Attention without the column `[B, Hq, L, Dv]`.
    ///   - lse: Its log-sum-exp `[B, Hq, L]`.
    ///   - column: What joins.
    static func join(
        _ out: MLXArray, _ lse: MLXArray, _ column: Seed
    ) -> (MLXArray, MLXArray) {
        let joint = logAddExp(lse, column.logits)
        let finite = which(joint .== -Float.infinity, Float(0), joint)
        let kept = exp(lse - finite).column, added = exp(column.logits - finite).column
        let group = out.dim(1) / column.values.dim(1)
        let value = repeated(column.values, count: group, axis: 1).expandedDimensions(axis: 2)
        return ((out.float32 * kept + value * added).asType(out.dtype), joint)
    }

    /// The attention that each key received, `[B, Hk, N]`.
    static func attentionMass(
        _ scores: MLXArray, logSumExp: MLXArray, heads: Int
    ) -> MLXArray {
        let (B, Hq, L, N) = (scores.dim(0), scores.dim(1), scores.dim(2), scores.dim(3))
        let weights = softmaxWeights(scores, logSumExp).reshaped([B, heads, Hq / heads * L, N])
        return weights.sum(axis: 2) * Float(Double(heads) / Double(Hq))
    }

    /// exp(scores - lse) `[..., N]`, zero in rows that see nothing (lse minus infinity).
    static func softmaxWeights(_ scores: MLXArray, _ lse: MLXArray) -> MLXArray {
        let finite = which(lse .== -Float.infinity, Float(0), lse)
        return exp(scores - finite.column)
    }

    /// Logits `[B, Hq, L, N]` with minus infinity where masked.
    private static func masked(_ scores: MLXArray, _ mask: Mask) -> MLXArray {
        switch mask {
        case .none:
            return scores
        case .causal:
            let L = scores.dim(-2), N = scores.dim(-1)
            let visible = positions(0 ..< N) .<= positions(N - L ..< N).column
            return which(visible, scores, -Float.infinity)
        case .array(let mask):
            if mask.dtype == .bool {
                return which(mask, scores, -Float.infinity)
            }
            // Models write the lowest number of their dtype for "masked"; as a sum it would poison
            // the scores.
            let hidden = mask.float32 .<= Float(mask.dtype.finfo!.min)
            return which(hidden, -Float.infinity, scores + mask.float32)
        }
    }
}

import MLX

/// New tokens of a layer, as the model hands them over.
struct NewTokens {
    /// `[B, Hq, L, D]` with RoPE applied.
    var queries: MLXArray
    /// `[B, H, L, D]`, likewise.
    var keys: MLXArray
    /// `[B, H, L, Dv]`.
    var values: MLXArray
    /// Factor on q.k.
    let scale: Float
    /// Of an array only the last L columns are read, since kept slots are always visible.
    var mask: Mask
    /// Attention-sink logits `[Hq]`.
    var sinks: MLXArray?

    /// L.
    var count: Int { keys.dim(2) }

    /// Some of them, when only they are new.
    func part(_ range: Range<Int>) -> NewTokens {
        var part = self
        part.queries = queries.sliced(range, axis: 2)
        part.keys = keys.sliced(range, axis: 2)
        part.values = values.sliced(range, axis: 2)
        part.mask = mask.tokens(range, of: count)
        return part
    }

    /// The same tokens with the queries of some query heads only.
    func queryHeads(_ range: Range<Int>) -> NewTokens {
        var part = self
        part.queries = queries.sliced(range, axis: 1)
        part.sinks = sinks?.sliced(range, axis: 0)
        return part
    }
}

extension Layer {
    /// New rows `[B, H, L, ...]` by name, as the slots store them.
    func rows(_ keys: MLXArray, _ values: MLXArray) -> Fields {
        let (B, H, L) = (keys.dim(0), keys.dim(1), keys.dim(2))
        var rows = settings.packing.fields("keys", .plain(keys))
        rows.merge(settings.packing.fields("values", .plain(values))) { $1 }
        rows["positions"] = broadcast(positions(offset ..< offset + L), to: [B, H, L])
        if settings.policy.needsAttention {
            rows["scores"] = MLXArray.zeros([B, H, L], dtype: .float32)
        }
        if settings.keepsValueLengths {
            rows["value_lengths"] = valueLengths(values)
        }
        return rows
    }
}

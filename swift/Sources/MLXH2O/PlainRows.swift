import MLX

/// Stock attention over a layer: evicted tokens answer as ordinary rows, weighed by the mask.
extension Layer {
    /// Keys `[B, H, N, D]` and values `[B, H, N, Dv]` that stock attention is to attend to.
    ///
    /// - Parameter overflow: What ``takeIn(keys:values:noting:)`` returned.
    mutating func handOut(_ overflow: Fields?) -> (keys: MLXArray, values: MLXArray) {
        let attended = attended(store.runs[0], overflow), reserved = store.reserved
        let keys = attended.fields["keys"]!, values = attended.fields["values"]!
        guard reserved > 0 && attended.evicted > 0 else { return (keys, values) }
        let rows = remainder.plainRows(reserved)
        if overflow != nil {
            return (
                concatenated([rows.keys.asType(keys.dtype), keys], axis: 2),
                concatenated([rows.values.asType(values.dtype), values], axis: 2)
            )
        }
        writeReserved([
            "keys": rows.keys.flattened(start: 1, end: 2),
            "values": rows.values.flattened(start: 1, end: 2),
        ])
        return (
            store.view(store.runs[0], "keys", withReserved: true),
            store.view(store.runs[0], "values", withReserved: true)
        )
    }

    /// How many tokens plain rows will stand for when n new ones attend.
    func evictedAfter(_ n: Int) -> Int {
        let run = store.runs[0]
        return n == 1 ? offset + 1 - min(run.length + 1, run.budget) : evicted(run)
    }

    /// `[1, 1, n, R + kept + n]` to add to the logits of n new tokens: log(evicted / R) on the R plain
    /// rows' columns, minus infinity on the future; nil where no plain rows will answer.
    func plainRowsMask(_ n: Int) -> MLXArray? {
        let rows = store.reserved, dtype = rowTypes.keyDType, evicted = evictedAfter(n)
        guard rows > 0 && evicted > 0 else { return nil }
        let kept = n == 1 ? min(longest, store.runs[0].budget - 1) : longest
        let bias = log(MLXArray(Float(Double(evicted) / Double(rows))))
        var mask = concatenated(
            [broadcast(bias, to: [rows]), MLXArray.zeros([kept + n], dtype: .float32)])
        if n > 1 {
            let lowest = Float(dtype.finfo!.min)
            let future = positions(0 ..< kept + n) .> positions(kept ..< kept + n).column
            let hidden = zeroPadded(
                which(future, lowest, Float(0)), axis: 1, before: rows, after: 0)
            mask = maximum(mask + hidden, lowest)
        }
        return broadcast(mask, to: [1, 1, n, rows + kept + n]).asType(dtype)
    }
}

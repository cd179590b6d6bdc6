import MLX

/// The recent window: a layer's newest tokens, stored in a width of their own.
///
/// They are in a ring of the same size for all heads: the tokens that every head of the layer
/// protects. None of them can be a victim, so the ring needs no positions and no choices; the oldest
/// token leaves it for the slots proper when a new one comes.
///
/// A token is quantized once, from full precision: on arrival if the window is packed, on leaving if it
/// holds the model's own dtype. What leaves a packed window takes its levels along
/// (``PackedRows/with(bits:)``).
struct RecentWindow {
    /// Tokens it can hold.
    private(set) var size: Int
    /// Tokens it holds.
    private(set) var length = 0
    /// The slot of the oldest; the others follow, around the end.
    private(set) var oldest = 0
    /// `[B, H, size, ...]` per name: keys, values and what packs them, and what the policy needs of
    /// each token besides: scores, the lengths of values.
    private(set) var fields: Fields = [:]
    private let kept: H2OPacking
    private let recent: H2OPacking
    private let isScored: Bool
    private let hasLengths: Bool

    init(size: Int, kept: H2OPacking, policy: any Policy) {
        (self.size, self.kept, recent) = (size, kept, kept.recent!)
        isScored = policy.needsAttention
        hasLengths = policy.keepsValueLengths(in: kept)
    }

    /// A window as it was saved.
    init(
        _ json: SettingValue, fields: Fields, kept: H2OPacking, policy: any Policy
    ) throws {
        guard let size = json["size"]?.int, let length = json["length"]?.int,
            let oldest = json["oldest"]?.int, kept.recent != nil, 0 ..< size ~= oldest,
            fields.values.allSatisfy({ $0.ndim > 2 && length ... size ~= $0.dim(2) })
        else {
            throw H2OError.file("The recent window is not whole.")
        }
        self.init(size: size, kept: kept, policy: policy)
        (self.length, self.oldest, self.fields) = (length, oldest, fields)
    }

    var json: SettingValue {
        .object(["size": .int(size), "length": .int(length), "oldest": .int(oldest)])
    }

    /// Have the rows in other dtypes.
    mutating func cast(keys: DType, values: DType) {
        fields.cast(keys: keys, values: values, recent)
    }

    /// Take new rows in.
    ///
    /// - Parameters:
    ///   - keys: `[B, H, L, D]`.
    ///   - values: `[B, H, L, Dv]`.
    ///   - offset: The logical position of the first.
    ///   - before: What must have been read before anything is overwritten.
    /// - Returns: The rows that are recent no longer, oldest first, as the slots proper store them:
    ///   `[B, H, M, ...]` by field, positions and scores too; nil if there are none.
    mutating func push(
        keys: MLXArray, values: MLXArray, offset: Int, after before: Before? = nil
    ) -> Fields? {
        let L = keys.dim(2)
        let leaving = max(length + L - size, 0), firstLeaving = offset - length
        // Of the new rows, those that are recent only after even newer ones came with them.
        let passing = max(L - size, 0)
        func new(_ range: Range<Int>) -> [String: Rows] {
            ["keys": keys, "values": values].mapValues { .plain($0.sliced(range, axis: 2)) }
        }
        var parts: [Fields] = []
        if leaving > passing { parts.append(left(oldestFirst(leaving - passing))) }
        if passing > 0 { parts.append(packed(kept, new(0 ..< passing))) }
        let rows = packed(recent, new(passing ..< L))
        if L == 1 && length == size {
            put(oldest, rows, after: before?.row.map { Array($0.values) } ?? [])
            oldest = (oldest + 1) % size
        } else {
            replace(leaving: leaving - passing, rows)
        }
        guard var gone = parts.first else { return nil }
        if parts.count > 1 { gone.merge(parts[1]) { concatenated([$0, $1], axis: 2) } }
        gone["positions"] = broadcast(
            positions(firstLeaving ..< firstLeaving + leaving),
            to: [keys.dim(0), keys.dim(1), leaving])
        return gone
    }

    /// The fields of some heads, oldest first, with positions.
    func views(_ heads: Range<Int>, offset: Int) -> Fields {
        var views = oldestFirst(length).mapValues { $0.sliced(heads, axis: 1) }
        let keys = views["keys"]!
        views["positions"] = broadcast(
            positions(offset - length ..< offset), to: [keys.dim(0), keys.dim(1), length])
        return views
    }

    /// Keys or values of all slots: the kept ones, then those of views.
    func rows(_ name: String, _ kept: Rows, _ views: Fields) -> Rows {
        .joined([kept, recent.rows(name, views)])
    }

    /// New scores `[B, H, length]`, oldest first.
    mutating func writeScores(_ scores: MLXArray) {
        let field = fields["scores"]!, turn = oldest == 0 ? 0 : length - oldest
        var parts: [MLXArray] = []
        if turn > 0 { parts.append(scores.slicedLast(turn ..< length)) }
        if turn < length { parts.append(scores.slicedLast(0 ..< (turn == 0 ? length : turn))) }
        if length < field.dim(2) { parts.append(field.slicedLast(length ..< field.dim(2))) }
        fields["scores"] = joined(parts, axis: 2)
    }

    /// Forget the newest n tokens, or all; how many that were.
    mutating func trim(_ n: Int) -> Int {
        let n = min(n, length)
        if n > 0 {
            (fields, oldest) = (oldestFirst(length - n), 0)
            length -= n
        }
        return n
    }

    /// What one new token changes, as it was before.
    struct Before {
        let length, oldest: Int
        /// Of all tokens; nil where the policy accumulates none.
        let scores: MLXArray?
        /// `[B, H, 1, ...]` per name, where a row is overwritten.
        let row: Fields?

        var arrays: [MLXArray] {
            (scores.map { [$0] } ?? []) + (row.map { Array($0.values) } ?? [])
        }
    }

    /// Read what the next token will change.
    func before() -> Before {
        var row: Fields?
        if length == size {
            row = fields.filter { $0.key != "scores" }.mapValues { field in
                // A copy, since a view would make the write copy everything.
                takeAlong(field, place(oldest, in: field.sliced(0 ..< 1, axis: 2)), axis: 2)
            }
        }
        return Before(length: length, oldest: oldest, scores: fields["scores"], row: row)
    }

    /// Have it as it was before the newest token.
    mutating func putBack(_ before: Before) {
        if let row = before.row { put(before.oldest, row) }
        (length, oldest) = (before.length, before.oldest)
        if let scores = before.scores { fields["scores"] = scores }
    }

    /// Change how many tokens it can hold; the rows that leave, without positions, or nil.
    mutating func resize(_ size: Int) -> Fields? {
        let leaving = max(length - size, 0)
        let gone = leaving > 0 ? left(oldestFirst(leaving)) : nil
        fields = oldestFirst(length).mapValues { $0.sliced(leaving ..< length, axis: 2) }
        (oldest, self.size) = (0, size)
        length -= leaving
        return gone
    }

    /// The oldest tokens.
    private func oldestFirst(_ count: Int) -> Fields {
        let end = oldest + count
        return fields.mapValues { field in
            if end <= length { return field.sliced(oldest ..< end, axis: 2) }
            return concatenated(
                [
                    field.sliced(oldest ..< length, axis: 2),
                    field.sliced(0 ..< end - length, axis: 2),
                ], axis: 2)
        }
    }

    /// Rows as they are stored, with what the policy needs besides: that of rows held, or new.
    private func packed(
        _ packing: H2OPacking, _ rows: [String: Rows], like held: Fields = [:]
    ) -> Fields {
        var fields = packing.fields("keys", rows["keys"]!)
        fields.merge(packing.fields("values", rows["values"]!)) { $1 }
        if isScored {
            let shape = Array(rows["keys"]!.shape[0 ..< 3])
            fields["scores"] = held["scores"] ?? MLXArray.zeros(shape, dtype: .float32)
        }
        if hasLengths {
            fields["value_lengths"] = held["value_lengths"] ?? valueLengths(rows["values"]!.dense)
        }
        return fields
    }

    /// Rows of the window as the slots proper store them.
    private func left(_ fields: Fields) -> Fields {
        packed(
            kept, ["keys": recent.rows("keys", fields), "values": recent.rows("values", fields)],
            like: fields)
    }

    /// Overwrite one slot of every head.
    private mutating func put(_ slot: Int, _ rows: Fields, after read: [MLXArray] = []) {
        for (name, row) in rows {
            // A row still to be read would make the write copy everything.
            let row = read.isEmpty ? row : depends(input: row, dependencies: read)
            fields[name] = putAlong(
                fields[name]!, place(slot, in: row), values: row, axis: 2)
        }
    }

    private func place(_ slot: Int, in row: MLXArray) -> MLXArray {
        broadcast(
            MLXArray([Int32(slot)]).reshaped(Array(repeating: 1, count: row.ndim)), to: row.shape)
    }

    /// Drop the oldest rows, append new ones; unused slots come last.
    private mutating func replace(leaving: Int, _ rows: Fields) {
        let staying = length - leaving
        let old = oldestFirst(length)
        let length = staying + rows["keys"]!.dim(2)
        for (name, row) in rows {
            var parts = [row]
            if staying > 0 {
                parts.insert(old[name]!.sliced(leaving ..< self.length, axis: 2), at: 0)
            }
            fields[name] = zeroPadded(
                joined(parts, axis: 2), axis: 2, before: 0, after: size - length)
        }
        (self.length, oldest) = (length, 0)
    }
}

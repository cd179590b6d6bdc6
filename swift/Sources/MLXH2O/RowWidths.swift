// Bytes of a position while a conversation has at most ``Limits/fewPositions``, and later.
private let (narrowPosition, widePosition) = (2, 4)

extension H2OPolicy {
    /// Throw ``H2OError/configuration(_:)`` for bytes that cannot hold one head's fewest slots, however
    /// narrow its rows; how wide they are only the model tells.
    func checkBytes(_ bytes: Int) throws {
        try Limits.check("A size in bytes", bytes, in: 0 ... Limits.mostBytes)
        // The narrowest that can be packed: a key and a value of one group in 2 bits, and a position.
        let least = leastBudget * (H2OPacking.narrowestRow + narrowPosition)
        guard bytes >= least else {
            throw H2OError.configuration(
                "A budget of \(bytes) bytes holds nothing: policy \"\(name)\" needs at least "
                    + "\(least) bytes, and most models many times that.")
        }
    }
}

/// What one token's row of one KV head measures.
struct RowWidths: Equatable {
    /// D.
    let key: Int
    /// Dv.
    let value: Int
    /// Bytes of a key's element in the model's dtype.
    let keySize: Int
    /// Bytes of a value's element, likewise.
    let valueSize: Int
    /// How they are stored.
    var packing = H2OPacking.dense
    /// Whether keys have a frame.
    var isFramed = false
    /// What a KV head holds for a file of its rows.
    var file = FileBytes()
    /// Of a slot's position: those of a long conversation, but for what serves before it is long.
    private(set) var positionBytes = widePosition

    /// The same while positions fit into few bits.
    var narrow: RowWidths {
        var widths = self
        widths.positionBytes = narrowPosition
        return widths
    }

    /// Bytes of one token's key and value.
    var rowBytes: Int {
        packing.rowBytes("keys", width: key, elementSize: keySize)
            + packing.rowBytes("values", width: value, elementSize: valueSize)
    }

    /// The same of one of the newest tokens.
    var recentRowBytes: Int {
        guard let recent = packing.recent else { return rowBytes }
        var widths = self
        widths.packing = recent
        return widths.rowBytes
    }

    /// Slots whose memory the remainder of one head takes (rounded up).
    func remainderSlots(_ remembers: Bool) -> Int {
        guard remembers else { return 0 }
        let bytes = H2ORemainder.bytesPerHead(keyWidth: key, valueWidth: value)
        return (bytes + rowBytes - 1) / rowBytes
    }

    /// Bytes of a slot with all that is kept beside it: position, value length, scores now and before.
    func slotBytes(_ policy: any H2OPolicy, undo: Int) -> Int {
        rowBytes + positionBytes + lengthBytes(policy)
            + (policy.needsAttention ? 4 * (1 + undo) : 0)
    }

    private func lengthBytes(_ policy: any H2OPolicy) -> Int {
        policy.keepsValueLengths(in: packing) ? 2 : 0
    }

    /// Bytes of a head with so many slots, everything counted.
    ///
    /// Each of `undo` steps is charged with the row that it overwrites, its slot, position and value
    /// length, the remainder and the victims before it, and all scores.
    func bytes(
        ofSlots slots: Int, policy: any H2OPolicy, remembers: Bool, undo: Int = 0
    ) -> Int {
        let remainder = remembers ? H2ORemainder.bytesPerHead(keyWidth: key, valueWidth: value) : 0
        let length = lengthBytes(policy)
        let perStep =
            rowBytes + length + (packing.recent == nil ? 0 : recentRowBytes + length) + 8
            + remainder + 4 * policy.options.evictEvery
        let frame = isFramed ? 2 * 4 * key : 0
        let beside =
            remainder + frame + 4 * policy.options.evictEvery + undo * perStep
            + file.bytes(ofSlots: slots, rowBytes: rowBytes)
        // A recent window of wider rows leaves room for fewer. (Of narrower ones it gives none back:
        // with a profile the window is as small as the smallest head's.)
        let extra = max(recentRowBytes - rowBytes, 0)
        return beside + slots * slotBytes(policy, undo: undo) + policy.recentSlots(slots) * extra
    }
}

/// The most slots whose bytes, which grow with them, are within a limit; 0 where none are.
func mostSlots(in limit: Int, bytes: (Int) -> Int) -> Int {
    let most = min(max(limit, 0), Limits.mostTokens)
    return max((Limits.first(in: 0 ... most) { bytes($0) > limit } ?? most + 1) - 1, 0)
}

/// The memory that a KV head takes for a file of its rows; all zero without a file.
struct FileBytes: Equatable {
    /// Bytes of rows before they are packed, and of the last queries.
    var constant = 0
    /// Rows as they are stored that wait for the file.
    var waiting = 0
    /// Rows that come back at once, at most.
    var returning = 0

    /// Of a row that came back: its position, and by how much its score was raised.
    private static let leaseBytes = 8

    /// Bytes of a head with so many slots, of rows as wide as these.
    func bytes(ofSlots slots: Int, rowBytes: Int) -> Int {
        constant + waiting * rowBytes + min(returning, slots) * Self.leaseBytes
    }
}

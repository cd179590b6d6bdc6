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
    var packing = Packing.dense

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
        let bytes = Remainder.bytesPerHead(keyWidth: key, valueWidth: value)
        return (bytes + rowBytes - 1) / rowBytes
    }

    /// Slots per head that fit into `bytes` of `heads` heads (batch included), everything counted.
    func slots(
        bytes: Int, heads: Int, policy: any Policy, remembers: Bool
    ) throws -> Int {
        let remainder = remembers ? Remainder.bytesPerHead(keyWidth: key, valueWidth: value) : 0
        let perHead = bytes / heads - (remainder + 4 * policy.options.evictEvery)
        let slot = rowBytes + 4 + (policy.needsAttention ? 4 : 0)
        var slots = perHead / slot
        // A recent zone of wider rows leaves room for fewer. (Of narrower ones it gives none back:
        // with a profile the zone is as small as the smallest head's.)
        let extra = max(recentRowBytes - rowBytes, 0)
        while slots > 0 && slots * slot > perHead - policy.recentSlots(slots) * extra { slots -= 1 }
        guard slots >= 1 else {
            throw H2OError.configuration(
                "\(bytes) bytes leave no slot for each of \(heads) KV heads of \(rowBytes) bytes a "
                    + "token; make the budget larger.")
        }
        return slots
    }
}

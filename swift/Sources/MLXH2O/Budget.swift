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
        guard perHead >= slot else {
            throw H2OError.configuration(
                "\(bytes) bytes leave no slot for each of \(heads) KV heads of \(rowBytes) bytes a "
                    + "token; make the budget larger.")
        }
        return perHead / slot
    }
}

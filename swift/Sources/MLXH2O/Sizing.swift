/// Bits and slots together: what rows in fewer bits lose, against what more slots save.
extension H2OConfiguration {
    // Widths of rows that are weighed against each other; nil: not packed.
    private static let widths: [Int?] = [nil, 8, 6, 5, 4]
    // Of expected loss: too little to choose by (NEGLIGIBLE of Python's budgets/plan.py).
    private static let negligible = 3e-4
    // Of values whose keys have no frame (USUAL_BITS of Python's budgets/plan.py).
    private static let valueBitsWithoutFrames = 6
    // Bytes of an element of a 16-bit cache.
    private static let plainElement = 2

    /// The same with a share as bytes, and with rows packed as loses least where that was left open.
    ///
    /// - Parameters:
    ///   - kinds: The model's plain caches.
    ///   - profile: By which slots are shared out, if by any.
    ///   - policy: What chooses.
    func sized(
        for kinds: [LayerKind], by profile: H2OProfile?, policy: any H2OPolicy
    ) throws -> H2OConfiguration {
        var own = self
        if case .share(let part) = budget {
            let plain = kinds.reduce(0) {
                $0 + $1.heads * ($1.widths.key + $1.widths.value) * Self.plainElement
            }
            own.budget = .bytes(max(Int(part * Double(context * plain)), 1))
        }
        guard packing == nil else { return own }
        own.packing = .dense
        // Keys that are turned at every step are not packed.
        guard case .bytes(let bytes) = own.budget, kinds.allSatisfy(\.attends),
            positions == .absolute
        else { return own }
        if frames == .profile, policy.suitsFrames, let profile, profile.packedGroupSize != nil {
            let narrow = Self.startsNarrow(bytes: bytes, undo: undo, attends: true)
            own.packing = try packing(
                in: bytes, of: narrow ? kinds.map(\.narrow) : kinds, by: profile, policy)
        } else {
            own.packing = try Self.packingWithoutFrames(of: kinds)
        }
        return own
    }

    /// Dense keys and packed values: packed keys would need a frame, and values need none.
    private static func packingWithoutFrames(of kinds: [LayerKind]) throws -> H2OPacking {
        let usual = try H2OPacking(valueBits: valueBitsWithoutFrames), rows = kinds.map(\.widths)
        return usual.fits(rows) ? usual : usual.fitting(rows) ?? .dense
    }

    /// How rows lose least in so many bytes of all layers; of those that lose hardly more, how most
    /// slots fit that a conversation can use.
    private func packing(
        in bytes: Int, of kinds: [LayerKind], by profile: H2OProfile, _ policy: any H2OPolicy
    ) throws -> H2OPacking {
        guard let groupSize = profile.packedGroupSize else { return .dense }
        let least = policy.leastBudget + Self.fewestChoices
        var choices: [(packing: H2OPacking, slots: Int, loss: Double)] = []
        for bits in Self.widths {
            let packing = try bits.map {
                try H2OPacking(keyBits: $0, valueBits: $0, groupSize: groupSize)
            }
            let stored = kinds.map { $0.stored(packing ?? .dense, isFramed: bits != nil) }
            let mean = slots(of: stored, in: bytes, policy).min() ?? 0
            guard mean >= least,
                let loss = try profile.loss(
                    mean: mean, least: least, bits: bits, context: context)
            else { continue }
            choices.append((packing ?? .dense, min(mean, context), loss))
        }
        let limit = (choices.map(\.loss).min() ?? 0) + Self.negligible
        let near = choices.filter { $0.loss <= limit }
        return near.max { ($0.slots, -$0.loss) < ($1.slots, -$1.loss) }?.packing ?? .dense
    }

    /// Slots per KV head of each layer, on average.
    func means(of kinds: [LayerKind], _ policy: any H2OPolicy) throws -> [Int] {
        let remembers = remainder || policy.usesEvictedMean
        switch budget {
        case .tokens(let count): return kinds.map { count - $0.widths.remainderSlots(remembers) }
        case .bytes(let bytes):
            let means = slots(of: kinds, in: bytes, policy)
            guard let none = zip(kinds, means).first(where: { $1 < 1 })?.0 else { return means }
            throw H2OError.configuration(
                "\(bytes) bytes leave no slot for each of \(none.heads) KV heads of "
                    + "\(none.widths.rowBytes) bytes a token in \(kinds.count) layers; make the budget "
                    + "larger.")
        case .share(let part):
            throw H2OError.configuration(
                "a share of \(part) is no number of slots before the model's own caches are "
                    + "known: caches(for:) makes bytes of it.")
        }
    }

    /// Slots per KV head of each layer that fit into a model's bytes; 0 where none do.
    ///
    /// Each layer has an equal part of the bytes. Layers that differ only in what they hold for a file
    /// have as many slots each instead: a profile then shares out the slots of all layers together.
    func slots(of kinds: [LayerKind], in bytes: Int, _ policy: any H2OPolicy) -> [Int] {
        let remembers = remainder || policy.usesEvictedMean
        func fitting(_ kinds: [LayerKind], _ bytes: Int) -> Int {
            mostSlots(in: bytes) { slots in
                kinds.reduce(0) {
                    $0 + $1.heads
                        * $1.widths.bytes(
                            ofSlots: slots, policy: policy, remembers: remembers, undo: undo)
                }
            }
        }
        let alike = Set(
            kinds.map {
                [$0.heads, $0.widths.slotBytes(policy, undo: undo), $0.widths.recentRowBytes]
            })
        guard alike.count > 1 else { return kinds.map { _ in fitting(kinds, bytes) } }
        return kinds.map { fitting([$0], bytes / kinds.count) }
    }
}
